"""The node that others wait for, by the share of time that the ranks of each node are in collectives.

A rank is in a collective from its own start of it until all others have joined: what is late waits least. That holds on
CPUs; NCCL's collectives are begun ahead of the device, so there all shares are near one and no node is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from labctl.model import Straggler
from labctl.records import samples, store
from labctl.system import human

LEAST = 0.1
"""Least share of time that others wait longer."""
FEWEST = 15
"""Fewest samples of a node. A sample is a second."""
LOOKS, SIGMAS = 4, 4
"""Looks of a sample at whether a rank is in a collective, and standard errors of a share that noise may reach."""


def of_run(directory: Path, seconds_per_step: float | None) -> Straggler | None:
    """Return the straggler of an ended run by its samples/*.csv; None if there is none or it is not clear."""
    shares = {}
    for path in (directory / "samples").glob("*.csv"):
        shares[path.stem] = samples.shares((store.read_record(path) or b"").decode(errors="replace"))
    return straggler(shares, seconds_per_step)


def straggler(shares: Mapping[str, Sequence[float]], seconds_per_step: float | None) -> Straggler | None:
    """Return the node that the others wait for, by shares of time in collectives; None if unclear or too few.

    ``shares``: node -> shares of time that its ranks were in collectives, in each second. Nodes are told apart by the
    widest gap between their means; the part below has to be one node, of at least two.
    """
    if len(shares) < 2 or min(map(len, shares.values())) < FEWEST:
        return None
    means = {node: sum(values) / len(values) for node, values in shares.items()}
    node, *others = sorted(means, key=lambda each: means[each])
    behind = means[others[0]] - means[node]
    noise = SIGMAS * math.sqrt(0.5 / (LOOKS * min(map(len, shares.values()))))
    if behind < max(LEAST, noise) or behind < max(_gaps(means[other] for other in others)):
        return None
    return Straggler(
        node=node,
        share=round(means[node], 3),
        others=round(means[others[0]], 3),
        behind=seconds_per_step and round(behind * seconds_per_step, 4),
    )


def _gaps(sorted_values: Iterable[float]) -> list[float]:
    """Return the differences of neighbours; [0.0] for fewer than two values."""
    return [higher - lower for lower, higher in pairwise(sorted_values)] or [0.0]


def sentence(late: Straggler) -> str:
    """Render which node the others wait for, the shares, and how much of a step that is if known."""
    waits = f"they are in collectives {human.share(late.others)} of the time, it is {human.share(late.share)}"
    step = "" if late.behind is None else f"; {human.duration(late.behind)} of each step"
    return f"{late.node} arrives last, the others wait for it: {waits}{step}"
