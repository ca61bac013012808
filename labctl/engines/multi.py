"""The daemons of several hosts as one backend: what concerns a container goes to the daemon that has it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from labctl.engines import Backend, Capabilities, Kind, OnLine, unanswered
from labctl.engines.agent import IN_NODE, RECONNECTING
from labctl.engines.state import ObservedState
from labctl.errors import HostError, on_host, raise_all
from labctl.hosts.ssh import Connection
from labctl.model import Cause
from labctl.system.parallel import map_hosts, pool
from labctl.system.process import CompletedProcess

# Seconds for a container to say whether it hears of another host, besides two for each node there.
ASKING = 3
# Times in a row that nobody hears of a host that only labctl had lost at first.
SILENCES = 3


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

    def stream(self, container: str, argv: tuple[str, ...], on_line: OnLine, **options: Any) -> int:
        return self._with(container).stream(container, argv, on_line, **options)

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

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """As one daemon's; a daemon whose events end has taken every node of its host with it.

        Not so where only the connection from here has broken: the host is asked for by others, and connected to again.
        """
        heard: queue.SimpleQueue[tuple[str, Cause, str]] = queue.SimpleQueue()
        parts = {part.host: part for part in self.observe(lab).parts}

        def listen(host: str) -> None:
            connection = self._daemons[host].connections[host]
            while True:
                made, reason = connection.made, "the connection to it ended"
                try:
                    for event in self._daemons[host].events(lab):
                        heard.put(event)
                except Exception as error:  # noqa: BLE001 - whatever breaks a stream, the host is not heard any more
                    reason = str(error)
                if connection.made == made and (lost := self._lost(lab, host, parts, reason)):
                    break
                with suppress(HostError):
                    for loss in self._ended_meanwhile(lab, parts[host]):
                        heard.put(loss)
            for container in parts[host].containers:
                heard.put((container.node, "node-lost", f"host {lost}"))

        for host in parts:
            threading.Thread(target=listen, args=(host,), daemon=True).start()
        while True:
            yield heard.get()

    def _lost(self, lab: str, host: str, parts: Mapping[str, ObservedState], reason: str) -> str:
        """Why a host whose events have ended is lost; empty once it is connected again.

        It is lost where the engine ended and not the connection, or where other hosts do not hear of it either: at
        once, or later several times in a row.
        """
        connection = self._daemons[host].connections[host]
        if not (why := connection.why_lost()):
            return f"{host} does not answer any more ({reason})"
        others = [name for name in parts if name != host]
        silences, enough = 0, 1
        while True:
            with pool(len(others)) as threads:
                said = set(threads.map(lambda other: self._hears(lab, other, parts[host]), others))
            silences = silences + 1 if "silent" in said and "heard" not in said else 0
            if silences >= enough:
                return why
            enough = SILENCES
            try:
                connection.reconnect(RECONNECTING)
            except (HostError, OSError):  # The files of a connection go with the command that made it.
                time.sleep(1)
            else:
                return ""

    def _hears(self, lab: str, other: str, of: ObservedState) -> str:
        """Whether a host is ``heard`` by a container of another, or ``silent``; empty where that cannot be asked."""
        workers = tuple(one.node for one in of.containers if one.state == "running" and one.role == "worker")
        try:
            running = [one for one in self._daemons[other].observe(lab).containers if one.state == "running"]
            if not running or not workers:
                return ""
            look = ("sh", "-c", IN_NODE, "sh", "hears", *workers)
            limit = ASKING + 2 * len(workers)
            return self._daemons[other].exec(running[0].name, look, user="0", limit=limit).out.strip()
        except HostError:
            return ""

    def _ended_meanwhile(self, lab: str, before: ObservedState) -> Iterator[tuple[str, Cause, str]]:
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
