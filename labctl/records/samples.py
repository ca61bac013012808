"""Samples of a machine that each node of a run writes to ``samples/<node>.csv``: read the last ones."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from labctl.model import Job
from labctl.records.metrics import finite
from labctl.system import files

COLUMN = re.compile(r"(?P<device>device \d+ )?(?P<what>.+) \((?P<unit>[^)]*)\)")
"""Title of a column, as ``device 0 memory (MiB)``."""
IN_COLLECTIVES = "in collectives (share)"
"""Column with the share of time that the node's ranks are in collectives: of the rank that waits least."""
RECENT = 60
"""Last rows that are read of a run under way, one per second."""
TAIL = 1 << 16
"""Bytes at the end of a file that have RECENT rows."""
LIMIT = 10
"""Time limit of a node's answer, in seconds."""


class Reading(Struct, frozen=True):
    """A sampled number with its unit."""

    value: float
    unit: str


class Column(Struct, frozen=True):
    """A column of a table: a quantity of the node, or of one of its devices, as ``device memory`` of ``device 0``."""

    place: int
    title: str
    unit: str
    device: str


class NodeSamples(Struct, frozen=True, kw_only=True):
    """Last samples of a node and its devices; empty if there are none."""

    node: str
    seconds: float | None = None
    """Seconds since the run began on the node."""
    values: Mapping[str, Reading] = {}
    devices: Mapping[str, Mapping[str, Reading]] = {}
    """Per device, by number."""


def look(job: Job, node: str) -> tuple[str, ...]:
    """Return a shell command that prints the header and last RECENT rows of a node's samples file."""
    script = f'head -n 1 "$1"; tail -n {RECENT} "$1"'
    return ("sh", "-c", script, "sh", f"{job.directory}/samples/{node}.csv")


def read_last(file: Path) -> str:
    """Return the header and the last RECENT rows of a samples file; empty if it is not there."""
    try:
        with files.open_regular(file) as stream:
            head = stream.readline()
            stream.seek(max(len(head), stream.seek(0, os.SEEK_END) - TAIL))
            rows = stream.read().splitlines(keepends=True)[-RECENT:]
    except OSError:
        return ""
    return b"".join((head, *rows)).decode("utf-8", "replace")


def parse(node: str, text: str) -> NodeSamples:
    """Return the last whole row of a node's samples as readings, per device where it is of one; empty if none."""
    head, rows = _table(text)
    if not rows:
        return NodeSamples(node=node)
    numbers = [cell_value(cell) for cell in rows[-1]]
    values: dict[str, Reading] = {}
    devices: dict[str, dict[str, Reading]] = {}
    for name, number in zip(head[1:], numbers[1:], strict=True):
        if (match := COLUMN.fullmatch(name)) and number is not None:
            device = (match["device"] or "").removeprefix("device ").strip()
            (devices.setdefault(device, {}) if device else values)[match["what"]] = Reading(number, match["unit"])
    return NodeSamples(node=node, seconds=numbers[0], values=values, devices=devices)


def shares(text: str) -> tuple[float | None, ...]:
    """Return the IN_COLLECTIVES column, None for an empty cell; () if the table does not have it."""
    head, rows = _table(text)
    if IN_COLLECTIVES not in head:
        return ()
    column = head.index(IN_COLLECTIVES)
    numbers = [cell_value(row[column]) for row in rows]
    return tuple(number if number is None else min(1.0, number) for number in numbers)


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return a table's header and the rows of its length; ([], []) if it is no table of samples."""
    try:
        head, *rows = [*csv.reader(text.splitlines())] or [[]]
    except csv.Error:
        return [], []
    if head[:1] != ["seconds (s)"]:
        return [], []
    # The last rows of a short table have the header again.
    return head, [row for row in rows if len(row) == len(head) and row != head]


def columns(head: Sequence[str]) -> list[Column]:
    """Return the columns of a table that have a quantity and a unit, from its header."""
    known: list[Column] = []
    for place, name in enumerate(head[1:], start=1):
        if match := COLUMN.fullmatch(name):
            device = (match["device"] or "").strip()
            title = f"device {match['what']}" if device else match["what"]
            known.append(Column(place, title, match["unit"], device))
    return known


def cell_value(cell: str) -> float | None:
    """Return a cell's finite number; None for anything else."""
    try:
        return finite(float(cell))[0]
    except ValueError:
        return None
