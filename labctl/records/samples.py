"""Samples of a machine that each node of a run writes to ``samples/<node>.csv``: read the last."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping

from msgspec import Struct

from labctl.model import Job
from labctl.records.metrics import finite

COLUMN = re.compile(r"(?P<device>device \d+ )?(?P<what>.+) \((?P<unit>[^)]*)\)")
"""Title of a column, as ``device 0 memory (MiB)``."""
LIMIT = 10
"""Time limit of a node's answer, in seconds."""


class Reading(Struct, frozen=True):
    """A sampled number with its unit."""

    value: float
    unit: str


class NodeSamples(Struct, frozen=True, kw_only=True):
    """Last samples of a node and its devices; empty if there are none."""

    node: str
    seconds: float | None = None
    """Seconds since the run began on the node."""
    values: Mapping[str, Reading] = {}
    devices: Mapping[str, Mapping[str, Reading]] = {}
    """Per device, by number."""


def look(job: Job, node: str) -> tuple[str, ...]:
    """Return the command that prints the header and the last row of a node's samples."""
    return ("sh", "-c", 'head -n 1 "$1"; tail -n 1 "$1"', "sh", f"{job.directory}/samples/{node}.csv")


def parse(node: str, text: str) -> NodeSamples:
    """Parse the header and the last row of a table; empty if the row is incomplete."""
    head, row = [*csv.reader(text.splitlines()), [], []][:2]
    if head[:1] != ["seconds (s)"] or len(head) != len(row):
        return NodeSamples(node=node)
    numbers = [_number(cell) for cell in row]
    values: dict[str, Reading] = {}
    devices: dict[str, dict[str, Reading]] = {}
    for name, number in zip(head[1:], numbers[1:], strict=True):
        if (match := COLUMN.fullmatch(name)) and number is not None:
            device = (match["device"] or "").removeprefix("device ").strip()
            (devices.setdefault(device, {}) if device else values)[match["what"]] = Reading(number, match["unit"])
    return NodeSamples(node=node, seconds=numbers[0], values=values, devices=devices)


def _number(cell: str) -> float | None:
    """Parse a finite number; None for other text."""
    try:
        return finite(float(cell))[0]
    except ValueError:
        return None
