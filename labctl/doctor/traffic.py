"""The proof that what ranks tell each other takes the interface that was chosen for it: bytes are sent, and counted.

The other nodes hand bytes to the first, as plain TCP from address to address, which is what collectives do too.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labctl.doctor.finding import Examination, Finding, error, ok
from labctl.doctor.nodes import PYTHON, ask, program
from labctl.engines import agent
from labctl.engines.state import Container
from labctl.errors import HostError
from labctl.model import Host
from labctl.system.parallel import pool

HANDED = 4 << 20
"""Bytes from each node: far more than what else goes on while they are sent."""
SECONDS = 15
LIMIT = 3.0 * SECONDS
RECEIVED, SENT = 0, 1


@dataclass(frozen=True, slots=True)
class Tally:
    """What went through a host's interfaces meanwhile."""

    host: Host
    way: int
    """``RECEIVED`` or ``SENT``."""
    wanted: int
    answer: Mapping[str, Any]

    @property
    def through(self) -> dict[str, int]:
        """Bytes, by interface."""
        return {name: both[self.way] for name, both in self.answer["through"].items()}

    @property
    def astray(self) -> list[str]:
        """The interfaces that the bytes took, where they did not take the chosen one."""
        chosen = self.host.interface
        if self.through.get(chosen, 0) >= self.wanted:
            return []
        kin = self.answer["kin"].get(chosen, [])
        # A bridge or a bond and its parts carry the same bytes; what is smaller than half of them is something else.
        took = [name for name, size in self.through.items() if size >= self.wanted // 2 and name not in (chosen, *kin)]
        return took or ["none"]


def interfaces(examination: Examination) -> Iterator[Finding]:
    """Whether bytes between the hosts take the interfaces that collectives are told; not while a run is under way."""
    lab = examination.lab
    workers = tuple(one for one in examination.running if one.node in {node.name for node in lab.nodes})
    if lab.network != "host" or examination.run_active or len(workers) < 2 or examination.only:
        return
    if workers[0].node != lab.nodes[0].name:
        return
    counted = tallies(examination, workers)
    lost = {node: said for tally, node in counted if (said := tally.answer["said"])}
    for node, said in lost.items():
        yield error(
            "LAB-NET-007",
            f"no bytes get from it to {workers[0].node} at {examination.lab.host_of(workers[0].node).address}: {said}",
            why="ranks find each other there, on ports that the kernel picks: a firewall, or no route",
            fix=f"{examination.at(node).place.there('ip route')}  # and let the hosts talk to each other on all ports",
            node=node,
        )
    for tally, node in counted if not lost else ():
        chosen = tally.host.interface
        if tally.astray:
            yield error(
                "LAB-NET-007",
                f"bytes between the hosts went through {', '.join(tally.astray)}, not through {chosen}",
                why=f"collectives are told {chosen}: they would be slower than it is, or not find each other",
                fix=examination.at(node).place.there("ip route  # and write iface= for each host in the list of hosts"),
                node=node,
            )
        else:
            seen = f"{tally.through[chosen] / (1 << 20):.0f} MiB between the hosts went through {chosen}"
            yield ok("LAB-NET-007", seen, node=node)


def tallies(examination: Examination, workers: tuple[Container, ...]) -> list[tuple[Tally, str]]:
    """What was counted on each host as the others handed bytes to the first. HostError where they do not arrive."""
    lab, (first, *others) = examination.lab, workers
    to = lab.host_of(first.node)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def collect() -> int:
        words = ("collect", to.address, str(len(others)), str(HANDED), str(SECONDS))
        argv, user = (*PYTHON, "-c", program(), *words), agent.user(lab, first.node)
        return examination.engine.stream(
            first.name, argv, lines.put, user=user, workdir="/", environment=(), limit=SECONDS + 10
        )

    def hand(one: Container) -> dict[str, Any]:
        words = ("hand", to.address, port, str(HANDED), str(SECONDS))
        return ask(examination, one, *words, limit=SECONDS + 10)[0]

    with pool(len(workers)) as threads:
        collecting = threads.submit(collect)
        port = heard(lines, first)
        sent = list(threads.map(hand, others))
        collecting.result()
    received = json.loads(heard(lines, first))
    return [
        (Tally(to, RECEIVED, HANDED * len(others), received), first.node),
        *((Tally(lab.host_of(one.node), SENT, HANDED, said), one.node) for one, said in zip(others, sent, strict=True)),
    ]


def heard(lines: queue.SimpleQueue[str], first: Container) -> str:
    """What the first node prints next: its port, then what it counted. HostError with its words where it fails."""
    try:
        line = lines.get(timeout=SECONDS)
    except queue.Empty:
        line = "no answer"
    if not line.strip().startswith("{") and not line.strip().isdecimal():
        raise HostError(f"cannot take bytes from the other nodes: {line}", hint=f"labctl logs {first.node}")
    return line.strip()
