"""Summary of the ranks' measurements, without torch: repetitions, GB/s, the slowest of each node and of all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


class Measurement(Protocol):
    """A repeated measurement of a rank; ``parts`` are metric, name and bytes of each time of a round."""

    parts: tuple[tuple[str, str, int], ...]
    detail: str
    """Method of the measurement, for the line of the node."""

    def round(self) -> tuple[float, ...]:
        """Seconds of each part."""

    def wrong(self) -> str:
        """Describe the wrong values after the rounds; empty if all are right."""


@dataclass(frozen=True)
class Figure:
    """Measured rate of a rank: GB/s (10^9 bytes) of the best and of the median repetition."""

    metric: str
    name: str
    node: str
    best: float
    median: float
    detail: str


def parse_bytes(text: str) -> int:
    """Parse ``64M`` or ``1G`` (powers of 1024) into bytes. ValueError otherwise, or below 4 KiB."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) << UNITS[match[2].upper()] < 4096:
        raise ValueError(f"`{text}` is not a size of at least 4K, such as 64M or 1G")
    return int(match[1]) << UNITS[match[2].upper()]


def repeat(
    run: Callable[[], tuple[float, ...]], rounds: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, ...]]:
    """Run one uncounted and up to ``rounds`` rounds; return their seconds; after ``seconds`` only two are certain."""
    run()
    end = clock() + seconds
    times: list[tuple[float, ...]] = []
    while len(times) < min(rounds, 2) or (len(times) < rounds and clock() < end):
        times.append(run())
    return times


def of_rank(measurement: Measurement, times: Sequence[tuple[float, ...]], node: str) -> list[Figure]:
    """Return a Figure for each part of a rank's measurement: GB/s of its best and its median round."""
    return [
        Figure(metric, name, node, size / min(taken) / 1e9, size / median(taken) / 1e9, measurement.detail)
        for (metric, name, size), taken in zip(measurement.parts, zip(*times, strict=True), strict=True)
    ]


def lines(figures: Sequence[Figure]) -> list[str]:
    """Return a line for each metric and node, as its slowest rank, then one for each metric, as the slowest node.

    A node is as slow as the slowest of its ranks, and all are as slow as the slowest node, which the metric's line
    names: ``memory: 12.340 GB/s on worker-1, the slowest of 2``.
    """
    metrics = dict.fromkeys(figure.metric for figure in figures)
    nodes = dict.fromkeys(figure.node for figure in figures)
    each, all_together = [], []
    for metric in metrics:
        slowest = []
        for node in nodes:
            ranks = [figure for figure in figures if (figure.metric, figure.node) == (metric, node)]
            figure = min(ranks, key=lambda one: one.best)
            slowest.append(figure)
            of = f", the slowest of {len(ranks)} ranks" if len(ranks) > 1 else ""
            each.append(
                f"{figure.name} of {node}: {figure.best:.3f} GB/s, median {figure.median:.3f}, {figure.detail}{of}"
            )
        figure = min(slowest, key=lambda one: one.best)
        all_together.append(f"{metric}: {figure.best:.3f} GB/s on {figure.node}, the slowest of {len(slowest)}")
    return each + all_together
