"""Readings of nodes that took turns in a run, from its output."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from labctl.batches.evidence import Reading, Round

OPTION = "turns"
"""Option of a workload whose nodes can take turns: the number of turns of each node."""
NUMBER = r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
LINE = re.compile(
    rf"turn (\d+) of node (\d+) \(\S+\): {NUMBER} \S+, lost {NUMBER} to others(?:, {NUMBER} to its own quota)?$"
)


def read(lines: Iterable[str], nodes: Sequence[str]) -> tuple[Round, ...]:
    """Return the rounds of readings by node that a run printed; ignore other lines; ``nodes`` are by rank."""
    rounds: defaultdict[int, dict[str, Reading]] = defaultdict(dict)
    for line in lines:
        match = LINE.search(line.rstrip())
        if match and int(match[2]) < len(nodes):
            number, node, speed, lost, held = match.groups(default="0")
            reading = Reading(float(speed), float(lost), corrected=True, held=float(held))
            rounds[int(number)][nodes[int(node)]] = reading
    return tuple(rounds[number] for number in sorted(rounds))
