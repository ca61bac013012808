from __future__ import annotations

import math
from typing import Any

import pytest

from labctl.model import Metric, Progress
from labctl.records.finder import Finder
from labctl.records.lines import Line
from labctl.records.metrics import LONGEST_LINE
from labctl.records.progress import RECENT, Tracker

LOSS = Metric(name="loss", pattern=r"loss (\S+)")
THROUGHPUT = Metric(name="throughput", pattern=r"Throughput: (\S+)", unit="samples/s")


def progress(*lines: str | tuple[float, str] | tuple[float, str, int]) -> Progress:
    """Read lines, a second apart or with time and rank; return the progress."""
    tracker = Tracker((LOSS, THROUGHPUT))
    for number, line in enumerate(lines):
        when, text, *rank = (1000.0 + number, line) if isinstance(line, str) else (1000 + line[0], *line[1:])
        tracker.read((Line(text, when, *rank),))
    return tracker.progress()


def at(tracked: Progress) -> tuple[str, int | None, int | None]:
    """Return what is counted, the step and the number of steps."""
    return tracked.counts, tracked.step, tracked.steps


def bar(step: int, name: str = "") -> str:
    """Return a progress bar of this step out of 100."""
    return f"\r{name} {step}%|███       | {step}/100 [00:10<00:23,  2.93it/s]"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), ("step", None, None)),
        (("nothing of that kind",), ("step", None, None)),
        (("step 12/40 loss 3",), ("step", 12, 40)),
        (("[step 3 of 10]",), ("step", 3, 10)),
        ((" iteration       12/      40 | consumed samples",), ("step", 12, 40)),
        (("{'loss': 1.2, 'step': 3}",), ("step", 3, None)),
        (("micro_step=24/global_step=12",), ("step", 12, None)),
        (("step 3/2.5",), ("step", 3, None)),
        (("step time: 3.2 s",), ("step", None, None)),
        (("step 1/40", "step 2"), ("step", 2, 40)),
        (("Epoch 2/3 done",), ("epoch", 2, 3)),
        (("{'loss': 1.2, 'epoch': 0.3}",), ("step", None, None)),
        (("Epoch 2/3", "step 5/9", "Epoch 3/3"), ("step", 5, 9)),
        ((bar(1) + bar(30),), ("step", 30, 100)),
        ((bar(30, "Map:"),), ("step", None, None)),
        (("Epoch 1/3", bar(30)), ("step", 30, 100)),
        ((bar(30) + "\r{'loss': 1.2, 'step': 30}",), ("step", 30, 100)),
        ((bar(30) + "\r{'loss': 1.2, 'step': 7}",), ("step", 7, None)),
    ],
)
def test_lines_tell_the_step_of_how_many(lines: tuple[str, ...], expected: tuple[str, int | None, int | None]) -> None:
    """Read lines: what is counted, step and total; bars with a name are skipped."""
    assert at(progress(*lines)) == expected


def test_a_step_that_several_ranks_name_counts_once() -> None:
    """Read steps of four ranks: each counts once."""
    lines = [(step + 0.1 * rank, f"step {step}/100", rank) for step in range(1, 11) for rank in range(4)]
    tracked = progress(*lines)
    assert (tracked.step, tracked.seconds_per_step, tracked.seconds_left) == (10, 1.0, 90.0)


def test_a_rank_that_is_behind_takes_no_step_back() -> None:
    """Read a step of a rank that is behind: the step does not fall."""
    tracked = progress(
        (1, "step 1/9", 0), (2, "step 2/9", 0), (3, "step 3/9", 0), (3.1, "step 2/9", 1), (4, "step 4/9", 0)
    )
    assert (tracked.step, tracked.seconds_per_step) == (4, 1.0)


def test_steps_that_begin_again_are_counted_again() -> None:
    """Read steps that begin again: counted and timed anew."""
    tracked = progress("step 1/3", "step 2/3", "step 3/3", (60, "step 1/3"), (61, "step 2/3"))
    assert (tracked.step, tracked.seconds_per_step, tracked.seconds_left) == (2, 1.0, 1.0)


