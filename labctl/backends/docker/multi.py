"""The daemons of several hosts as one backend: what concerns a container goes to the daemon that has it."""

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
from labctl.backends.docker.engine import Backend, Capabilities, Kind, OnLine, OnLines, unanswered
from labctl.backends.docker.events import Loss
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import ObservedState
from labctl.errors import HostError, on_host, raise_all
from labctl.system.parallel import map_hosts, pool
from labctl.system.process import CompletedProcess

# Seconds for a container to say whether it hears of another host.
ASKING = 10
# Times in a row that nobody hears of a host that only labctl had lost at first, and that a node refuses a connection.
SILENCES, REFUSALS = 3, 2


def all_lost(part: ObservedState, why: str) -> Iterator[Loss]:
    """The nodes of a host that is lost."""
    for container in part.containers:
        yield container.node, "node-lost", f"host {why}"


class MultiHostEngine:
    """One backend per host, by the host's name; ``placement`` maps container name to host.

    Hosts may hold containers of the same name that were placed there before: those are never used.
    """

    def __init__(self, daemons: Mapping[str, Backend], placement: Mapping[str, str]) -> None:
        self._daemons = daemons
        self._placement = placement

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._daemons)

    @property
    def connections(self) -> Mapping[str, Connection]:
        return {host: way for one in self._daemons.values() for host, way in one.connections.items()}

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """What all of them hold, those that do not answer left out and named in ``silent``."""
        answers, silent = map_hosts(lambda daemon: daemon.observe(lab, image, node=node), self._daemons)
        parts = tuple(answers.values())
        return ObservedState(
            containers=tuple(chain.from_iterable(part.containers for part in parts)),
            probes=tuple(chain.from_iterable(part.probes for part in parts)),
            networks=tuple(chain.from_iterable(part.networks for part in parts)),
            probe_networks=tuple(chain.from_iterable(part.probe_networks for part in parts)),
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
        """Those of all hosts as they come; HostError for those that failed, once all have ended."""

        def show(host: str) -> None:
            with on_host(host):
                self._daemons[host].logs(project, on_line, **options)

        lost = {}
        with pool(len(self._daemons), endless=True) as threads:
            asked = {threads.submit(show, host): host for host in self._daemons}
            for one in as_completed(asked):
                try:
                    one.result()
                except HostError as error:
                    lost[asked[one]] = error
        raise_all(lost)

    def events(self, lab: str) -> Iterator[Loss]:
        """As one daemon's; a daemon whose events end has taken every node of its host with it.

        Not so where only the connection from here has broken: the host is asked for by others, and connected to again.
        """
        heard: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        parts = {part.host: part for part in self.observe(lab).parts}

        def listen(host: str) -> None:
            for loss in self._losses(lab, host, parts):
                heard.put(loss)

        for host in parts:
            threading.Thread(target=listen, args=(host,), daemon=True).start()
        while True:
            yield heard.get()

    def _losses(self, lab: str, host: str, parts: Mapping[str, ObservedState]) -> Iterator[Loss]:
        """What befalls a host's containers, over one connection after another, until the host is lost."""
        connection = self._daemons[host].connections[host]
        while True:
            made, reason = connection.made, "the connection to it ended"
            try:
                yield from self._daemons[host].events(lab)
            except Exception as error:  # noqa: BLE001 - whatever breaks a stream, the host is not heard any more
                reason = str(error)
            if connection.closed:
                return
            # Asked first: who follows a run may be about to have made the connection again.
            why = connection.why_lost()
            if connection.made == made:
                if not why:
                    yield from all_lost(parts[host], f"{host} does not answer any more ({reason})")
                    return
                if not (yield from self._connected(lab, host, parts, why)):
                    return
            with suppress(HostError):
                yield from self._ended_meanwhile(lab, parts[host])

    def _connected(
        self, lab: str, host: str, parts: Mapping[str, ObservedState], why: str
    ) -> Generator[Loss, None, bool]:
        """Connect to a host again, and ask the others for it; whether that came about, or the host is lost.

        It is lost where the others do not hear of it either: at once, or later several times in a row. A node whose
        sshd is gone is reported.
        """
        silences, enough = 0, 1
        refused: dict[str, int] = {}
        while True:
            words = self._words(lab, parts, host)
            silences = silences + 1 if set(words.values()) == {"silent"} else 0
            if silences >= enough:
                yield from all_lost(parts[host], why)
                return False
            refused = {node: refused.get(node, 0) + 1 for node, word in words.items() if word == "refused"}
            for node in (node for node, times in refused.items() if times == REFUSALS):
                yield node, "node-lost", "its sshd is gone, and labctl is cut off from its host"
            if silences or any(times < REFUSALS for times in refused.values()):
                time.sleep(0 if silences else 1)
                continue
            enough = SILENCES
            with suppress(HostError, OSError):  # The files of a connection go with the command that made it.
                self._daemons[host].connections[host].reconnect(RECONNECTING)
                return True
            time.sleep(1)

    def _words(self, lab: str, parts: Mapping[str, ObservedState], host: str) -> dict[str, str]:
        """What the other hosts say of this one's nodes: ``heard`` if one hears it, ``refused``, or ``silent``."""
        others = [name for name in parts if name != host]
        workers = tuple(one.node for one in parts[host].containers if one.state == "running" and one.role == "worker")
        look = ("sh", "-c", IN_NODE, "sh", "hears", *workers)

        def ask(other: str) -> str:
            with suppress(HostError):
                running = [one for one in self._daemons[other].observe(lab).containers if one.state == "running"]
                if running:
                    return self._daemons[other].exec(running[0].name, look, user="0", limit=ASKING).out
            return ""

        with pool(len(others)) as threads:
            said = [line.split() for text in threads.map(ask, others) for line in text.splitlines()]
        return {
            node: next(word for word in ("heard", "refused", "silent") if [node, word] in said)
            for node in {node for node, _ in said}
        }

    def _ended_meanwhile(self, lab: str, before: ObservedState) -> Iterator[Loss]:
        """The containers of a host that ran before its events were missed, and do not now."""
        alive = ("running", "paused")
        there = {one.id for one in self._daemons[before.host].observe(lab).containers if one.state in alive}
        for one in before.containers:
            if one.state == "running" and one.id not in there:
                yield one.node, "node-lost", "container died while the connection to its host was broken"

    def capabilities(self, host: str) -> Capabilities:
        return self._on(host).capabilities(host)

    def _on(self, host: str) -> Backend:
        if host not in self._daemons:
            raise unanswered(host)
        return self._daemons[host]

    def _with(self, container: str) -> Backend:
        """The daemon that has a container of the lab; HostError where its host does not answer."""
        return self._on(self._placement[container])
