"""A run's samples as a table in CSV, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from labctl.records.metrics import Sample

COLUMNS = ("step", "seconds")


class Row(Struct, kw_only=True):
    """The values of metrics at a step; ``seconds`` since the run's first line, of the first value."""

    step: int | None
    seconds: float | None
    values: dict[str, float]


def table(samples: Iterable[Sample]) -> str:
    """Render a row per step with a column per metric as RFC 4180 has it; cells without a value are empty."""
    rows = _rows(samples)
    metrics = dict.fromkeys(name for row in rows for name in row.values)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow((*COLUMNS, *metrics))
    writer.writerows((row.step, row.seconds, *map(row.values.get, metrics)) for row in rows)
    return text.getvalue()


def _rows(samples: Iterable[Sample]) -> list[Row]:
    """Return a row per step, in order; several if a metric has several values, or if steps begin again."""
    rows: list[Row] = []
    latest: dict[tuple[int, int | None], Row] = {}
    rounds: Counter[int | None] = Counter()
    steps: dict[int | None, int] = {}
    for sample in samples:
        if sample.step is not None:
            # In another epoch, a rank counts its steps from the first again.
            rounds[sample.rank] += sample.step < steps.get(sample.rank, sample.step)
            steps[sample.rank] = sample.step
        at = (rounds[sample.rank], sample.step)
        if at not in latest or sample.metric in latest[at].values:
            latest[at] = Row(step=sample.step, seconds=sample.seconds, values={})
            rows.append(latest[at])
        latest[at].values[sample.metric] = sample.number
    return rows
