"""Engines: where containers run. One module each; ``local`` is the Docker daemon that this process can reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from labctl.connection import Connection
from labctl.containers import Observed
from labctl.model import Cause, Pairs
from labctl.shell import Completed


class Engine(Protocol):
    """What labctl asks of a Docker daemon, or of those of all hosts. Methods raise HostError with what came back."""

    @property
    def hosts(self) -> tuple[str, ...]: ...

    @property
    def connection(self) -> Connection | None:
        """The way to the daemon's host; None for this machine's daemon, and where there are several."""

    def on(self, host: str) -> Engine:
        """The daemon of one host."""

    def versions(self) -> dict[str, str]: ...

    def observe(self, lab: str, image: str | None = None) -> Observed: ...

    def compose_up(self, project: str, files: tuple[Path, ...]) -> None: ...

    def remove(self, containers: tuple[str, ...]) -> None: ...

    def remove_networks(self, networks: tuple[str, ...]) -> None: ...

    def call(self, container: str, argv: tuple[str, ...], *, user: str, limit: float = ...) -> Completed: ...

    def follow(
        self,
        container: str,
        argv: tuple[str, ...],
        on_line: Callable[[str], None],
        *,
        user: str,
        workdir: str,
        environment: Pairs,
        limit: float,
    ) -> int: ...

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool: ...

    def losses(self, lab: str) -> Iterator[tuple[str, Cause, str]]: ...
