"""An image from an archive here to hosts: only layers that they lack, on from where an earlier attempt stopped.

Of hosts that lack the same layers, one that reaches the next by ssh itself hands on what it gets while it gets it, so
that the bytes leave this machine once. Where it does not, or the link breaks, the next one is sent them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from labctl.connection import Connection
from labctl.errors import HostError
from labctl.model import Event
from labctl.progress import At, Progress, amount, waiting_for
from labctl.shell import OutOfTime
from labctl.shipping import host
from labctl.shipping.archive import Archive, Cargo, Image, tagged, told
from labctl.shipping.host import Standing
from labctl.side_by_side import attempt

Emit = Callable[[Event], None]

WORTH = 32 << 20
"""Bytes from which on it pays to ask hosts whether they reach each other."""

TURNS = 8
"""How often another attempt is waited for that brings a host the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consignment:
    """What a host is to get: from this machine, or from another host that reaches it by ``hop``."""

    connection: Connection
    standing: Standing
    image: Image
    held: int
    """How many of the lowest layers it has."""
    cargo: Cargo
    pace: float = 5.0
    """Seconds between two lines about it."""
    source: Consignment | None = None
    hop: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        return self.connection.target.name

    @property
    def file(self) -> str:
        """What it is called on the host; hosts may share a home."""
        return f"{self.cargo.key[:32]}-{self.standing.label}"


def deliver(
    archive: Archive,
    image: Image,
    hosts: Mapping[str, tuple[Connection, Standing]],
    addresses: Mapping[str, str],
    emit: Emit,
    *,
    whole: bool = False,
) -> dict[str, HostError]:
    """Bring the image to all of these hosts, side by side; returns why it is not on which of them.

    A host whose engine refuses an archive without the layers that it has gets the whole one.
    """
    held = {name: 0 if whole else one.held(image) for name, (_, one) in hosts.items()}
    cargoes = {count: archive.cargo(image, count) for count in set(held.values())}
    pace = max(5.0, len(hosts))
    alone = [
        Consignment(
            connection=connection, standing=one, image=image, held=held[name], cargo=cargoes[held[name]], pace=pace
        )
        for name, (connection, one) in hosts.items()
    ]
    routed = {one.host: one for one in route(alone, addresses)}
    for line in itinerary(image, routed.values()):
        emit(Event(kind="notice", text=line))
    sources = {one.source.host: one.source for one in routed.values() if one.source}
    with waiting_for("loading", lambda text: emit(Event(kind="notice", text=text))) as loading:
        _, failures = attempt(lambda one: bring(one, loading, emit, keep=one.host in sources), routed)
    attempt(
        lambda one: host.forget(one.connection, one.file),
        {name: one for name, one in sources.items() if name not in failures},
    )
    refused = {name for name, failure in failures.items() if isinstance(failure, Refused) and held[name]}
    if not refused:
        return failures
    for name in refused:
        emit(Event(kind="notice", text=f"{failures[name].message}; it is sent all layers", node=name))
    others = {name: failure for name, failure in failures.items() if name not in refused}
    again = {name: one for name, one in hosts.items() if name in refused}
    return others | deliver(archive, image, again, addresses, emit, whole=True)


class Refused(HostError):
    """An engine does not load an archive that is as it was sent."""


# --- the ways ------------------------------------------------------------------------------------------------


def route(consignments: Iterable[Consignment], addresses: Mapping[str, str]) -> tuple[Consignment, ...]:
    """Each from the one before it that is to get the same, where that reaches it; else from here."""
    groups: dict[str, list[Consignment]] = {}
    for one in consignments:
        groups.setdefault(one.cargo.key, []).append(one)
    pairs = [pair for group in groups.values() if group[0].cargo.size >= WORTH for pair in pairwise(group)]

    def hop(pair: tuple[Consignment, Consignment]) -> tuple[str, ...]:
        before, after = pair
        words = host.hop(after.connection, addresses.get(after.host, ""))
        return words if host.reaches(before.connection, words, after.connection, after.standing) else ()

    hops, _ = attempt(hop, {after.host: (before, after) for before, after in pairs})
    found: dict[str, Consignment] = {}
    for group in groups.values():
        for index, one in enumerate(group):
            words = hops.get(one.host, ())
            found[one.host] = replace(one, source=found[group[index - 1].host], hop=words) if words else one
    return tuple(found.values())


