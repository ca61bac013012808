"""Distributes the nodes' image to the hosts without it: sent from this machine, pulled, or built there.

Hosts need Docker but no registry. The failure of a host does not affect the others. Only layers that a host is missing
are sent, and an interrupted upload resumes. If several hosts need the same layers, a host that reaches the next by ssh
relays the stream to it, so that the bytes leave this machine once.
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
from labctl.system import human
from labctl.system.files import require_room
from labctl.system.parallel import map_hosts
from labctl.system.process import ProcessTimeout
from labctl.system.progress import At, Progress, waiting_for

WORTH = 32 << 20
"""Minimum bytes for which labctl tests if hosts reach each other."""
TURNS = 8
"""Maximum number of waits for another upload of the same file."""
Failures = dict[str, HostError]
"""Errors by the name of the host."""


class ImageTargets(Struct, frozen=True, kw_only=True):
    """The hosts to deliver an image to; ``addresses`` by which hosts reach each other, if not the inventory's."""

    hosts: Mapping[str, Connection]
    notice: Callable[[str], None]
    addresses: Mapping[str, str]

    def image_states(self, image: str) -> tuple[dict[str, HostImageState], Failures]:
        """Return the state of an image on each host, and the failures of hosts that did not answer."""
        return map_hosts(lambda connection: remote.image_state(connection, tagged(image)), self.hosts)


class Transfer(Struct, frozen=True, kw_only=True):
    """A stream of an image to a host, from this machine or relayed by the host of ``source``."""

    connection: Connection
    state: HostImageState
    image: Image
    held: int
    """Number of the lowest layers that the host has."""
    stream: ArchiveStream
    address: str
    """Address by which other hosts reach it; empty for the inventory's."""
    pace: float
    """Seconds between two progress lines."""
    source: Transfer | None = None

    @property
    def host(self) -> str:
        return self.connection.target.name

    @property
    def file(self) -> str:
        """Name of the uploaded file on the host, unique per engine as hosts may share a home."""
        return f"{self.stream.key[:32]}-{self.state.label}"


class ImageRejected(HostError):
    """An engine does not load an archive that arrived intact."""


