"""Where containers run: the backend protocol. Docker implements it, for one daemon and for those of several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import HostPortUser, ObservedState
from labctl.errors import HostError
from labctl.model import Cause, Pairs
from labctl.system.process import CompletedProcess

Kind = Literal["container", "network", "image"]
OnLine = Callable[[str], None]
OnLines = Callable[[Sequence[str]], object]


class Backend(Protocol):
    """Runs the containers of a lab. Methods raise HostError with what came back."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those that answer."""

    @property
    def connections(self) -> Mapping[str, Connection]:
        """The connections to them; this machine's runs locally."""

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """The lab's containers and networks, by label, and the id of an image; the user of this one node."""

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:
        """Create or start what these compose files describe, and leave the rest of the project alone."""

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:
        """Remove these objects; one that is gone already is fine."""

    def exec(
        self, container: str, argv: tuple[str, ...], *, user: str, workdir: str | None = None, limit: float = ...
    ) -> CompletedProcess:
        """Run a short program in a container to its end, whatever its exit code; HostError after so many seconds."""

    def stream(
        self,
        container: str,
        argv: tuple[str, ...],
        on_lines: OnLines,
        *,
        user: str,
        environment: Pairs = (),
        limit: float,
    ) -> int:
        """Run a program in a container, handing on its lines, those that come at once together; returns its exit code.

        The terminal's Ctrl-C does not reach it. Its input gets an empty line each second, and is open until this
        process ends, or the connection does.
        HostError after ``limit`` seconds.
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
        """Run a program on this process's input and output, or hand on its lines; returns its code, 128+n for signal n.

        ``secret_env`` is passed by environment, never on the command line. INT, TERM and HUP reach the program and all
        that it started; where this process is killed, they are ended. HostError when the connection to it is lost.
        """

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:
        """Hand on what the containers of a project, or of one node of it, printed; with ``follow`` as they print."""

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """Yield (node, cause, what happened) for each container that dies or is lost to runs, from now on."""

    def capabilities(self, host: str) -> Capabilities:
        """What the engine of a host has and can do."""


class Capabilities(Protocol):
    """What one host's engine says of itself, and what only a trial with a throw-away container tells."""

    def identity(self) -> str:
        """What tells this engine from another."""

    def versions(self) -> dict[str, str]:
        """Versions of the engine, its API and its kernel."""

    def information(self) -> dict[str, Any]:
        """Its runtimes and CDI devices, in the words of ``docker info``; empty where it has neither."""

    def image_id(self, image: str) -> str | None:
        """Id of an image that it has, None if it is not there."""

    def port_users(self) -> tuple[HostPortUser, ...]:
        """The workers, of whatever lab, whose sshd listens on the host's own network."""

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:
        """Whether it can start a container with these ulimits: some hosts refuse to raise them."""

    def most_files(self, lab: str, image: str) -> int:
        """How many files a process in a container may open, whatever it asks for."""

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:
        """Whether it knows this device driver, by reserving these devices: it lists none."""


def connection_to(engine: Backend, host: str) -> Connection:
    """The connection to a host. HostError where it does not answer."""
    if host not in engine.hosts:
        raise unanswered(host)
    return engine.connections[host]


def unanswered(host: str) -> HostError:
    return HostError(f"{host}: it did not answer", hint="labctl doctor", node=host)
