"""Distributes the nodes' image to hosts: sent from this machine, pulled, or built there. A host that has it is skipped.

Hosts need Docker for it and no registry. The failure of one host does not affect the others. Only layers that a host
does not have are sent, resumed where an earlier upload stopped. Of hosts that need the same layers, one that reaches
the next by ssh relays what it receives, so that the bytes leave this machine once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.images import catalog, local, packages, remote
from labctl.backends.docker.images.archive import Archive, ArchiveStream, Image, report, tagged
from labctl.backends.docker.images.remote import HostImageState
from labctl.errors import HostError
from labctl.system.files import require_room
from labctl.system.parallel import map_hosts
from labctl.system.process import ProcessTimeout
from labctl.system.progress import At, Progress, amount, listed, waiting_for

WORTH = 32 << 20
"""Bytes from which on it pays to ask hosts whether they reach each other."""
TURNS = 8
"""How often to wait for another upload of the same file."""
Failures = dict[str, HostError]
"""By host."""


class ImageTargets(Struct, frozen=True, kw_only=True):
    """The hosts that are to have an image; ``addresses`` if they reach each other by others than the inventory's."""

    hosts: Mapping[str, Connection]
    notice: Callable[[str], None]
    addresses: Mapping[str, str]

    def image_states(self, image: str) -> tuple[dict[str, HostImageState], Failures]:
        """What each host has, and which did not answer."""
        return map_hosts(lambda connection: remote.image_state(connection, tagged(image)), self.hosts)


class Transfer(Struct, frozen=True, kw_only=True):
    """What a host is to receive: from this machine, or relayed by the host of ``source``."""

    connection: Connection
    state: HostImageState
    image: Image
    held: int
    """How many of the lowest layers the host has."""
    stream: ArchiveStream
    address: str
    """Where other hosts reach it; empty: the inventory's."""
    pace: float
    """Seconds between two progress lines."""
    source: Transfer | None = None

    @property
    def host(self) -> str:
        return self.connection.target.name

    @property
    def file(self) -> str:
        """Its name on the host; hosts may share a home."""
        return f"{self.stream.key[:32]}-{self.state.label}"


class ImageRejected(HostError):
    """An engine does not load an archive that arrived intact."""


def deliver(
    archive: Archive, image: Image, states: Mapping[str, HostImageState], targets: ImageTargets, *, whole: bool = False
) -> Failures:
    """Upload the image to these hosts in parallel and load it.

    A host whose engine rejects an archive without the layers that it has gets the whole one.
    """
    notice = targets.notice
    held = {name: 0 if whole else state.held(image) for name, state in states.items()}
    streams = {count: archive.stream(image, count) for count in set(held.values())}
    direct = [
        Transfer(
            connection=targets.hosts[name],
            state=state,
            image=image,
            held=held[name],
            stream=streams[held[name]],
            address=targets.addresses.get(name, ""),
            pace=max(5.0, len(states)),
        )
        for name, state in states.items()
    ]
    transfers = find_routes(direct)
    for line in describe_routes(transfers.values()):
        notice(line)
    sources = {one.source.host for one in transfers.values() if one.source}
    with waiting_for("loading", notice) as loading:
        _, failures = map_hosts(lambda one: install(one, loading, notice, keep=one.host in sources), transfers)
    kept = {name: transfers[name] for name in sources if name not in failures}
    map_hosts(lambda one: remote.remove(one.connection, one.file), kept)
    rejected = {name for name, failure in failures.items() if isinstance(failure, ImageRejected) and held[name]}
    if not rejected:
        return failures
    for name in rejected:
        notice(f"{failures.pop(name).message}; sending all layers")
    again = {name: state for name, state in states.items() if name in rejected}
    return failures | deliver(archive, image, again, targets, whole=True)


def find_routes(direct: Iterable[Transfer]) -> dict[str, Transfer]:
    """By host; each has for its source the one before it with the same stream, if that reaches it by ssh."""
    groups: dict[str, list[Transfer]] = {}
    for one in direct:
        groups.setdefault(one.stream.key, []).append(one)
    large = (group for group in groups.values() if group[0].stream.size >= WORTH)
    pairs = {after.host: (before, after) for group in large for before, after in pairwise(group)}
    reached, _ = map_hosts(
        lambda pair: remote.reaches(pair[0].connection, pair[1].connection, pair[1].address, pair[1].state), pairs
    )
    routed: dict[str, Transfer] = {}
    for group in groups.values():
        for one in group:
            source = routed[pairs[one.host][0].host] if reached.get(one.host) else None
            routed[one.host] = replace(one, source=source)
    return routed


