"""An image from an archive here to hosts: only layers that they lack, on from where an earlier attempt stopped.

Of hosts that lack the same layers, one that reaches the next by ssh itself hands on what it gets while it gets it, so
that the bytes leave this machine once. Where it does not, or the link breaks, the next one is sent them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from labctl.errors import HostError
from labctl.hosts.ssh import Connection
from labctl.images import catalog, local, remote
from labctl.images.archive import Archive, Cargo, Image, tagged, told
from labctl.images.remote import Standing
from labctl.model import Event
from labctl.system.parallel import attempt
from labctl.system.process import ProcessTimeout
from labctl.system.progress import At, Progress, amount, listed, waiting_for

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
        lambda one: remote.forget(one.connection, one.file),
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
        words = remote.hop(after.connection, addresses.get(after.host, ""))
        return words if remote.reaches(before.connection, words, after.connection, after.standing) else ()

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
            found = remote.load(one.connection, one.file, tagged(one.image.name))
    except HostError as error:
        # What came is whole: it is kept for the next attempt.
        if isinstance(error, ProcessTimeout) or "no space left" in error.message.lower():
            raise
        intact = remote.is_whole(one.connection, one.file, one.cargo)
        remote.forget(one.connection, one.file)
        if intact:
            raise Refused(error.message, hint=error.hint, node=one.host) from error
        raise HostError(
            f"{one.host}: what came of {one.image.name} is damaged, and is removed",
            hint="the same command again sends it anew; where that repeats itself, check that host's disk",
            node=one.host,
        ) from error
    if found not in one.image.ids:
        remote.forget(one.connection, one.file)
        raise Refused(
            f"{one.host}: its engine loaded {one.image.name} as {found}, not {min(one.image.ids)}", node=one.host
        )
    if not keep:
        remote.forget(one.connection, one.file)
    emit(Event(kind="notice", text=f"{one.host}: image {one.image.name} is loaded", node=one.host))


def supply(one: Consignment, emit: Emit) -> None:
    """Have the file on the host, as far as it is not there yet. HostError where it does not get there."""
    size = one.cargo.size
    there = remote.there(one.connection, one.file)
    if there > size:
        remote.forget(one.connection, one.file)
        there = 0
    remote.require_room(one.connection, one.standing, size, there)

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
        mine = remote.take(one.connection, one.file, there, told(one.cargo.chunks(there), progress))
        there = remote.there(one.connection, one.file)
        turns += 1
    if there != size:
        raise remote.failed(
            one.connection, "the image did not come whole", f"{amount(there)} of {amount(size)} are there"
        )
    progress.finish()


def pass_on(one: Consignment, source: Consignment, there: int, progress: Progress) -> int:
    """Have another host hand the file on; returns how much of it is there then, as links break."""
    reason = ""
    try:
        remote.take_from(
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
    there = remote.there(one.connection, one.file)
    if there < one.cargo.size:
        progress.notice(
            f"{one.host}: {source.host} handed {amount(there)} of {amount(one.cargo.size)} on{reason}; "
            "the rest comes from here"
        )
    return there


Failures = dict[str, HostError]
"""Why it is not on which host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTargets:
    """The hosts that are to have it, by name; ``addresses`` where they reach each other by others than the list's."""

    hosts: Mapping[str, Connection]
    emit: Emit
    addresses: Mapping[str, str]

    def look(self, image: str) -> tuple[dict[str, Standing], Failures]:
        """What each host has, and why some do not say."""
        return attempt(lambda connection: remote.look(connection, tagged(image)), self.hosts)

    def notice(self, name: str, text: str) -> None:
        self.emit(Event(kind="notice", text=f"{name}: {text}", node=name))


def foreseen(image: str, how: str, receivers: ImageTargets) -> str:
    """What would be done for the hosts that lack the image, of which some may not say; empty where none does.

    ``how`` is what LAB_IMAGE_FROM says.
    """
    standings, _ = receivers.look(image)
    own = local.described(image) if how == "send" else None
    lacking = [name for name, one in standings.items() if not (alike(one.image, own) if own else one.image)]
    if not lacking:
        return ""
    names = listed(lacking)
    if own and "@" not in image:
        return f"send image {image} ({amount(own['Size'])} or less) to {names}"
    if how == "send" and catalog.name_of(image):
        return f"build image {image} here and send it to {names}"
    return f"{'build' if how == 'build' else 'pull'} image {image} on {names}"


