"""A run as a table in CSV, read again by Python's own reader."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from support import records

from labctl.records.metrics import Sample
from labctl.runs.export import csv as tables
from labctl.runs.export import points

RUN = "20261125-203600-opt-tiny-0d07"


def sample(metric: str, step: int | None, value: float | None, rank: int | None = 0, note: str = "") -> Sample:
    """Return a sample; its seconds are twice its step."""
    return Sample(metric=metric, step=step, seconds=step and 2.0 * step, value=value, rank=rank, note=note)


def rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Return the rows of the table of these samples."""
    return list(csv.reader(io.StringIO(tables.table(samples), newline=""), strict=True))


def test_a_step_is_a_row_and_a_metric_a_column() -> None:
    """Write two metrics of two steps: a row each with step and seconds; a value that is missing is an empty cell."""
    samples = [
        sample("loss", 1, 8.119),
        sample("lr", 1, 4e-05),
        sample("loss", 2, 7.5),
        sample("throughput", None, 9.0),
    ]
    assert rows(samples) == [
        ["step", "seconds", "loss", "lr", "throughput"],
        ["1", "2.0", "8.119", "4e-05", ""],
        ["2", "4.0", "7.5", "", ""],
        ["", "", "", "", "9.0"],
    ]


def test_lines_end_as_rfc_4180_has_it() -> None:
    """Write a table: each line, the last too, ends in CR LF."""
    assert tables.table([sample("loss", 1, 8.0)]) == "step,seconds,loss\r\n1,2.0,8.0\r\n"


def test_nan_and_infinity_are_told_from_a_value_that_is_missing() -> None:
    """Write nan and -inf: their names."""
    samples = [sample("loss", 1, None, note="nan"), sample("norm", 1, None, note="-inf")]
    assert rows(samples)[1] == ["1", "2.0", "nan", "-inf"]


def test_steps_that_begin_again_are_rows_of_their_own() -> None:
    """Write two epochs of two steps, and a metric of the second only: it stands beside the second epoch's loss."""
    epochs = [sample("loss", step, value) for step, value in ((1, 4.0), (2, 3.0))]
    epochs += [sample("val_loss", 1, 2.5), sample("loss", 1, 2.0), sample("loss", 2, 1.0)]
    assert [row[0:1] + row[2:] for row in rows(epochs)[1:]] == [
        ["1", "4.0", ""],
        ["2", "3.0", ""],
        ["1", "2.0", "2.5"],
        ["2", "1.0", ""],
    ]


def test_several_values_at_a_step_are_rows_of_their_own() -> None:
    """Write a metric twice at a step: both values are kept."""
    assert [row[2] for row in rows([sample("loss", 1, 4.0), sample("loss", 1, 3.0)])] == ["loss", "4.0", "3.0"]


def test_ranks_that_print_the_same_metric_have_a_column_each(tmp_path: Path) -> None:
    """Write a record in which two ranks print the loss, interleaved, and one the rate: three columns, a row a step."""
    record = records.write(tmp_path, RUN)
    order = ((0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3))
    series = [
        {"metric": "loss", "step": step, "seconds": 1.0, "value": step + rank / 2, "rank": rank} for rank, step in order
    ]
    series.append({"metric": "rate", "step": 3, "seconds": 1.0, "value": 9.0, "rank": 0})
    (record / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in series))
    assert rows([*points.samples(tmp_path, RUN)]) == [
        ["step", "seconds", "loss/rank0", "loss/rank1", "rate"],
        ["1", "1.0", "1.0", "1.5", ""],
        ["2", "1.0", "2.0", "2.5", ""],
        ["3", "1.0", "3.0", "3.5", "9.0"],
    ]