def describe_routes(transfers: Iterable[Transfer]) -> Iterator[str]:
    """What is sent where, for people."""
    chains: dict[str, list[Transfer]] = {}
    for one in transfers:
        chains[one.host] = [*(chains.pop(one.source.host) if one.source else ()), one]
    routes: dict[str, list[str]] = {}
    for first, *others in chains.values():
        count = len(first.image.layers)
        what = f"image {first.image.name}: {amount(first.stream.size)} with {count - first.held} of {count} layers"
        routes.setdefault(what, []).append(" -> ".join(one.host for one in (first, *others)))
    for what, ways in routes.items():
        yield f"{what} to {', '.join(ways)}" + (
            " (each relays to the next)" if any(" -> " in way for way in ways) else ""
        )


def install(one: Transfer, loading: At, notice: Callable[[str], None], *, keep: bool) -> None:
    """Upload the image, load it and compare its id; the uploaded file is removed unless others are relayed it."""
    upload(one, notice)
    try:
        with loading(one.host):
            found = remote.load(one.connection, one.file, tagged(one.image.name))
    except HostError as error:
        # What arrived is whole: keep it for the next attempt.
        if isinstance(error, ProcessTimeout) or "no space left" in error.message.lower():
            raise
        intact = remote.is_whole(one.connection, one.file, one.stream)
        remote.remove(one.connection, one.file)
        if intact:
            raise ImageRejected(error.message, hint=error.hint, node=one.host) from error
        raise HostError(
            f"{one.host}: the upload of {one.image.name} was damaged, and is removed",
            hint="re-run to send it again; if that fails too, check that host's disk",
            node=one.host,
        ) from error
    if found not in one.image.ids or not keep:
        remote.remove(one.connection, one.file)
    if found not in one.image.ids:
        raise ImageRejected(
            f"{one.host}: its engine loaded {one.image.name} as {found}, not {min(one.image.ids)}", node=one.host
        )
    notice(f"{one.host}: image {one.image.name} is loaded")


def upload(one: Transfer, notice: Callable[[str], None]) -> None:
    """Have the whole archive on the host, from its source and from here. HostError if it does not get there."""
    size, received = one.stream.size, remote.size(one.connection, one.file)
    if received > size:
        remote.remove(one.connection, one.file)
        received = 0
    # During `docker load` it is there three times: as sent, as the engine unpacks it, and as layers.
    disks = ((one.state.home, size - received), (one.state.root, 2 * size))
    require_room("the image", [(room, needed) for room, needed in disks if room], one.host)
    if received:
        notice(f"{one.host}: resuming after {amount(received)} of {amount(size)}")
    progress = Progress(f"{one.host}: {one.image.name}", size, received, notice, every=one.pace)
    if one.source and received < size:
        received = relay(one, one.source, progress)
    for _ in range(TURNS):
        if received >= size:
            break
        progress.advance(received - progress.done)
        ours = remote.append(one.connection, one.file, received, report(one.stream.chunks(received), progress))
        received = remote.size(one.connection, one.file)
        if ours:
            break
    if received != size:
        raise remote.failed(one.connection, "the image is incomplete", f"{amount(received)} of {amount(size)} received")
    progress.finish()


def relay(one: Transfer, source: Transfer, progress: Progress) -> int:
    """Have the source host pass the file on; returns how much has arrived when it is done or its connection broke."""
    reason = ""
    hop = remote.ssh_hop(one.connection, one.address, "append", one.file, str(progress.done))
    try:
        remote.relay(source.connection, source.file, one.stream.size, hop, progress)
    except HostError as error:
        reason = f" ({error.message})"
    received = remote.size(one.connection, one.file)
    if received < one.stream.size:
        share = f"{amount(received)} of {amount(one.stream.size)}"
        progress.notice(f"{one.host}: {source.host} relayed {share}{reason}; sending the rest from here")
    return received


