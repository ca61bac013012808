"""The last samples of the machine, which each node of a run writes to ``samples/<node>.csv``."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping

from msgspec import Struct

from labctl.model import Job
from labctl.records.metrics import finite

# ``device 0 memory (MiB)``
COLUMN = re.compile(r"(?P<device>device \d+ )?(?P<what>.+) \((?P<unit>[^)]*)\)")
# Seconds for a node's answer.
LIMIT = 10


class Reading(Struct, frozen=True):
    """A number that was sampled, and its unit."""

    value: float
    unit: str


class NodeSamples(Struct, frozen=True, kw_only=True):
    """What was last sampled of a node and its devices; of one without samples nothing."""

    node: str
    seconds: float | None = None
    """Since the run began there."""
    values: Mapping[str, Reading] = {}
    devices: Mapping[str, Mapping[str, Reading]] = {}
    """By number."""


def look(job: Job, node: str) -> tuple[str, ...]:
    """The command that prints the head and the last row of a node's samples."""
    return ("sh", "-c", 'head -n 1 "$1"; tail -n 1 "$1"', "sh", f"{job.directory}/samples/{node}.csv")


def parse(node: str, text: str) -> NodeSamples:
    """The head of a table and its last row, which may be half a row."""
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
    try:
        return finite(float(cell))[0]
    except ValueError:
        return None
