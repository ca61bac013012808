"""The caller's labs on this machine, in any directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from labctl.backends.docker.daemon import DockerEngine, node_order
from labctl.backends.owner import owner
from labctl.backends.state import Container, is_there


class OwnLab(Struct, frozen=True, kw_only=True):
    """A lab of the caller on this machine."""

    name: str
    directory: str
    state: str
    """``up`` if all its nodes run, ``stopped`` if none does, else ``partial``."""
    nodes: tuple[str, ...]
    is_there: bool
    """False if its directory is gone: its containers are left."""


def own_labs() -> tuple[OwnLab, ...]:
    """Return the caller's labs with containers on this machine, by name. HostError if the engine does not answer."""
    return tuple(labs_of(DockerEngine().labs(), owner()))


def labs_of(by_lab: Mapping[str, Sequence[Container]], caller: str) -> Iterator[OwnLab]:
    """Yield the labs of a caller, by name; several directories may have a lab of the same name."""
    for name, containers in sorted(by_lab.items()):
        mine = [container for container in containers if container.owner == caller and container.directory]
        for directory in sorted({container.directory for container in mine}):
            yield _lab(name, directory, [container for container in mine if container.directory == directory])


def _lab(name: str, directory: str, containers: Iterable[Container]) -> OwnLab:
    """Return the lab that has these containers."""
    nodes = sorted(containers, key=node_order)
    running = sum(container.state == "running" for container in nodes)
    state = "up" if running == len(nodes) else "partial"
    return OwnLab(
        name=name,
        directory=directory,
        state=state if running else "stopped",
        nodes=tuple(container.node for container in nodes),
        is_there=is_there(Path(directory)),
    )
