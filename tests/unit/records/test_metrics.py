from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.builders import read_values

from labctl.model import Metric, Reduce
from labctl.records.metrics import Sampler, line_of, read_notes, reduce_values

NUMBER = r"(\S+)"
THROUGHPUT = Metric(name="throughput", pattern=rf"Throughput: {NUMBER} samples/sec", unit="samples/s", reduce="mean")
LOSS = Metric(name="loss", pattern=rf"\bloss {NUMBER}", reduce="first-last")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("ml-512-node-001: Throughput: 290.3027 samples/sec", [290.3027]),
        ("ml-512-node-001: Throughput: 600 samples/sec", [600.0]),
        ("Throughput: 600.5 samples/sec", [600.5]),
        ("worker-1: Throughput: 1e3 samples/sec, TFLOPs: 12.1", [1000.0]),
        ("Throughput: -1 samples/sec", [-1.0]),
        ("Throughput: inf samples/sec", [math.inf]),
        ("Throughput: -inf samples/sec", [-math.inf]),
        ("Throughput: 1,234.5 samples/sec", []),
        ("Throughput: n/a samples/sec", []),
        ("throughput: 600 samples/sec", []),
        ("", []),
    ],
)
def test_a_number_is_found_anywhere_in_a_line(line: str, values: list[float]) -> None:
    """Read lines with a declared metric: its numbers, none for text that is no number."""
    assert read_values([THROUGHPUT], [line]) == {"throughput": values}


def test_nan_is_a_sample() -> None:
    """Read nan: it is a value."""
    (value,) = read_values([THROUGHPUT], ["worker-0: Throughput: nan samples/sec"])["throughput"]
    assert math.isnan(value)


def test_samples_come_in_the_order_of_the_lines() -> None:
    """Read lines of two metrics: values in order."""
    lines = iter(["step 1 loss 4.5", "noise", "step 2 loss 3.5 Throughput: 7 samples/sec"])
    assert read_values([THROUGHPUT, LOSS], lines) == {"loss": [4.5, 3.5], "throughput": [7]}


def test_a_group_that_took_no_part_is_no_sample() -> None:
    """Read a line whose optional group did not match: no value."""
    assert read_values([Metric(name="loss", pattern=r"loss(?: (\d+))?")], ["loss"]) == {"loss": []}


@pytest.mark.parametrize(
    ("reduce", "skip", "values", "expected"),
    [
        ("first", 0, [3, 1, 2], 3),
        ("last", 0, [3, 1, 2], 2),
        ("min", 0, [3, 1, 2], 1),
        ("max", 0, [3, 1, 2], 3),
        ("mean", 0, [3, 1, 2], 2),
        ("median", 0, [3, 1, 2], 2),
        ("median", 0, [4, 1, 2, 3], 2.5),
        ("mean", 1, [100, 1, 3], 2),
        ("first", 2, [9, 9, 1], 1),
    ],
)
def test_samples_are_reduced_to_one_value(reduce: Reduce, skip: int, values: list[float], expected: float) -> None:
    """Reduce values by each rule, after skipping some: one value with its unit."""
    assert _reduced(values, unit="s", skip=skip, reduce=reduce) == {"value": expected, "unit": "s"}


def test_first_and_last_are_both_kept_with_the_unit_where_there_is_one() -> None:
    """Reduce by first-last: both, with the unit if there is one."""
    assert _reduced([4, 3, 2], reduce="first-last") == {"first": 4, "last": 2}
    assert _reduced([4, 3, 2], reduce="first-last", skip=1, unit="nats") == {"first": 3, "last": 2, "unit": "nats"}


@pytest.mark.parametrize("samples", [[], [1.0], [1.0, 2.0]])
def test_a_metric_without_samples_is_left_out(samples: list[float]) -> None:
    """Reduce too few values: None."""
    assert _reduced(samples, skip=2) is None


@pytest.mark.parametrize(
    ("reduce", "values", "expected"),
    [
        ("last", [1, math.nan], {"value": None, "unit": "", "note": "nan"}),
        ("last", [math.nan, 1], {"value": 1, "unit": ""}),
        ("last", [math.inf], {"value": None, "unit": "", "note": "inf"}),
        ("last", [-math.inf], {"value": None, "unit": "", "note": "-inf"}),
        ("min", [1, math.nan], {"value": None, "unit": "", "note": "nan"}),
        ("max", [math.nan, 1], {"value": None, "unit": "", "note": "nan"}),
        ("mean", [1, math.nan], {"value": None, "unit": "", "note": "nan"}),
        ("mean", [math.inf, -math.inf], {"value": None, "unit": "", "note": "nan"}),
        ("median", [math.nan, 1, 2], {"value": None, "unit": "", "note": "nan"}),
        ("first-last", [4, math.nan], {"first": 4, "last": None, "note": "nan"}),
        ("first-last", [4, math.nan, 2], {"first": 4, "last": 2}),
    ],
)
def test_nan_and_infinity_become_null_with_a_note(
    reduce: Reduce, values: list[float], expected: dict[str, Any]
) -> None:
    """Reduce values with nan or infinity: None with a note, valid JSON."""
    reduced = _reduced(values, reduce=reduce)
    assert reduced == expected
    json.dumps(reduced, allow_nan=False)


