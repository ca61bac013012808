"""Read samples of the machine, ``samples/<node>.csv`` of a run, and the metrics.csv of a training script."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.records import store
from labctl.records.samples import cell_value, columns
from labctl.system import files


class Track(Struct, frozen=True, kw_only=True):
    """Samples of one quantity of a node or device, by seconds; a lost sample is None."""

    what: str
    """Quantity, as ``device memory``: the same for all devices."""
    unit: str
    node: str
    device: str = ""
    points: tuple[tuple[float, float | None], ...]


def read(directory: Path) -> list[Track]:
    """Read the samples of a run's nodes; files that are not tables of samples are skipped."""
    tracks: list[Track] = []
    for path in sorted((directory / "samples").glob("*.csv")):
        rows = list(csv.reader(_lines(path)))
        if rows and rows[0][:1] == ["seconds (s)"]:
            tracks += _tracks(path.stem, rows[0], rows[1:])
    return tracks


def _tracks(node: str, head: list[str], rows: list[list[str]]) -> Iterable[Track]:
    """Yield a Track for each column that has a value; rows of another length, or without seconds, are skipped."""
    # The last row of a run that was cut off may be half a row.
    whole = [row for row in rows if len(row) == len(head) and _number(row[0]) is not None]
    for column in columns(head):
        points = tuple((_number(row[0]) or 0, _number(row[column.place])) for row in whole)
        if any(value is not None for _, value in points):
            yield Track(what=column.title, unit=column.unit, node=node, device=column.device, points=points)


class EpochRow(Struct, frozen=True, kw_only=True):
    """A row of a metrics.csv: a rank in an epoch; ``seconds`` is its training time."""

    rank: int
    epoch: float
    seconds: float | None
    name: str
    """Name of its device."""
    values: Mapping[str, float | None]
    """All numbers of the row, by column."""


COLUMNS = ("Rank", "Epoch", "Computation_Time")
"""Columns that a metrics.csv must have."""


def epochs(path: Path) -> list[EpochRow]:
    """Read the whole rows of a metrics.csv, sorted by rank and epoch. ConfigError if it is not a table with COLUMNS."""
    rows = list(csv.DictReader(_lines(path)))
    if not rows or not set(COLUMNS) <= set(rows[0]):
        raise ConfigError(
            f"{path}: no table with the columns {', '.join(COLUMNS)}", hint="labctl report RUN, or its id"
        )
    epoch_rows = []
    for row in rows:
        numbers = {key: _number(value) for key, value in row.items()}
        rank, epoch = numbers["Rank"], numbers["Epoch"]
        # Ranks append to one file, so headers repeat and lines may be broken.
        if rank is not None and epoch is not None and None not in row and None not in row.values():
            seconds, name = numbers["Computation_Time"], row.get("GPU_Name", "")
            epoch_rows.append(EpochRow(rank=int(rank), epoch=epoch, seconds=seconds, name=name, values=numbers))
    return sorted(epoch_rows, key=lambda row: (row.rank, row.epoch))


def _lines(path: Path) -> list[str]:
    """Read a table's lines, of a large one the header and every n-th line; empty if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            every = 1 + os.fstat(stream.fileno()).st_size // store.LARGEST_RECORD
            return [line.decode("utf-8", "replace") for at, line in enumerate(stream) if at % every == 0]
    except OSError:
        return []


def _number(text: object) -> float | None:
    """Parse ``95.0%`` or ``71.5``; None if it is not a finite number."""
    return cell_value(str(text).strip().removesuffix("%"))
