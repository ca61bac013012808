"""Measure nodes in turn: nodes of one host never at the same time, in an order that is drawn for each round."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import contention

HOST = Path("/proc/sys/kernel/random/boot_id")
"""Equal in all containers of a host."""


@dataclass(frozen=True)
class Turn:
    """Work per second of a node's slowest rank while it could run, and the shares of the time in which it could not."""

    number: int
    node: int
    name: str
    rate: float
    lost: float
    held: float


Reading = tuple[float, float, float]
"""Rate of a rank's turn, and the shares of the time that others and its own quota took."""


@dataclass(frozen=True)
class Seat:
    """A rank's node and host."""

    name: str
    host: str


def take(rounds: int, seconds: float, work: Callable[[float], float]) -> list[Turn]:
    """Let each node work alone on its host for ``seconds`` in each round; return all turns, on every rank."""
    import torch.distributed as dist

    own = Seat(name=socket.gethostname(), host=HOST.read_text())
    seats: list[Seat] = [own] * dist.get_world_size()
    dist.all_gather_object(seats, own)
    drawn: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(drawn, int.from_bytes(os.urandom(8), "big"))
    work(0.1)  # caches and clocks
    own_readings = []
    for number in range(rounds):
        for nodes in order(seats, random.Random(drawn[0] + number)):  # noqa: S311 - which is first, no secret
            dist.barrier()
            if own.name in nodes:
                own_readings.append(measure(seconds, work))
    readings: list[list[Reading]] = [own_readings] * dist.get_world_size()
    dist.all_gather_object(readings, own_readings)
    return [turn for number in range(rounds) for turn in turns_of(number, seats, readings)]


def order(seats: Sequence[Seat], chance: random.Random) -> list[set[str]]:
    """Return sets of nodes that measure at the same time, one of each host, in a random order."""
    hosts: dict[str, list[str]] = {}
    for seat in dict.fromkeys(seats):
        hosts.setdefault(seat.host, []).append(seat.name)
    for names in hosts.values():
        chance.shuffle(names)
    return [
        {names[turn] for names in hosts.values() if turn < len(names)} for turn in range(max(map(len, hosts.values())))
    ]


def measure(seconds: float, work: Callable[[float], float]) -> Reading:
    """Work for ``seconds``; return the rate while the rank could run, and the shares lost to others and the quota."""
    before, began = contention.read(), time.perf_counter()
    done = work(seconds)
    took = time.perf_counter() - began
    now = contention.read()
    lost = min(0.95, now.since(before) / took)
    return done / (took * (1 - lost)), lost, min(1.0, now.held_since(before) / took)


def turns_of(number: int, seats: Sequence[Seat], readings: Sequence[Sequence[Reading]]) -> list[Turn]:
    """Return a Turn for each node in this round, of its slowest rank."""
    names = list(dict.fromkeys(seat.name for seat in seats))
    turns = []
    for node, name in enumerate(names):
        of_node = [reading[number] for seat, reading in zip(seats, readings, strict=True) if seat.name == name]
        rate, lost, held = min(of_node)
        turns.append(Turn(number, node, name, rate, lost, held))
    return turns


def lines(turns: Sequence[Turn]) -> list[str]:
    """Return a text line for each turn."""
    return [
        f"turn {turn.number} of node {turn.node} ({turn.name}): {turn.rate:.6g} TFLOP/s, "
        f"lost {turn.lost:.3f} to others, {turn.held:.3f} to its own quota"
        for turn in turns
    ]
