"""An in-memory backend: containers follow the compose files, programs print the lines of a function."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from labctl.backends.docker.agent import AGENT, Launch
from labctl.backends.docker.engine import Kind, OnLine, OnLines
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection
from labctl.backends.state import Container, HostPortUser, ObservedState
from labctl.model import Cause, Pairs
from labctl.records.active import ActiveRun
from labctl.system.process import CompletedProcess, Input

CRASHED = re.compile(r"\x01\d+!\x02labctl: (rank \d+ on \S+ exited with code \d+)")
Answer = Callable[[str, tuple[str, ...]], Iterator[str]]
"""Function from a container and a command to the lines that the program prints."""


class Failed(Exception):
    """Exception by which an answer ends the program with this exit code."""

    def __init__(self, code: int, err: str = "") -> None:
        super().__init__(code)
        self.code, self.err = code, err


def silent(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """Answer with no output and exit code 0."""
    yield from ()


def first_line(typed: Input) -> bytes:
    """Wait for the first line of an input that is not blank and return it; empty if the input ends before."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        typed.open(writer)
        return next(filter(bytes.strip, reader), b"")


def active(run_id: str, *nodes: str, state: str = "running") -> Answer:
    """Return an answer in which the agent lists this run as active, and every node is reachable."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield the active run for the agent's ``runs``, and reachable nodes for its ``reach``."""
        if argv[-len(AGENT) - 1 :] == (*AGENT, "runs"):
            run = ActiveRun(id=run_id, nodes=nodes, state=state, order=1_767_000_000, port=29500, owner="ann@desk")
            yield msgspec.json.encode(run).decode()
        yield from healthy(container, argv)

    return answer