def test_metrics_keep_their_declared_order() -> None:
    """Reduce two metrics: in the order of their declaration."""
    values = read_values([THROUGHPUT, LOSS], ["loss 4", "loss 3", "Throughput: 8 samples/sec"])
    assert tuple(reduce_values([THROUGHPUT, LOSS], values).items()) == (
        ("throughput", {"value": 8, "unit": "samples/s"}),
        ("loss", {"first": 4, "last": 3}),
    )


def _reduced(values: list[float], *, unit: str = "", skip: int = 0, reduce: Reduce = "last") -> dict[str, Any] | None:
    """Return the reduced values of one metric, None if it is left out."""
    metric = Metric(name="m", pattern="(x)", unit=unit, skip=skip, reduce=reduce)
    return reduce_values([metric], {"m": values}).get("m")


def test_a_note_is_the_first_text_that_its_pattern_matches() -> None:
    """Read notes: the first text that matches each pattern; none for empty or missing ones."""
    lines = ["worker-0: weights: /cache/opt", "critic: opt-350m; weights: none", "weights: random", "data:"]
    notes = (("weights", r"(?:^|: )weights: (.*)"), ("data", "data:(.*)"), ("seed", "seed (.*)"))
    assert read_notes(notes, lines) == {"weights": "/cache/opt"}


# --- samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12/40 loss 3", 12),
        ("worker-1: Step: 12 | loss 3", 12),
        ("[Rank 0] step=12, skipped=0, lr=[1e-05], loss 3", 12),
        ("epoch=0/micro_step=24/global_step=12, RunningAvgSamplesPerSec=9.5, loss 3", 12),
        ("{'global_step': 12, 'epoch': 0.5} loss 3", 12),
        (" iteration       12/      40 | loss 3", 12),
        ("epoch 2 loss 3", None),
        ("time per step: 3.25 s loss 3", None),
        ("max_step 40 steps 7 loss 3", None),
    ],
)
def test_a_sample_has_the_step_that_its_line_names(line: str, step: int | None) -> None:
    """Read a sample: its step is the one of its line, None if there is none."""
    (sample,) = Sampler([LOSS]).read(line)
    assert (sample.step, sample.value) == (step, 3)


def test_a_sample_without_a_step_has_the_last_that_its_rank_named() -> None:
    """Read samples without a step: the rank's last step and the seconds."""
    sampler = Sampler([LOSS])
    for line, rank in (("step 7", 0), ("step 8", 1), ("nothing", 0)):
        assert sampler.read(line, rank) == []
    samples = [sampler.read("loss 3", rank, seconds=1.5)[0] for rank in (0, 1, 2)]
    assert [(sample.step, sample.seconds) for sample in samples] == [(7, 1.5), (8, 1.5), (None, 1.5)]


def test_nan_is_a_sample_with_a_note() -> None:
    """Read nan and infinity: samples of None with a note."""
    samples = [sample for line in ("loss nan", "loss -inf", "loss 3") for sample in Sampler([LOSS]).read(line)]
    assert [(sample.value, sample.note) for sample in samples] == [(None, "nan"), (None, "-inf"), (3, "")]


@pytest.mark.parametrize(
    ("value", "line"),
    [(3.5, ["step 2 loss 3.5"]), (4.5, ["step 1 loss 4.5"]), (4.1, ["step 3 loss 4.0"])],
    ids=["lowest", "first", "mean"],
)
def test_the_line_of_a_metric_is_the_last_with_its_value_else_its_last(value: float, line: list[str]) -> None:
    """Find a metric's line: the last with its value, else its last, [] without one."""
    loss = Metric(name="loss", pattern=r"loss (\S+)")
    lines = ["step 1 loss 4.5", "step 2 loss 3.5", "step 3 loss 4.0", "loss n/a", "bye"]
    assert line_of(loss, value, lines) == line
    assert line_of(loss, value, ["bye"]) == []