def test_the_time_of_a_step_is_known_where_only_every_tenth_is_named() -> None:
    """Read every tenth step: seconds per step and left."""
    tracked = progress((0, "step 10/100"), (20, "step 20/100"), (40, "step 30/100"))
    assert (tracked.seconds_per_step, tracked.seconds_left) == (2.0, 140.0)


def test_one_slow_step_does_not_change_the_time_left() -> None:
    """Read one very slow step: the time left is that of the usual ones."""
    tracked = progress((0, "step 1/10"), (1, "step 2/10"), (2, "step 3/10"), (900, "step 4/10"))
    assert tracked.seconds_left == 6.0


def test_the_time_left_is_of_the_last_few_hundred_steps() -> None:
    """Read slow and then fast steps: only the last RECENT count."""
    slow = [(10.0 * step, f"step {step}/10000") for step in range(100)]
    fast = [(1000.0 + step, f"step {100 + step}/10000") for step in range(RECENT + 1)]
    assert progress(*slow, *fast).seconds_per_step == 1.0


@pytest.mark.parametrize(
    ("lines", "remaining"),
    [
        (("step 1/10",), None),
        (("step 1", "step 2"), None),
        (("step 9/10", "step 12/10"), 0.0),
        (("step 1/10", (1, "step 2/10")), 8.0),
    ],
)
def test_the_time_left_is_unknown_or_at_least_nothing(lines: tuple[Any, ...], remaining: float | None) -> None:
    """Ask for the time left: None without steps or total, at least 0."""
    assert progress(*lines).seconds_left == remaining


def test_the_last_value_of_each_metric_is_told_with_its_unit() -> None:
    """Read metrics: the last value of each with unit, a note for nan, and the time of the last line."""
    tracked = progress("step 1 loss 3.5", "Throughput: 7", "step 2 loss nan")
    assert tracked.metrics == {
        "loss": {"value": None, "unit": "", "note": "nan"},
        "throughput": {"value": 7.0, "unit": "samples/s"},
    }
    assert tracked.last_line == 1002.0


def test_metrics_that_are_found_are_told_with_their_format_and_have_samples_at_their_steps() -> None:
    """Read declared and found metrics: samples with step and seconds, format and line of the found ones."""
    tracker = Tracker((THROUGHPUT,), Finder(declared=["throughput"]))
    samples = tracker.read((Line("step 3 Throughput: 7 loss: 2.5", 1000.0, 0), Line("loss: nan", 1001.0, 0)))
    assert [(sample.metric, sample.step, sample.seconds, sample.value) for sample in samples] == [
        ("throughput", 3, 0.0, 7.0),
        ("loss", 3, 0.0, 2.5),
        ("loss", 3, 1.0, None),
    ]
    assert tracker.progress().metrics["loss"] == {"value": None, "unit": "", "found": "name: 1.2", "note": "nan"}
    assert tracker.found()["loss"]["line"] == "loss: nan"
    assert Tracker((THROUGHPUT,)).found() == {}


def test_a_bar_beside_one_that_is_not_at_its_end_does_not_count() -> None:
    """Read a second bar: it counts only once the first is at its end."""
    evaluation = bar(63).replace("/100", "/70")
    assert at(progress(bar(30), evaluation)) == ("step", 30, 100)
    assert at(progress(bar(30), evaluation, bar(31))) == ("step", 31, 100)
    assert at(progress(bar(100), evaluation)) == ("step", 63, 70)


def test_what_follows_many_bars_in_one_line_is_read() -> None:
    """Read a metric after many bars of one line: bar and metric."""
    tracked = progress("".join(map(bar, range(1, 99))) * 9 + "\rloss 3.5")
    assert (at(tracked), tracked.metrics["loss"]["value"]) == (("step", 98, 100), 3.5)


def test_of_a_line_that_is_too_long_the_end_is_not_searched() -> None:
    """Read a line above LONGEST_LINE: its end is not searched."""
    tracked = progress("step 1/9", "x" * LONGEST_LINE + " step 2/9")
    assert (tracked.step, tracked.last_line) == (1, 1001.0)


def test_a_run_without_lines_tells_nothing() -> None:
    """Read nothing: the empty Progress."""
    assert progress() == Progress()
    assert not math.isnan(progress("step 1/2", "step 1/2").seconds_left or 0)