def healthy(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """Answer the agent's ``reach``: every node is reachable; other programs print nothing."""
    if argv[: len(AGENT)] == AGENT and argv[len(AGENT)] == "reach":
        for node in argv[len(AGENT) + 2 :]:
            yield f'{{"node": "{node}", "ok": true, "seconds": 0.1}}'


@dataclass
class FakeBackend:
    """In-memory backend: ``answer`` yields the output of programs, ``dead`` lists containers that no longer exist."""

    answer: Answer = silent
    seen: ObservedState = field(default_factory=ObservedState)
    dead: tuple[str, ...] = ()
    fallen: tuple[tuple[str, Cause, str], ...] = ()
    """Events that ``events`` reports once a program runs."""
    started: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    done: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    """Ids of the runs for which an agent was opened."""
    launched: list[Launch] = field(default_factory=list)
    """Runs that the agent has launched."""
    end: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the agent's report on the end of a run, besides the exit code."""
    stops: list[tuple[str, str, str]] = field(default_factory=list)
    """Grace period, cause and message of each request to stop a run."""
    observations: int = 0
    """Number of calls of ``observe``."""
    running: threading.Event = field(default_factory=threading.Event)
    ways: Mapping[str, Connection] = field(default_factory=dict)
    """Connections by host; empty for a single local connection."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.connections)

    @property
    def connections(self) -> Mapping[str, Connection]:
        """Return ``ways``, or a local connection to the host of ``seen``."""
        return self.ways or {self.seen.host: LocalConnection()}

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:  # noqa: ARG002
        """Return ``seen``, and count the call."""
        self.observations += 1
        return self.seen

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:
        """Replace the containers and networks of these compose files in ``seen`` by running ones."""
        self.done.append(("apply", (project, *files)))
        documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files if path.exists()]
        services = itertools.chain.from_iterable(document["services"].items() for document in documents)
        made = {name: self._container(host, project, service) for name, service in services}
        kept = (container for container in self.seen.containers if container.node not in made)
        networks = {name: f"id-{name}" for document in documents for name in document.get("networks", {})}
        self.seen = replace(
            self.seen,
            containers=(*kept, *made.values()),
            networks=tuple({**dict(self.seen.networks), **{key: name for name, key in networks.items()}}.items()),
        )

    def _container(self, host: str, project: str, service: dict[str, Any]) -> Container:
        """Build the running container of a service, by its labels and environment."""
        labels, variables = service["labels"], service["environment"]
        node = labels["labctl.node"]
        return Container(
            id=f"id-{node}",
            name=f"{project}-{node}-1",
            node=node,
            host=host,
            role=labels["labctl.role"],
            slots=int(labels["labctl.slots"]),
            state="running",
            health="healthy",
            fingerprint=labels["labctl.config-hash"],
            image=self.seen.image or service["image"],
            directory=labels["labctl.directory"],
            owner=labels["labctl.owner"],
            user=f"{variables.get('LAB_UID')}:{variables.get('LAB_GID')}",
            mounts=tuple(
                (volume["source"], volume["target"]) for volume in service["volumes"] if volume["type"] == "bind"
            ),
        )

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:  # noqa: ARG002
        """Remove containers or networks by id from ``seen``, and record it in ``done``."""
        self.done.append((f"remove {kind}", ids))
        self.seen = replace(
            self.seen,
            containers=tuple(container for container in self.seen.containers if container.id not in ids),
            networks=tuple(network for network in self.seen.networks if network[0] not in ids),
        )

    def exec(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,
        workdir: str | None = None,  # noqa: ARG002
        limit: float = 0,  # noqa: ARG002
    ) -> CompletedProcess:
        """Run a program by ``answer``; return its code, output and error."""
        printed: list[str] = []
        code, err = self._execute(container, argv, printed.append, user=user)
        return CompletedProcess(argv, code, "".join(f"{line}\n" for line in printed), err)

    def stream(
        self,
        container: str,
        argv: tuple[str, ...],
        on_lines: OnLines,
        *,
        user: str,
        environment: Pairs = (),
        limit: float,  # noqa: ARG002
        typed: Input | None = None,
    ) -> int:
        """Pass on the lines that ``answer`` gives; with ``typed`` act as the agent, which waits for a launch."""

        def on_line(text: str) -> None:
            on_lines((text,))

        if typed is None:
            self.running.set()
        if argv[: len(AGENT) + 1] == (*AGENT, "follow") and self.stops:
            self._execute(container, argv, lambda _: None, user=user)
            on_line(f"end {msgspec.json.encode({'code': 137, **self._reason([])}).decode()}")
            return 0
        if typed is None:
            return self._execute(container, argv, on_line, user=user, environment=environment)[0]
        # Wait for a run, supervise and follow it, as the agent in the launcher does.
        self.waited.append(dict(environment)["LABCTL_RUN_ID"].removeprefix("supervises-"))
        on_line("reached")
        if not (job := first_line(typed)):
            return 0
        self.running.set()
        self.launched.append(msgspec.json.decode(job, type=Launch))
        places = itertools.count(1)
        crashes: list[str] = []

        def on_output(line: str) -> None:
            """Pass on a line with its place, as the agent does; note a crashed rank."""
            crashes.extend(CRASHED.findall(line))
            on_line(f"{next(places)} 0.0 {line}")

        code, _ = self._execute(container, self.launched[-1].argv, on_output, user=user)
        on_line(f"end {msgspec.json.encode({'code': code, **self._reason(crashes), **self.end}).decode()}")
        return 0

    def _reason(self, crashes: list[str]) -> dict[str, str]:
        """Return a run's cause and message: the first stop's, else a crash's unless elastic or a script, else {}."""
        if self.stops:
            return dict(zip(("cause", "message"), self.stops[0][1:], strict=True))
        launch = self.launched[-1]
        believed = crashes and not launch.elastic and launch.launcher != "script"
        return {"cause": "rank-crashed", "message": crashes[0]} if believed else {}

    def attach(self, container: str, argv: tuple[str, ...], *, on_line: OnLine | None = None, **options: Any) -> int:
        """Run a program by ``answer``, passing its lines to ``on_line``; return its exit code."""
        return self._execute(container, argv, on_line or (lambda _: None), **options)[0]

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:  # noqa: ARG002
        """Pass on one line for each container, or for a node's."""
        for container in self.seen.containers:
            if node in ("", container.node):
                on_line(f"{container.node}-1  | {project}")

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:  # noqa: ARG002
        """Yield the events in ``fallen``, once a program runs or after a minute."""
        self.running.wait(60)
        yield from self.fallen

    def capabilities(self, host: str) -> FakeBackend:  # noqa: ARG002
        return self

    def _execute(self, container: str, argv: tuple[str, ...], on_line: OnLine, **options: Any) -> tuple[int, str]:
        """Record a program, pass on the lines that ``answer`` gives, and return its exit code and error."""
        self.started.append((container, argv))
        self.options.append(options)
        if argv[: len(AGENT) + 1] == (*AGENT, "stop"):
            grace, cause, message = argv[len(AGENT) + 2 :]
            self.stops.append((grace, cause, message))
        if container in self.dead:
            return 1, f"Error response from daemon: No such container: {container}"
        try:
            for line in self.answer(container, argv):
                on_line(line)
        except Failed as failed:
            return failed.code, failed.err
        return 0, ""

    def reaped(self) -> list[str]:
        """List the containers in which the agent's ``reap`` was started, sorted by name."""
        return sorted({container for container, argv in self.started if "reap" in argv})

    # --- capabilities ---

    def identity(self) -> str:
        return "fake"

    def versions(self) -> dict[str, str]:
        return {"engine": "0", "api": "0", "kernel": "0"}

    def information(self) -> dict[str, Any]:
        return {}

    def image_id(self, image: str) -> str | None:  # noqa: ARG002
        return self.seen.image

    def port_users(self) -> tuple[HostPortUser, ...]:
        return ()

    def foreign_containers(self, prefix: str, lab: str) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def foreign_network(self, name: str, lab: str) -> bool | None:  # noqa: ARG002
        return None

    def publishers(self, port: int) -> tuple[tuple[str, str], ...]:  # noqa: ARG002
        return ()

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:  # noqa: ARG002
        return True

    def most_files(self, lab: str, image: str) -> int:  # noqa: ARG002
        return 1 << 20

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:  # noqa: ARG002
        return True