def preview(image: str, how: str, targets: ImageTargets) -> str:
    """What would be done for the hosts without the image; empty if nothing. ``how`` is the value of LAB_IMAGE_FROM."""
    states, _ = targets.image_states(image)
    own = local.described(image) if how == "send" else None
    lacking = [name for name, state in states.items() if not (alike(state.image, own) if own else state.image)]
    if not lacking:
        return ""
    names = listed(lacking)
    if own and "@" not in image:
        return f"send image {image} ({amount(own['Size'])} or less) to {names}"
    if how == "send" and packages.is_own(image):
        return f"build image {image} here and send it to {names}"
    return f"{'build' if how == 'build' else 'pull'} image {image} on {names}"


def send(image: str, targets: ImageTargets, directory: Path) -> Failures:
    """Send this machine's image to the hosts without it. If it is not here, they pull it.

    ``directory`` holds a copy of it meanwhile.
    """
    own = local.described(image)
    # An image that is named by its digest keeps no name in an archive.
    if (own is None and not packages.is_own(image) and not catalog.is_hashed(image)) or "@" in image:
        return pull(image, targets)
    states, failures = targets.image_states(image)
    if own is None:
        hint = "labctl build, or labctl bundle load FILE"
        return failures | {
            name: HostError(f"{name}: image {image} not found, nor on this machine", hint=hint, node=name)
            for name, state in states.items()
            if state.image is None
        }
    lacking = {name: state for name, state in states.items() if not alike(state.image, own)}
    foreign = {name for name, state in lacking.items() if state.image and _replaces_anothers(image, own, state.image)}
    failures |= {
        name: HostError(
            f"{name}: image {image} there is not labctl's; it is not replaced",
            hint=f"on {name}: docker tag {image} another-name && docker image rm {image}",
            node=name,
        )
        for name in foreign
    }
    lacking = {name: state for name, state in lacking.items() if name not in foreign}
    if not lacking:
        return failures
    targets.notice(f"reading image {image} for {listed(lacking)}")
    with local.spooled(image, directory, own["Size"], targets.notice) as archive:
        return failures | deliver(archive, archive.image(image), lacking, targets)


def hand_out(archive: Archive, image: str, targets: ImageTargets) -> Failures:
    """Send an image of an archive to the hosts without it."""
    ids = archive.image(image).ids
    states, failures = targets.image_states(image)
    lacking = {name: state for name, state in states.items() if not state.image or state.image["Id"] not in ids}
    return failures | deliver(archive, archive.image(image), lacking, targets)


def pull(image: str, targets: ImageTargets) -> Failures:
    """Have each host without the image pull it; those that then have another image than the first host are failures."""
    failures = build(image, targets, lambda name: remote.pull(targets.hosts[name], image), "pulling")
    states, _ = targets.image_states(image)
    found = {name: state.image for name, state in states.items() if name not in failures and state.image}
    first = next(iter(found), "")
    return failures | {
        name: remote.failed(
            targets.hosts[name], f"image {image} differs from the one on {first}", "", f"docker pull {image}"
        )
        for name, one in found.items()
        if not alike(one, found[first])
    }


def build(image: str, targets: ImageTargets, build_on: Callable[[str], object], doing: str = "building") -> Failures:
    """Have it built on each host without it, by a function that is given the host's name."""
    states, failures = targets.image_states(image)
    lacking = {name: name for name, state in states.items() if state.image is None}
    for name in lacking:
        targets.notice(f"{name}: image {image} not found; {doing} it")
    return failures | map_hosts(build_on, lacking)[1]


def alike(found: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two engines describe the same image; they give it different ids if they store images differently."""
    if found is None or found["Id"] == other["Id"]:
        return found is not None
    return _content(found) == _content(other)


def _replaces_anothers(tag: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether an image that labctl built would take the tag of one that it did not build."""
    here, there = (catalog.is_labctls(tag, (one.get("Config") or {}).get("Labels") or {}) for one in (ours, theirs))
    return here and not there


def _content(image: Mapping[str, Any]) -> tuple[Any, ...]:
    """Layers, time and configuration, without empty values: engines differ in those."""
    config = {key: value for key, value in (image.get("Config") or {}).items() if value}
    return image["RootFS"].get("Layers") or [], image.get("Created") or "", config