def deliver(
    archive: Archive, image: Image, states: Mapping[str, HostImageState], targets: ImageTargets, *, whole: bool = False
) -> Failures:
    """Upload the image to these hosts at once and load it, again with all layers if rejected; return the failures.

    A host whose engine rejects an archive without the layers that it has gets all layers.
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
    failures = _transfer(find_routes(direct), notice)
    rejected = {name for name, failure in failures.items() if isinstance(failure, ImageRejected) and held[name]}
    if not rejected:
        return failures
    for name in rejected:
        notice(f"{failures.pop(name).message}; sending all layers")
    again = {name: state for name, state in states.items() if name in rejected}
    return failures | deliver(archive, image, again, targets, whole=True)


def _transfer(transfers: Mapping[str, Transfer], notice: Callable[[str], None]) -> Failures:
    """Carry out the transfers in parallel; then remove the files that relaying hosts kept; return the failures."""
    for line in describe_routes(transfers.values()):
        notice(line)
    sources = {transfer.source.host for transfer in transfers.values() if transfer.source}
    with waiting_for("loading", notice) as loading:
        _, failures = map_hosts(
            lambda transfer: install(transfer, loading, notice, keep=transfer.host in sources), transfers
        )
    kept = {name: transfers[name] for name in sources if name not in failures}
    map_hosts(lambda transfer: remote.remove(transfer.connection, transfer.file), kept)
    return failures


def find_routes(direct: Iterable[Transfer]) -> dict[str, Transfer]:
    """Return transfers by host; a large stream is relayed by the host before if that reaches it by ssh."""
    groups: dict[str, list[Transfer]] = {}
    for transfer in direct:
        groups.setdefault(transfer.stream.key, []).append(transfer)
    large = (group for group in groups.values() if group[0].stream.size >= WORTH)
    pairs = {after.host: (before, after) for group in large for before, after in pairwise(group)}
    reached, _ = map_hosts(
        lambda pair: remote.reaches(pair[0].connection, pair[1].connection, pair[1].address, pair[1].state), pairs
    )
    routed: dict[str, Transfer] = {}
    for group in groups.values():
        for transfer in group:
            source = routed[pairs[transfer.host][0].host] if reached.get(transfer.host) else None
            routed[transfer.host] = replace(transfer, source=source)
    return routed


def describe_routes(transfers: Iterable[Transfer]) -> Iterator[str]:
    """Yield a line for each stream: its size and layers, and the hosts in the order in which they relay it."""
    chains: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        before = chains.pop(transfer.source.host) if transfer.source else ()
        chains[transfer.host] = [*before, transfer]
    routes: dict[str, list[str]] = {}
    for first, *others in chains.values():
        count = len(first.image.layers)
        size = human.size(first.stream.size)
        content = f"image {first.image.name}: {size} with {count - first.held} of {count} layers"
        routes.setdefault(content, []).append(" -> ".join(transfer.host for transfer in (first, *others)))
    for content, ways in routes.items():
        relayed = any(" -> " in way for way in ways)
        yield f"{content} to {', '.join(ways)}" + (" (each relays to the next)" if relayed else "")


def install(transfer: Transfer, loading: At, notice: Callable[[str], None], *, keep: bool) -> None:
    """Upload and load an image, check its id, remove the file unless ``keep``. ImageRejected if not loaded."""
    upload(transfer, notice)
    connection, host, image = transfer.connection, transfer.host, transfer.image
    try:
        with loading(host):
            loaded = remote.load(connection, transfer.file, tagged(image.name))
    except HostError as error:
        # The file is complete: keep it for the next attempt.
        if isinstance(error, ProcessTimeout) or "no space left" in error.message.lower():
            raise
        intact = remote.is_whole(connection, transfer.file, transfer.stream)
        remote.remove(connection, transfer.file)
        if intact:
            raise ImageRejected(error.message, hint=error.hint, node=host) from error
        raise HostError(
            f"{host}: the upload of {image.name} was damaged, and is removed",
            hint="re-run to send it again; if that fails too, check that host's disk",
            node=host,
        ) from error
    if loaded not in image.ids or not keep:
        remote.remove(connection, transfer.file)
    if loaded not in image.ids:
        raise ImageRejected(f"{host}: its engine loaded {image.name} as {loaded}, not {min(image.ids)}", node=host)
    notice(f"{host}: image {image.name} is loaded")


def upload(transfer: Transfer, notice: Callable[[str], None]) -> None:
    """Upload the archive to the host, from where it stopped; a source host relays it first. HostError if partial."""
    size, received = transfer.stream.size, remote.size(transfer.connection, transfer.file)
    if received > size:
        remote.remove(transfer.connection, transfer.file)
        received = 0
    # During `docker load` it takes its space three times: as sent, as the engine unpacks it, and as layers.
    disks = ((transfer.state.home, size - received), (transfer.state.root, 2 * size))
    require_room("the image", [(room, needed) for room, needed in disks if room], transfer.host)
    if received:
        notice(f"{transfer.host}: resuming after {human.size(received)} of {human.size(size)}")
    progress = Progress(f"{transfer.host}: {transfer.image.name}", size, received, notice, every=transfer.pace)
    if transfer.source and received < size:
        received = relay(transfer, transfer.source, progress)
    for _ in range(TURNS):
        if received >= size:
            break
        progress.advance(received - progress.done)
        ours = remote.append(
            transfer.connection, transfer.file, received, report(transfer.stream.chunks(received), progress)
        )
        received = remote.size(transfer.connection, transfer.file)
        if ours:
            break
    if received != size:
        raise remote.failed(
            transfer.connection, "the image is incomplete", f"{human.size(received)} of {human.size(size)} received"
        )
    progress.finish()


def relay(transfer: Transfer, source: Transfer, progress: Progress) -> int:
    """Have the source host send the file on; return the bytes that the host then has; notice if it is not all."""
    reason = ""
    hop = remote.ssh_hop(transfer.connection, transfer.address, "append", transfer.file, str(progress.done))
    try:
        remote.relay(source.connection, source.file, transfer.stream.size, hop, progress)
    except HostError as error:
        reason = f" ({error.message})"
    received = remote.size(transfer.connection, transfer.file)
    if received < transfer.stream.size:
        share = f"{human.size(received)} of {human.size(transfer.stream.size)}"
        progress.notice(f"{transfer.host}: {source.host} relayed {share}{reason}; sending the rest from here")
    return received


def preview(image: str, how: str, targets: ImageTargets) -> str:
    """Return the plan's text on the delivery to hosts without the image; empty if all hosts that answer have it."""
    states, _ = targets.image_states(image)
    here = local.described(image) if how == "send" else None
    lacking = [name for name, state in states.items() if not (alike(state.image, here) if here else state.image)]
    if not lacking:
        return ""
    names = human.listed(lacking)
    if here and "@" not in image:
        return f"send image {image} ({human.size(here['Size'])} or less) to {names}"
    if how == "send" and packages.is_own(image):
        return f"build image {image} here and send it to {names}"
    return f"{'build' if how == 'build' else 'pull'} image {image} on {names}"