def itinerary(image: Image, routed: Iterable[Consignment]) -> Iterator[str]:
    """What is sent where, for people."""
    chains: dict[str, list[Consignment]] = {}
    for one in routed:
        chains[one.host] = [*(chains.pop(one.source.host) if one.source else ()), one]
    cargoes: dict[str, list[list[Consignment]]] = {}
    for chain in chains.values():
        cargoes.setdefault(chain[0].cargo.key, []).append(chain)
    for group in cargoes.values():
        first = group[0][0]
        missing = f"{len(image.layers) - first.held} of {len(image.layers)} layers"
        what = f"image {image.name}: {amount(first.cargo.size)} with {missing}"
        ways = ", ".join(" -> ".join(one.host for one in chain) for chain in group)
        yield f"{what} to {ways}" + (" (each hands them on to the next)" if any(len(c) > 1 for c in group) else "")


# --- one host ------------------------------------------------------------------------------------------------


def bring(one: Consignment, loading: At, emit: Emit, *, keep: bool) -> None:
    """Have it on the host, loaded and found to be the same; its file there goes unless it is to be kept."""
    supply(one, emit)
    try:
        with loading(one.host):
            found = host.load(one.connection, one.file, tagged(one.image.name))
    except HostError as error:
        # What came is whole: it is kept for the next attempt.
        if isinstance(error, OutOfTime) or "no space left" in error.message.lower():
            raise
        intact = host.is_whole(one.connection, one.file, one.cargo)
        host.forget(one.connection, one.file)
        if intact:
            raise Refused(error.message, hint=error.hint, node=one.host) from error
        raise HostError(
            f"{one.host}: what came of {one.image.name} is damaged, and is removed",
            hint="the same command again sends it anew; where that repeats itself, check that host's disk",
            node=one.host,
        ) from error
    if found not in one.image.ids:
        host.forget(one.connection, one.file)
        raise Refused(
            f"{one.host}: its engine loaded {one.image.name} as {found}, not {min(one.image.ids)}", node=one.host
        )
    if not keep:
        host.forget(one.connection, one.file)
    emit(Event(kind="notice", text=f"{one.host}: image {one.image.name} is loaded", node=one.host))


def supply(one: Consignment, emit: Emit) -> None:
    """Have the file on the host, as far as it is not there yet. HostError where it does not get there."""
    size = one.cargo.size
    there = host.there(one.connection, one.file)
    if there > size:
        host.forget(one.connection, one.file)
        there = 0
    host.require_room(one.connection, one.standing, size, there)

    def notice(text: str) -> None:
        emit(Event(kind="notice", text=text, node=one.host))

    if there:
        notice(f"{one.host}: {amount(there)} of {amount(size)} are there already")
    progress = Progress(f"{one.host}: {one.image.name}", size, there, notice, every=one.pace)
    if one.source and there < size:
        there = pass_on(one, one.source, there, progress)
    mine, turns = False, 0
    while there < size and not mine and turns < TURNS:
        progress.advance(there - progress.done)
        mine = host.take(one.connection, one.file, there, told(one.cargo.chunks(there), progress))
        there = host.there(one.connection, one.file)
        turns += 1
    if there != size:
        raise host.failed(
            one.connection, "the image did not come whole", f"{amount(there)} of {amount(size)} are there"
        )
    progress.finish()


def pass_on(one: Consignment, source: Consignment, there: int, progress: Progress) -> int:
    """Have another host hand the file on; returns how much of it is there then, as links break."""
    reason = ""
    try:
        host.take_from(
            source.connection,
            source.file,
            one.cargo.size,
            one.hop,
            one.file,
            there,
            lambda place: progress.advance(place - progress.done),
        )
    except HostError as error:
        reason = f" ({error.message})"
    there = host.there(one.connection, one.file)
    if there < one.cargo.size:
        progress.notice(
            f"{one.host}: {source.host} handed {amount(there)} of {amount(one.cargo.size)} on{reason}; "
            "the rest comes from here"
        )
    return there
