"""Engines: where containers run: one Docker daemon, or those of several hosts as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from labctl.engines.state import HostPortUser, ObservedState
from labctl.hosts.ssh import Connection
from labctl.model import Cause, DeviceMapping, Pairs
from labctl.system.process import CompletedProcess

CALL_LIMIT = 120
"""Seconds for a program that reaches or reaps: each has a shorter limit of its own."""


class Backend(Protocol):
    """What a lab asks of the daemon, or the daemons, of its hosts. Methods raise HostError with what came back."""

    @property
    def hosts(self) -> tuple[str, ...]: ...

    def on(self, host: str) -> Daemon:
        """The daemon of one host."""

    def versions(self) -> dict[str, str]: ...

    def observe(self, lab: str, image: str | None = None) -> ObservedState: ...

    def call(self, container: str, argv: tuple[str, ...], *, user: str, limit: float = ...) -> CompletedProcess: ...

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

    def losses(self, lab: str) -> Iterator[tuple[str, Cause, str]]: ...


class Daemon(Backend, Protocol):
    """What is asked of the daemon of one host."""

    @property
    def connection(self) -> Connection:
        """The way to its host; None for this machine."""

    @property
    def docker(self) -> tuple[str, ...]:
        """The command that reaches it, to be followed by arguments."""

    def information(self) -> dict[str, Any]: ...

    def identity(self) -> str: ...

    def image_id(self, image: str) -> str | None: ...

    def image_labels(self, image: str) -> dict[str, str]: ...

    def image_variables(self, image: str) -> dict[str, str]: ...

    def listeners(self) -> tuple[HostPortUser, ...]: ...

    def network(self, identity: str) -> dict[str, Any]: ...

    def unused_networks(self) -> tuple[tuple[str, str], ...]: ...

    def try_network(self, lab: str) -> str: ...

    def starts(self, lab: str, image: str, mapping: DeviceMapping) -> str: ...

    def compose_up(self, project: str, files: tuple[Path, ...]) -> None: ...

    def remove(self, containers: tuple[str, ...]) -> None: ...

    def remove_networks(self, networks: tuple[str, ...]) -> None: ...

    def remove_image(self, image: str) -> None: ...

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool: ...

    def most_files(self, lab: str, image: str) -> int: ...

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool: ...