def send(image: str, targets: ImageTargets, directory: Path) -> Failures:
    """Send this machine's image to hosts that lack it; if missing here, they pull it or fail; return the failures.

    A copy of the image is written into ``directory`` meanwhile.
    """
    here = local.described(image)
    is_pullable = here is None and not packages.is_own(image) and not catalog.is_hashed(image)
    # An image that is named by its digest has no name in an archive.
    if is_pullable or "@" in image:
        return pull(image, targets)
    states, failures = targets.image_states(image)
    if here is None:
        return failures | {name: _not_found(image, name) for name, state in states.items() if state.image is None}
    lacking = {name: state for name, state in states.items() if not alike(state.image, here)}
    refused = {name: _not_labctls(image, name) for name, state in lacking.items() if _is_foreign(image, here, state)}
    failures |= refused
    missing = {name: state for name, state in lacking.items() if name not in refused}
    if not missing:
        return failures
    targets.notice(f"reading image {image} for {human.listed(missing)}")
    with local.spooled(image, directory, here["Size"], targets.notice) as archive:
        return failures | deliver(archive, archive.image(image), missing, targets)


def _not_found(image: str, host: str) -> HostError:
    hint = "labctl build, or labctl bundle load FILE"
    return HostError(f"{host}: image {image} not found, nor on this machine", hint=hint, node=host)


def _not_labctls(image: str, host: str) -> HostError:
    hint = f"on {host}: docker tag {image} another-name && docker image rm {image}"
    return HostError(f"{host}: image {image} was not built by labctl, so it is not replaced", hint=hint, node=host)


def hand_out(archive: Archive, image: str, targets: ImageTargets) -> Failures:
    """Send an archive's image to hosts whose image of that name is missing or has another id; return failures."""
    ids = archive.image(image).ids
    states, failures = targets.image_states(image)
    lacking = {name: state for name, state in states.items() if not state.image or state.image["Id"] not in ids}
    return failures | deliver(archive, archive.image(image), lacking, targets)


def pull(image: str, targets: ImageTargets) -> Failures:
    """Pull the image on hosts without it; return failures, also hosts whose image differs from the first host's."""
    failures = build(image, targets, lambda name: remote.pull(targets.hosts[name], image), "pulling")
    states, _ = targets.image_states(image)
    present = {name: state.image for name, state in states.items() if name not in failures and state.image}
    first = next(iter(present), "")
    return failures | {
        name: remote.failed(
            targets.hosts[name], f"image {image} differs from the one on {first}", "", f"docker pull {image}"
        )
        for name, pulled in present.items()
        if not alike(pulled, present[first])
    }


def build(image: str, targets: ImageTargets, build_on: Callable[[str], object], doing: str = "building") -> Failures:
    """Build the image on each host without it, by ``build_on`` with the host's name; return the hosts that failed."""
    states, failures = targets.image_states(image)
    lacking = {name: name for name, state in states.items() if state.image is None}
    for name in lacking:
        targets.notice(f"{name}: image {image} not found; {doing} it")
    return failures | map_hosts(build_on, lacking)[1]


def alike(image: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Tell if two engines describe the same image, by id or content, as ids depend on the store; False for None."""
    if image is None or image["Id"] == other["Id"]:
        return image is not None
    return _content(image) == _content(other)


def _is_foreign(tag: str, here: Mapping[str, Any], state: HostImageState) -> bool:
    """Tell if sending this machine's image, built by labctl, would take the tag of another image on the host."""
    return bool(state.image) and _is_labctls(tag, here) and not _is_labctls(tag, state.image or {})


def _is_labctls(tag: str, image: Mapping[str, Any]) -> bool:
    return catalog.is_labctls(tag, (image.get("Config") or {}).get("Labels") or {})


def _content(image: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return layers, creation time and non-empty configuration of an image, by which engines' images compare."""
    config = {key: value for key, value in (image.get("Config") or {}).items() if value}
    return image["RootFS"].get("Layers") or [], image.get("Created") or "", config
