"""Protocol of an engine that runs containers; Docker implements it, for one daemon and for several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import HostPortUser, ObservedState
from labctl.errors import HostError
from labctl.model import Cause, Pairs
from labctl.system.process import CompletedProcess, Input

Kind = Literal["container", "network", "image"]
OnLine = Callable[[str], None]
OnLines = Callable[[Sequence[str]], object]


class Engine(Protocol):
    """An engine that runs the containers of a lab. Methods raise HostError with the engine's message."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that answer."""

    @property
    def connections(self) -> Mapping[str, Connection]:
        """Connections to the hosts, by name; that to this machine runs locally."""

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """Return the lab's containers and networks, by label, and the id of an image; for ``node`` also its user."""

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:
        """Create or start the containers of these compose files; other containers of the project are unchanged."""

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:
        """Remove these objects, running containers too; missing containers are ignored. HostError for used images."""

    def exec(
        self, container: str, argv: tuple[str, ...], *, user: str, workdir: str | None = None, limit: float = ...
    ) -> CompletedProcess:
        """Run a short program in a container to its end; return its result. HostError after ``limit`` seconds."""

    def stream(
        self,
        container: str,
        argv: tuple[str, ...],
        on_lines: OnLines,
        *,
        user: str,
        environment: Pairs = (),
        limit: float,
        typed: Input | None = None,
    ) -> int:
        """Run a program in a container; pass on its lines, return its code. HostError after ``limit`` seconds.

        The terminal's Ctrl-C does not reach it. Its input gets what is ``typed``, and an empty line each second; it
        stays open until that is closed, or this process or the connection ends.
        """

    def attach(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,
        workdir: str | None,
        environment: tuple[str, ...] = (),
        secret_env: Mapping[str, str] | None = None,
        stdin: Literal["terminal", "pipe", "none"] = "none",
        on_line: OnLine | None = None,
    ) -> int:
        """Run a program on this input and output, or pass its lines on; return its code, 128+n for signal n.

        ``secret_env`` is passed by environment, never on the command line. INT, TERM and HUP reach the program and all
        processes that it started; if this process is killed, they are ended. HostError if the connection to it is lost.
        """

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:
        """Pass on the output of the containers of a project, or of a node of it; with ``follow`` as they print it."""

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """Yield (node, cause, text) for each container that is dead, dies from now on, or is lost to runs."""

    def capabilities(self, host: str) -> Capabilities:
        """Return the capabilities of a host's engine."""


class Capabilities(Protocol):
    """Properties of a host's engine: reported by it, or tried with a throw-away container."""

    def identity(self) -> str:
        """Return the unique id of this engine."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the engine, its API and its kernel."""

    def information(self) -> dict[str, Any]:
        """Return runtimes and CDI devices as in ``docker info``; empty if there are neither."""

    def image_id(self, image: str) -> str | None:
        """Return the id of an image; None if not found."""

    def port_users(self) -> tuple[HostPortUser, ...]:
        """Return the workers of any lab whose sshd listens on the host's network."""

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:
        """Tell if the engine can start a container with these ulimits: some hosts refuse to raise them."""

    def most_files(self, lab: str, image: str) -> int:
        """Return the number of files that a process in a container may open at most."""

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:
        """Tell if the engine has this device driver, by reserving these devices: it does not list its drivers."""


def connection_to(engine: Engine, host: str) -> Connection:
    """Return the connection to a host. HostError if its engine did not answer."""
    if host not in engine.hosts:
        raise unanswered(host)
    return engine.connections[host]


def unanswered(host: str) -> HostError:
    """Return the error of a host that did not answer."""
    return HostError(f"{host}: it did not answer", hint="labctl doctor", node=host)
