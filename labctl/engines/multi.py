"""The daemons of several hosts as one engine: what concerns a container goes to the daemon that has it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from labctl.engines import CALL_LIMIT, Daemon
from labctl.engines.state import ObservedState
from labctl.errors import HostError
from labctl.model import Cause, Pairs
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess


class MultiHostEngine:
    """One daemon per host, by the host's name; the first is asked what is asked of one.

    ``places`` are the lab's containers and their hosts: others may have some of the same names still, or for ever.
    """

    def __init__(self, daemons: Mapping[str, Daemon], places: Mapping[str, str]) -> None:
        self._daemons = daemons
        self._places = places

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._daemons)

    def on(self, host: str) -> Daemon:
        if host not in self._daemons:
            raise HostError(f"{host}: it did not answer", hint="labctl doctor", node=host)
        return self._daemons[host]

    def versions(self) -> dict[str, str]:
        return next(iter(self._daemons.values())).versions()

    def observe(self, lab: str, image: str | None = None) -> ObservedState:
        """What all of them hold, those that do not answer left out and named in ``silent``."""
        answers, silent = map_hosts(lambda daemon: daemon.observe(lab, image), self._daemons)
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

    def call(self, container: str, argv: tuple[str, ...], *, user: str, limit: float = CALL_LIMIT) -> CompletedProcess:
        return self._with(container).call(container, argv, user=user, limit=limit)

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
    ) -> int:
        there = self._with(container)
        return there.follow(container, argv, on_line, user=user, workdir=workdir, environment=environment, limit=limit)

    def losses(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """As one daemon's; a daemon whose events end has taken every node of its host with it."""
        heard: queue.SimpleQueue[tuple[str, Cause, str]] = queue.SimpleQueue()
        nodes = {part.host: [one.node for one in part.containers] for part in self.observe(lab).parts}

        def listen(host: str) -> None:
            reason = "the connection to it ended"
            try:
                for loss in self._daemons[host].losses(lab):
                    heard.put(loss)
            except Exception as error:  # noqa: BLE001 - whatever breaks a stream, the host is not heard any more
                reason = str(error)
            lost = self._daemons[host].connection.why_lost() or f"{host} does not answer any more ({reason})"
            for node in nodes[host]:
                heard.put((node, "node-lost", f"host {lost}"))

        for host in nodes:
            threading.Thread(target=listen, args=(host,), daemon=True).start()
        while True:
            yield heard.get()

    def _with(self, container: str) -> Daemon:
        """The daemon that has a container of the lab; HostError where its host does not answer."""
        return self.on(self._places[container])
