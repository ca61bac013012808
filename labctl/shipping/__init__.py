"""Distributes the nodes' image to hosts: sent from this machine, pulled, or built there. A host that has it is skipped.

Hosts need Docker for it and no registry. The failure of one host does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labctl import images
from labctl.connection import Connection
from labctl.errors import HostError
from labctl.model import Event
from labctl.progress import amount, listed
from labctl.shipping import here, host
from labctl.shipping.archive import Archive, tagged
from labctl.shipping.delivery import Emit, deliver
from labctl.shipping.host import HostImageState
from labctl.side_by_side import attempt

Failures = dict[str, HostError]
"""By host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The hosts that are to have an image; ``addresses`` if they reach each other by others than the inventory's."""

    hosts: Mapping[str, Connection]
    emit: Emit
    addresses: Mapping[str, str]

    def image_states(self, image: str) -> tuple[dict[str, HostImageState], Failures]:
        """What each host has, and which did not answer."""
        return attempt(lambda connection: host.image_state(connection, tagged(image)), self.hosts)

    def deliver(self, archive: Archive, image: str, names: Mapping[str, HostImageState]) -> Failures:
        hosts = {name: (self.hosts[name], state) for name, state in names.items()}
        return deliver(archive, archive.image(image), hosts, self.addresses, self.emit)


def preview(image: str, how: str, receivers: Receivers) -> str:
    """What would be done for the hosts without the image; empty if nothing. ``how`` is the value of LAB_IMAGE_FROM."""
    states, _ = receivers.image_states(image)
    own = here.described(image) if how == "send" else None
    lacking = [name for name, state in states.items() if not (alike(state.image, own) if own else state.image)]
    if not lacking:
        return ""
    names = listed(lacking)
    if own and "@" not in image:
        return f"send image {image} ({amount(own['Size'])} or less) to {names}"
    if how == "send" and images.name_of(image):
        return f"build image {image} here and send it to {names}"
    return f"{'build' if how == 'build' else 'pull'} image {image} on {names}"


def send(image: str, receivers: Receivers, directory: Path) -> Failures:
    """Send this machine's image to the hosts without it. If it is not here, they pull it.

    ``directory`` holds a copy of it meanwhile.
    """
    own = here.described(image)
    # An image that is named by its digest keeps no name in an archive.
    if (own is None and not images.name_of(image)) or "@" in image:
        return pull(image, receivers)
    states, failures = receivers.image_states(image)
    if own is None:
        hint = "labctl build, or labctl bundle load FILE"
        return failures | {
            name: HostError(f"{name}: image {image} not found, nor on this machine", hint=hint, node=name)
            for name, state in states.items()
            if state.image is None
        }
    lacking = {name: state for name, state in states.items() if not alike(state.image, own)}
    if not lacking:
        return failures

    def notice(text: str) -> None:
        receivers.emit(Event(kind="notice", text=text))

    notice(f"reading image {image} for {listed(lacking)}")
    with here.spooled(image, directory, own["Size"], notice) as archive:
        return failures | receivers.deliver(archive, image, lacking)


def hand_out(archive: Archive, image: str, receivers: Receivers) -> Failures:
    """Send an image of an archive to the hosts without it."""
    ids = archive.image(image).ids
    states, failures = receivers.image_states(image)
    lacking = {name: state for name, state in states.items() if not state.image or state.image["Id"] not in ids}
    return failures | receivers.deliver(archive, image, lacking)


def pull(image: str, receivers: Receivers) -> Failures:
    """Have each host without the image pull it; those that then have another image than the first host are failures."""
    failures = build(image, receivers, lambda name: host.pull(receivers.hosts[name], image), "pulling")
    states, _ = receivers.image_states(image)
    found = {name: state.image for name, state in states.items() if name not in failures and state.image}
    first = next(iter(found), "")
    return failures | {
        name: host.failed(
            receivers.hosts[name], f"image {image} differs from the one on {first}", "", f"docker pull {image}"
        )
        for name, one in found.items()
        if not alike(one, found[first])
    }


def build(image: str, receivers: Receivers, build_on: Callable[[str], object], doing: str = "building") -> Failures:
    """Have it built on each host without it, by a function that is given the host's name."""
    states, failures = receivers.image_states(image)
    lacking = {name: name for name, state in states.items() if state.image is None}
    for name in lacking:
        receivers.emit(Event(kind="notice", text=f"{name}: image {image} not found; {doing} it", node=name))
    return failures | attempt(build_on, lacking)[1]


def alike(found: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two engines describe the same image; they give it different ids if they store images differently."""
    if found is None or found["Id"] == other["Id"]:
        return found is not None
    return all(
        _filled(found, *keys) == _filled(other, *keys) for keys in (("RootFS", "Layers"), ("Created",), ("Config",))
    )


def _filled(document: Any, *keys: str) -> Any:
    """What a description has below these keys, without empty values: engines differ in those."""
    for key in keys:
        document = document.get(key) or {}
    return {key: value for key, value in document.items() if value} if isinstance(document, dict) else document
