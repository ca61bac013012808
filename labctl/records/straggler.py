"""The node that others wait for, by the share of time that the ranks of each node are in collectives.

A rank is in a collective from its own start of it until all others have joined: what is late waits least. That holds on
CPUs; NCCL's collectives are begun ahead of the device, so there all shares are near one and no node is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from labctl.model import Straggler
from labctl.records import samples, store
from labctl.system import human

LEAST_GAP = 0.1
"""Least share of time that others wait longer."""
FEWEST = 15
"""Fewest samples of a node. A sample is a second."""
LOOKS, SIGMAS = 4, 4
"""Looks of a sample at whether a rank is in a collective, and standard errors of a share that noise may reach."""


Shares = Mapping[str, Sequence[float | None]]
"""Node -> share of time that its ranks were in collectives, in each second; None before they joined a group."""


def read(directory: Path, nodes: Iterable[str]) -> Shares:
    """Read the shares of these nodes from an ended run's samples/NODE.csv; empty for a node without a table."""
    shares = {}
    for node in nodes:
        table = store.read_record(directory / f"samples/{node}.csv") or b""
        shares[node] = samples.shares(table.decode(errors="replace"))
    return shares


def straggler(shares: Shares, seconds_per_step: float | None) -> Straggler | None:
    """Return the node that the others wait for, by shares of time in collectives; None if unclear or too few.

    The widest gap between the means of nodes has to be that between the lowest one and the next.
    """
    known = {node: [share for share in values if share is not None] for node, values in shares.items()}
    fewest = min(map(len, known.values()), default=0)
    if len(known) < 2 or fewest < FEWEST:
        return None
    means = {node: _usual(values) for node, values in known.items()}
    node, *others = sorted(means, key=lambda each: means[each])
    behind = means[others[0]] - means[node]
    noise = SIGMAS * math.sqrt(0.5 / (LOOKS * fewest))
    if behind < max(LEAST_GAP, noise) or behind < max(_gaps(means[other] for other in others)):
        return None
    return Straggler(
        node=node,
        share=round(means[node], 3),
        others=round(means[others[0]], 3),
        behind=seconds_per_step and round(behind * seconds_per_step, 4),
    )


def _usual(values: Sequence[float]) -> float:
    """Return the median of means of FEWEST values each: a phase such as the preparation of data is left out."""
    parts = [values[at : at + FEWEST] for at in range(0, len(values) - FEWEST + 1, FEWEST)]
    return median(sum(part) / FEWEST for part in parts)


def _gaps(sorted_values: Iterable[float]) -> list[float]:
    """Return the differences of neighbours; [0.0] for fewer than two values."""
    return [higher - lower for lower, higher in pairwise(sorted_values)] or [0.0]


def sentence(late: Straggler) -> str:
    """Render which node the others wait for, the shares, and how much of a step that is if known."""
    waits = f"they are in collectives {human.share(late.others)} of the time, it is {human.share(late.share)}"
    step = "" if late.behind is None else f"; {human.duration(late.behind)} of each step"
    return f"{late.node} arrives last, the others wait for it: {waits}{step}"


def apart(shares: Shares) -> bool:
    """Return True if several nodes were sampled for FEWEST seconds or more, and no rank ever joined a process group."""
    was_sampled = len(shares) > 1 and all(len(values) >= FEWEST for values in shares.values())
    return was_sampled and all(share is None for values in shares.values() for share in values)
