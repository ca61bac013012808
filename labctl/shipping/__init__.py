"""The nodes' image on every host: sent from this machine, pulled, or built there; what is there already stays as it is.

Nothing is needed for it on the hosts but Docker, and no registry. A host that cannot have it harms no other.
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
from labctl.shipping.host import Standing
from labctl.side_by_side import attempt

Failures = dict[str, HostError]
"""Why it is not on which host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The hosts that are to have it, by name; ``addresses`` where they reach each other by others than the list's."""

    hosts: Mapping[str, Connection]
    emit: Emit
    addresses: Mapping[str, str]

    def look(self, image: str) -> tuple[dict[str, Standing], Failures]:
        """What each host has, and why some do not say."""
        return attempt(lambda connection: host.look(connection, tagged(image)), self.hosts)

    def notice(self, name: str, text: str) -> None:
        self.emit(Event(kind="notice", text=f"{name}: {text}", node=name))


def foreseen(image: str, how: str, receivers: Receivers) -> str:
    """What would be done for the hosts that lack the image, of which some may not say; empty where none does.

    ``how`` is what LAB_IMAGE_FROM says.
    """
    standings, _ = receivers.look(image)
    own = here.described(image) if how == "send" else None
    lacking = [name for name, one in standings.items() if not (alike(one.image, own) if own else one.image)]
    if not lacking:
        return ""
    names = listed(lacking)
    if own and "@" not in image:
        return f"send image {image} ({amount(own['Size'])} or less) to {names}"
    if how == "send" and images.name_of(image):
        return f"build image {image} here and send it to {names}"
    return f"{'build' if how == 'build' else 'pull'} image {image} on {names}"


def send(image: str, receivers: Receivers, directory: Path) -> Failures:
    """Send this machine's image to the hosts that lack it. One of a registry that is not here, they pull.

    ``directory`` is where a copy of it has room meanwhile.
    """
    own = here.described(image)
    if own is None and images.name_of(image):
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
        with here.spooled(image, directory, own["Size"], notice) as archive:
            failures |= deliver(
                archive, archive.image(image), together(receivers, lacking), receivers.addresses, receivers.emit
            )
    return failures


def absent(image: str, receivers: Receivers) -> Failures:
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


def hand_out(archive: Archive, image: str, receivers: Receivers) -> Failures:
    """Send an image of an archive to the hosts that lack it."""
    inside = archive.image(image)
    standings, failures = receivers.look(image)
    lacking = {name: one for name, one in standings.items() if not one.image or one.image["Id"] not in inside.ids}
    return failures | deliver(archive, inside, together(receivers, lacking), receivers.addresses, receivers.emit)


def pull(image: str, receivers: Receivers) -> Failures:
    """Have each host that lacks the image pull it; those that then have another than the first host are failures."""
    failures = on_each_lacking(image, receivers, "pulled", lambda name: host.pull(receivers.hosts[name], image))
    standings, _ = receivers.look(image)
    there = {name: one.image for name, one in standings.items() if name not in failures and one.image}
    first = next(iter(there), "")
    return failures | {
        name: host.failed(receivers.hosts[name], f"its {image} is another than {first}'s", "", f"docker pull {image}")
        for name, found in there.items()
        if not alike(found, there[first])
    }


def build(image: str, receivers: Receivers, build_on: Callable[[str], object]) -> Failures:
    """Have it built on each host that lacks it, by a function that is given the host's name."""
    return on_each_lacking(image, receivers, "built", build_on)


def on_each_lacking(image: str, receivers: Receivers, done: str, work: Callable[[str], object]) -> Failures:
    standings, failures = receivers.look(image)
    lacking = {name: name for name, one in standings.items() if one.image is None}
    for name in lacking:
        receivers.notice(name, f"image {image} is not there: it is {done} there")
    return failures | attempt(work, lacking)[1]


def together(receivers: Receivers, standings: Mapping[str, Standing]) -> dict[str, tuple[Connection, Standing]]:
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