def send(image: str, receivers: ImageTargets, directory: Path) -> Failures:
    """Send this machine's image to the hosts that lack it. One of a registry that is not here, they pull.

    ``directory`` is where a copy of it has room meanwhile.
    """
    own = local.described(image)
    if own is None and catalog.name_of(image):
        return absent(image, receivers)
    # An image that is named by its digest alone keeps no name in an archive.
    if own is None or "@" in image:
        return pull(image, receivers)
    standings, failures = receivers.look(image)
    lacking = {name: one for name, one in standings.items() if not alike(one.image, own)}

    def notice(text: str) -> None:
        receivers.emit(Event(kind="notice", text=text))

    if lacking:
        many = "1 host lacks" if len(lacking) == 1 else f"{len(lacking)} hosts lack"
        notice(f"{many} image {image}, or layers of it: reading it here")
        with local.spooled(image, directory, own["Size"], notice) as archive:
            failures |= deliver(
                archive, archive.image(image), together(receivers, lacking), receivers.addresses, receivers.emit
            )
    return failures


def absent(image: str, receivers: ImageTargets) -> Failures:
    """The hosts that lack an image which this machine lacks too, and which no registry has."""
    standings, failures = receivers.look(image)
    lacking = (name for name, one in standings.items() if one.image is None)
    return failures | {
        name: HostError(
            f"{name}: image {image} is neither there nor on this machine",
            hint="labctl build, or labctl bundle load FILE",
            node=name,
        )
        for name in lacking
    }


def hand_out(archive: Archive, image: str, receivers: ImageTargets) -> Failures:
    """Send an image of an archive to the hosts that lack it."""
    inside = archive.image(image)
    standings, failures = receivers.look(image)
    lacking = {name: one for name, one in standings.items() if not one.image or one.image["Id"] not in inside.ids}
    return failures | deliver(archive, inside, together(receivers, lacking), receivers.addresses, receivers.emit)


def pull(image: str, receivers: ImageTargets) -> Failures:
    """Have each host that lacks the image pull it; those that then have another than the first host are failures."""
    failures = on_each_lacking(image, receivers, "pulled", lambda name: remote.pull(receivers.hosts[name], image))
    standings, _ = receivers.look(image)
    there = {name: one.image for name, one in standings.items() if name not in failures and one.image}
    first = next(iter(there), "")
    return failures | {
        name: remote.failed(receivers.hosts[name], f"its {image} is another than {first}'s", "", f"docker pull {image}")
        for name, found in there.items()
        if not alike(found, there[first])
    }


def build(image: str, receivers: ImageTargets, build_on: Callable[[str], object]) -> Failures:
    """Have it built on each host that lacks it, by a function that is given the host's name."""
    return on_each_lacking(image, receivers, "built", build_on)


def on_each_lacking(image: str, receivers: ImageTargets, done: str, work: Callable[[str], object]) -> Failures:
    standings, failures = receivers.look(image)
    lacking = {name: name for name, one in standings.items() if one.image is None}
    for name in lacking:
        receivers.notice(name, f"image {image} is not there: it is {done} there")
    return failures | attempt(work, lacking)[1]


def together(receivers: ImageTargets, standings: Mapping[str, Standing]) -> dict[str, tuple[Connection, Standing]]:
    return {name: (receivers.hosts[name], one) for name, one in standings.items()}


def alike(found: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two engines describe the same image; they give it different ids where they store images differently."""
    if found is None or found["Id"] == other["Id"]:
        return found is not None
    return all(said(found, *keys) == said(other, *keys) for keys in (("RootFS", "Layers"), ("Created",), ("Config",)))


def said(document: Any, *keys: str) -> Any:
    """What a description says below these keys, without what it says nothing of: engines differ in that."""
    for key in keys:
        document = document.get(key) or {}
    return {key: value for key, value in document.items() if value} if isinstance(document, dict) else document
