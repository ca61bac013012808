"""Engines: where containers run. One module each; ``local`` is the Docker daemon that this process can reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from labctl.model import Pairs
from labctl.shell import Completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a lab as the daemon reports it; every field but state and health comes from labels or ids."""

    id: str
    name: str
    node: str
    role: str
    slots: int
    state: str
    """created, running, paused, restarting, exited, dead"""
    health: str | None
    """starting, healthy, unhealthy; None without a health check"""
    fingerprint: str
    image: str
    directory: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a daemon holds of one lab; ``image`` is the id of the image that the lab would use, None if absent."""

    containers: tuple[Container, ...] = ()
    networks: tuple[tuple[str, str], ...] = ()
    """Id and name."""
    image: str | None = None

    def container(self, node: str) -> Container | None:
        return next((container for container in self.containers if container.node == node), None)


class Engine(Protocol):
    """What labctl asks of a Docker daemon. Methods raise HostError with what came back."""

    def versions(self) -> dict[str, str]: ...

    def observe(self, lab: str, image: str | None = None) -> Observed: ...

    def compose_up(self, project: str, files: tuple[Path, ...]) -> None: ...

    def remove(self, containers: tuple[str, ...]) -> None: ...

    def remove_networks(self, networks: tuple[str, ...]) -> None: ...

    def call(self, container: str, argv: tuple[str, ...], *, user: str) -> Completed: ...

    def follow(
        self,
        container: str,
        argv: tuple[str, ...],
        on_line: Callable[[str], None],
        *,
        user: str,
        workdir: str,
        environment: Pairs,
    ) -> int: ...

    def grants(self, image: str, limits: tuple[tuple[str, int], ...]) -> bool: ...

    def deaths(self, lab: str) -> Iterator[tuple[str, str]]: ...
