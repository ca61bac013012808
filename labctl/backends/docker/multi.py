"""Daemons of several hosts as one backend: calls for a container go to the daemon that has it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from labctl.backends.docker.agent import IN_NODE, RECONNECTING
from labctl.backends.docker.engine import Capabilities, Engine, Kind, OnLine, OnLines, unanswered
from labctl.backends.docker.events import Loss
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import ObservedState
from labctl.errors import HostError, on_host, raise_all
from labctl.system.parallel import map_hosts, pool
from labctl.system.process import CompletedProcess

# Time limit of a container that is asked for another host, in seconds.
ASKING = 10
# Times in a row after which a host is lost that other hosts reached at first, and after which a node's sshd is gone.
SILENCES, REFUSALS = 3, 2
ANSWERS = ("heard", "refused", "silent")
"""Answers of other hosts about a node, in order of precedence."""


def all_lost(part: ObservedState, why: str) -> Iterator[Loss]:
    """Yield a ``node-lost`` per container of a host, with the reason why the host is lost."""
    for container in part.containers:
        yield container.node, "node-lost", f"host {why}"


class MultiHostEngine:
    """Engine of several hosts: one per host, by its name; ``placement`` maps container name to host.

    Hosts may have containers of the same name from an earlier placement: those are never used.
    """

    def __init__(self, daemons: Mapping[str, Engine], placement: Mapping[str, str]) -> None:
        self._daemons = daemons
        self._placement = placement

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._daemons)

    @property
    def connections(self) -> Mapping[str, Connection]:
        """Connections to all hosts, by name."""
        connections: dict[str, Connection] = {}
        for daemon in self._daemons.values():
            connections |= daemon.connections
        return connections

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """Return the state on all hosts; those that do not answer are left out and named in ``silent``."""
        answers, silent = map_hosts(lambda daemon: daemon.observe(lab, image, node=node), self._daemons)
        parts = tuple(answers.values())
        containers = tuple(chain.from_iterable(part.containers for part in parts))
        probes = tuple(chain.from_iterable(part.probes for part in parts))
        networks = tuple(chain.from_iterable(part.networks for part in parts))
        probe_networks = tuple(chain.from_iterable(part.probe_networks for part in parts))
        return ObservedState(
            containers=containers,
            probes=probes,
            networks=networks,
            probe_networks=probe_networks,
            image=parts[0].image if parts else None,
            parts=parts,
            silent=tuple(silent.items()),
        )

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:
        self._on(host).apply(host, project, files)

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:
        self._on(host).remove(host, kind, ids)

    def exec(self, container: str, argv: tuple[str, ...], **options: Any) -> CompletedProcess:
        return self._with(container).exec(container, argv, **options)

    def stream(self, container: str, argv: tuple[str, ...], on_lines: OnLines, **options: Any) -> int:
        return self._with(container).stream(container, argv, on_lines, **options)

    def attach(self, container: str, argv: tuple[str, ...], **options: Any) -> int:
        return self._with(container).attach(container, argv, **options)

    def logs(self, project: str, on_line: OnLine, **options: Any) -> None:
        """Pass on the logs of all hosts as they come; at the end, HostError names hosts that failed."""

        def show(host: str) -> None:
            """Pass on the logs of a host. HostError names it."""
            with on_host(host):
                self._daemons[host].logs(project, on_line, **options)

        lost = {}
        with pool(len(self._daemons), endless=True) as threads:
            hosts = {threads.submit(show, host): host for host in self._daemons}
            for future in as_completed(hosts):
                try:
                    future.result()
                except HostError as error:
                    lost[hosts[future]] = error
        raise_all(lost)

    def events(self, lab: str) -> Iterator[Loss]:
        """Yield losses of nodes on all hosts without end; for a lost host, one per container.

        If only the connection from this machine broke, the host is not lost: other hosts still reach it, and labctl
        connects again.
        """
        heard: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        parts = {part.host: part for part in self.observe(lab).parts}

        def listen(host: str) -> None:
            """Queue the losses of a host until it is lost."""
            for loss in self._losses(lab, host, parts):
                heard.put(loss)

        for host in parts:
            threading.Thread(target=listen, args=(host,), daemon=True).start()
        while True:
            yield heard.get()

    def _losses(self, lab: str, host: str, parts: Mapping[str, ObservedState]) -> Iterator[Loss]:
        """Yield losses of a host's containers, reconnecting, until the host is lost or closed."""
        connection = self._daemons[host].connections[host]
        while True:
            made, reason = connection.made, "the connection to it ended"
            try:
                yield from self._daemons[host].events(lab)
            except Exception as error:  # noqa: BLE001 - whatever breaks the stream, no more events come
                reason = str(error)
            if connection.closed:
                return
            # Asked first: a follower of a run may be connecting again at this moment.
            why = connection.why_lost()
            if connection.made == made:
                if not why:
                    yield from all_lost(parts[host], f"{host} no longer answers ({reason})")
                    return
                if not (yield from self._connected(lab, host, parts, why)):
                    return
            with suppress(HostError):
                yield from self._ended_meanwhile(lab, parts[host])

    def _connected(
        self, lab: str, host: str, parts: Mapping[str, ObservedState], why: str
    ) -> Generator[Loss, None, bool]:
        """Reconnect to a host, yielding losses of its nodes; return True, or False if it is lost.

        The host is lost if no other host reaches it: at first at once, later several times in a row. A node whose sshd
        is gone is reported.
        """
        silences, enough = 0, 1
        refused: dict[str, int] = {}
        while True:
            answers = self._answers(lab, parts, host)
            silences = silences + 1 if set(answers.values()) == {"silent"} else 0
            if silences >= enough:
                yield from all_lost(parts[host], why)
                return False
            refused = {node: refused.get(node, 0) + 1 for node, answer in answers.items() if answer == "refused"}
            for node in (node for node, times in refused.items() if times == REFUSALS):
                yield node, "node-lost", "its sshd is gone, and labctl cannot reach its host"
            if silences or any(times < REFUSALS for times in refused.values()):
                time.sleep(0 if silences else 1)
                continue
            enough = SILENCES
            with suppress(HostError, OSError):  # When the command ends, the files of its connections are removed.
                self._daemons[host].connections[host].reconnect(RECONNECTING)
                return True
            time.sleep(1)

    def _answers(self, lab: str, parts: Mapping[str, ObservedState], host: str) -> dict[str, str]:
        """Ask sshd of a host's running workers from each other host's container; return the best answer by worker."""
        others = [name for name in parts if name != host]
        running_here = [container for container in parts[host].containers if container.state == "running"]
        workers = tuple(container.node for container in running_here if container.role == "worker")
        look = ("sh", "-c", IN_NODE, "sh", "hears", *workers)

        def ask(other: str) -> str:
            """Return the lines of a container of another host; empty if none runs or it does not answer."""
            with suppress(HostError):
                containers = self._daemons[other].observe(lab).containers
                running = [container for container in containers if container.state == "running"]
                if running:
                    return self._daemons[other].exec(running[0].name, look, user="0", limit=ASKING).out
            return ""

        with pool(len(others)) as threads:
            lines = chain.from_iterable(map(str.splitlines, threads.map(ask, others)))
            answers: dict[str, list[str]] = {}
            for line in lines:
                node, answer = line.split()
                answers.setdefault(node, []).append(answer)
        return {node: min(given, key=ANSWERS.index) for node, given in answers.items()}

    def _ended_meanwhile(self, lab: str, before: ObservedState) -> Iterator[Loss]:
        """Yield a loss per container that ended while events were not read. HostError if silent."""
        alive = ("running", "paused")
        now = self._daemons[before.host].observe(lab).containers
        alive_ids = {container.id for container in now if container.state in alive}
        for container in before.containers:
            if container.state == "running" and container.id not in alive_ids:
                yield container.node, "node-lost", "container died while the connection to its host was broken"

    def capabilities(self, host: str) -> Capabilities:
        return self._on(host).capabilities(host)

    def _on(self, host: str) -> Engine:
        """Return the daemon of a host. HostError if it did not answer."""
        if host not in self._daemons:
            raise unanswered(host)
        return self._daemons[host]

    def _with(self, container: str) -> Engine:
        """Return the daemon that has a container of the lab. HostError if its host did not answer."""
        return self._on(self._placement[container])
