from __future__ import annotations

from typing import Any

import pytest
from support.builders import job, lab

from labctl.model import Cause, Criterion, Metric, Relative, Verdict
from labctl.records.verdict import RunOutcome, judge

THROUGHPUT = Criterion(metric="throughput", min=600)
LOSS = Criterion(metric="loss", decrease=0.2)
GOOD: dict[str, dict[str, Any]] = {
    "throughput": {"value": 612.5, "unit": "samples/s"},
    "loss": {"first": 4.0, "last": 3.0},
}


def test_met_criteria_pass_and_the_message_has_the_numbers() -> None:
    """Judge two met criteria: PASS, exit code 0, checks and message with the numbers."""
    verdict = _judge()
    assert (verdict.status, verdict.cause, verdict.exit_code) == ("PASS", None, 0)
    assert [(check.criterion, check.value, check.passed) for check in verdict.checks] == [
        ("throughput >= 600 samples/s", 612.5, True),
        ("loss falls by 20 %", 25.0, True),
    ]
    assert verdict.message == (
        "All criteria met on 2 ranks: throughput 612.5 samples/s (>= 600 wanted);"
        " loss fell by 25.0 % (at least 20 % wanted)."
    )


@pytest.mark.parametrize(
    ("criterion", "metric", "text", "value", "passed"),
    [
        (Criterion(metric="m", min=1), {"value": 1, "unit": ""}, "m >= 1", 1, True),
        (Criterion(metric="m", min=1), {"value": 0.99, "unit": ""}, "m >= 1", 0.99, False),
        (Criterion(metric="m", max=1), {"value": 1, "unit": "s"}, "m <= 1 s", 1, True),
        (Criterion(metric="m", max=1), {"value": 2, "unit": "s"}, "m <= 1 s", 2, False),
        (Criterion(metric="m", max=3), {"first": 9, "last": 2}, "m <= 3", 2, True),
        (Criterion(metric="m", decrease=0.2), {"first": 10, "last": 8}, "m falls by 20 %", 20, True),
        (Criterion(metric="m", decrease=0.2), {"first": 10, "last": 9}, "m falls by 20 %", 10, False),
        (Criterion(metric="m", decrease=0.2), {"first": 10, "last": 11}, "m falls by 20 %", -10, False),
        (Criterion(metric="m", decrease=0.5), {"first": -2, "last": -4}, "m falls by 50 %", 100, True),
        (Criterion(metric="m", decrease=0.2), {"first": 0, "last": -1}, "m falls by 20 %", None, False),
        (Criterion(metric="m", above=0), {"value": 0, "unit": "s"}, "m > 0 s", 0, False),
        (Criterion(metric="m", above=0), {"value": 175.759, "unit": "s"}, "m > 0 s", 175.759, True),
        (Criterion(metric="m", below=1), {"value": 1, "unit": ""}, "m < 1", 1, False),
        (Criterion(metric="m", below=1), {"value": 0.99, "unit": ""}, "m < 1", 0.99, True),
        (Criterion(metric="m", decrease=0.07), {"first": 1, "last": 1}, "m falls by 7 %", 0, False),
    ],
)
def test_each_bound_is_checked(
    criterion: Criterion, metric: dict[str, Any], text: str, value: float | None, passed: bool
) -> None:
    """Judge one criterion of each kind: PASS, or FAIL with cause criteria and exit code 5."""
    verdict = _judge(criteria=[criterion], metrics={"m": metric})
    (check,) = verdict.checks
    assert (check.criterion, check.value, check.passed) == (text, value, passed)
    assert (verdict.status, verdict.cause, verdict.exit_code) == (
        ("PASS", None, 0) if passed else ("FAIL", "criteria", 5)
    )


@pytest.mark.parametrize(
    ("criterion", "metric", "words"),
    [
        (Criterion(metric="m", above=0), {"value": 208.604}, "m 208.6 (> 0 wanted)"),
        (Criterion(metric="m", min=600), {"value": 599.996}, "m 599.996 (>= 600 wanted)"),
        (
            Criterion(metric="m", decrease=0.2),
            {"first": 8.119, "last": 4.8749},
            "m fell by 40.0 % (at least 20 % wanted)",
        ),
        (
            Criterion(metric="m", decrease=0.2),
            {"first": 10, "last": 8.0004},
            "m fell by 19.996 % (at least 20 % wanted)",
        ),
        (Criterion(metric="m", decrease=0.07), {"first": 100, "last": 93}, "m fell by 7.0 % (at least 7 % wanted)"),
        (Criterion(metric="m", decrease=0.2), {"first": 10, "last": 10.3}, "m rose by 3.0 % (at least 20 % wanted)"),
        (
            Criterion(metric="m", decrease=0.2),
            {"first": 0, "last": 1},
            "m began at 0, so that its fall is undefined (at least 20 % wanted)",
        ),
    ],
)
def test_figures_are_written_as_people_write_them(criterion: Criterion, metric: dict[str, float], words: str) -> None:
    """Judge a criterion: the message has few digits, and enough to tell the value apart from the limit."""
    assert words in _judge(criteria=[criterion], metrics={"m": metric}).message


def test_a_range_gives_two_checks() -> None:
    """Judge a criterion with min and max: two checks, the message names the missed one."""
    verdict = _judge(criteria=[Criterion(metric="throughput", min=1, max=600)])
    assert [check.passed for check in verdict.checks] == [True, False]
    assert verdict.message == "1 of 2 criteria not met: throughput 612.5 samples/s (<= 600 wanted)."


@pytest.mark.parametrize(
    ("share", "text"),
    [(-0.05, "m >= 95 s, 5 % below r1"), (0.07, "m >= 95 s, 7 % above r1"), (0, "m >= 95 s, that of r1")],
)
def test_a_relative_criterion_names_its_number_and_its_run(share: float, text: str) -> None:
    """Judge a relative criterion: its text has number, share and run."""
    criterion = Criterion(metric="m", min=95, relative=Relative(">=", share, "r1"))
    (check,) = _judge(criteria=[criterion], metrics={"m": {"value": 94.0, "unit": "s"}}).checks
    assert (check.criterion, check.passed) == (text, False)


@pytest.mark.parametrize(
    ("cause", "exit_code"),
    [
        ("timeout", 124),
        ("stalled", 124),
        ("interrupted", 130),
        ("does-not-fit", 3),
        ("node-lost", 4),
        ("device-lost", 4),
        ("rank-crashed", 4),
        ("launcher-failed", 4),
        ("out-of-memory", 4),
    ],
)
def test_a_cause_decides_the_exit_code_whatever_the_numbers_say(cause: Cause, exit_code: int) -> None:
    """Judge a run with a cause: ERROR with its message and the cause's exit code."""
    verdict = _judge(cause=cause, message="worker-1 went away.", exit_code=1)
    assert verdict == Verdict(status="ERROR", cause=cause, message="worker-1 went away.", exit_code=exit_code)
    assert cause in _judge(cause=cause).message


def test_a_failed_launcher_is_an_error_even_with_good_numbers() -> None:
    """Judge a launcher's exit code 137: ERROR, launcher-failed, exit code 4."""
    verdict = _judge(exit_code=137)
    assert (verdict.status, verdict.cause, verdict.exit_code) == ("ERROR", "launcher-failed", 4)
    assert "137" in verdict.message


def test_ranks_that_did_not_report_are_an_error_with_the_numbers() -> None:
    """Judge a run in which one of two ranks reported: ERROR, launcher-failed, exit code 4."""
    verdict = _judge(world_size=1)
    assert (verdict.status, verdict.cause, verdict.exit_code) == ("ERROR", "launcher-failed", 4)
    assert verdict.message == "Only 1 of 2 ranks reported."


@pytest.mark.parametrize(
    ("criterion", "metrics"),
    [
        (THROUGHPUT, {}),
        (THROUGHPUT, {"throughput": {"value": None, "unit": "samples/s", "note": "nan"}}),
        (THROUGHPUT, {"throughput": {"value": None, "unit": "samples/s", "note": "inf"}}),
        (LOSS, {}),
        (LOSS, {"loss": {"first": 4.0, "last": None, "note": "nan"}}),
        (LOSS, {"loss": {"first": None, "last": 4.0, "note": "nan"}}),
        (LOSS, {"loss": {"value": 4.0, "unit": ""}}),
        (Criterion(metric="loss", max=3), {"loss": {"first": 4.0, "last": None, "note": "nan"}}),
    ],
)
def test_a_missing_number_is_never_a_pass(criterion: Criterion, metrics: dict[str, dict[str, Any]]) -> None:
    """Judge a criterion without its number: ERROR, no-metric, exit code 4."""
    verdict = _judge(criteria=[criterion], metrics=metrics)
    assert (verdict.status, verdict.cause, verdict.exit_code) == ("ERROR", "no-metric", 4)
    assert criterion.metric in verdict.message


def test_the_pattern_of_a_missing_number_is_named() -> None:
    """Judge a missing declared metric: the message has its pattern."""
    assert r"by the pattern `throughput: (\S+)`" in _judge(criteria=[THROUGHPUT], metrics={}).message


def test_a_metric_that_is_to_be_found_and_was_not_is_named_with_those_that_were() -> None:
    """Judge a missing metric that is to be found: the message lists those that were."""
    ran = job(lab(2), criteria=(Criterion(metric="loss", max=1),), known_metrics="all")
    ended = RunOutcome(exit_code=0, cause=None, message="")
    found = judge(ran, {"accuracy": {"value": 0.5}, "val_loss": {"value": 2.0}}, ended, 2)
    said = "Metric `loss` not found in the output, as `loss: 1.2`, `loss=1.2` or alike"
    assert (found.cause, found.message) == ("no-metric", f"{said}; what was found: accuracy, val_loss.")
    assert judge(ran, {}, ended, 2).message == f"{said}."


def test_a_number_that_no_criterion_needs_may_be_missing() -> None:
    """Judge with nan in a metric without criterion: PASS, and the message says so."""
    verdict = _judge(criteria=[THROUGHPUT], metrics={**GOOD, "loss": {"first": 4, "last": None, "note": "nan"}})
    assert verdict.status == "PASS"
    assert verdict.message.endswith(" No criterion needs it, but `loss` is nan.")


def test_without_criteria_a_good_end_passes() -> None:
    """Judge a good end without criteria: PASS, and the message says "no criteria"."""
    verdict = _judge(criteria=[], world_size=1, expected_world_size=1)
    assert (verdict.status, verdict.message) == ("PASS", "1 rank ended with code 0; no criteria.")


def test_a_pass_of_a_program_without_ranks_names_none() -> None:
    """Judge a program that runs once: PASS, the message speaks of the program or of criteria alone."""
    once = job(launcher="script:once", criteria=(), metrics=())
    verdict = judge(once, {}, RunOutcome(exit_code=0, cause=None, message=""), 0)
    assert (verdict.status, verdict.message) == ("PASS", "The program ended with code 0; no criteria.")
    once = job(launcher="script:once", criteria=(Criterion(metric="m", below=1),), metrics=())
    met = judge(once, {"m": {"value": 0.5, "unit": ""}}, RunOutcome(exit_code=0, cause=None, message=""), 0)
    assert met.message == "All criteria met: m 0.5 (< 1 wanted)."


def test_a_pass_without_a_line_of_output_says_so() -> None:
    """Judge a silent run: PASS, the message says that no rank wrote a line."""
    verdict = _judge(criteria=[], silent=True)
    assert verdict.message == "2 ranks ended with code 0; no criteria. No rank wrote a line."


def test_a_program_that_gives_up_is_quoted_where_nothing_was_judged() -> None:
    """Judge a program whose last line gives up: it is quoted only without criteria."""
    words = "rank 0: CUDA is not available"
    verdict = _judge(criteria=[], gave_up=words)
    assert verdict.status == "PASS"
    assert verdict.message.endswith(" The program may have given up; the last line of rank 0: CUDA is not available")
    assert "CUDA" not in _judge(criteria=[THROUGHPUT], gave_up=words).message


def _judge(
    *,
    criteria: list[Criterion] | None = None,
    metrics: dict[str, dict[str, Any]] | None = None,
    exit_code: int = 0,
    cause: Cause | None = None,
    message: str = "",
    world_size: int = 2,
    expected_world_size: int = 2,
    silent: bool = False,
    gave_up: str = "",
) -> Verdict:
    """Judge a job of two ranks with these criteria, metrics and end; the defaults pass."""
    criteria = [THROUGHPUT, LOSS] if criteria is None else criteria
    declared = tuple(Metric(name=metric.metric, pattern=rf"{metric.metric}: (\S+)") for metric in criteria)
    ran = job(lab(expected_world_size), criteria=tuple(criteria), metrics=declared)
    ended = RunOutcome(exit_code=exit_code, cause=cause, message=message, silent=silent, gave_up=gave_up)
    return judge(ran, GOOD if metrics is None else metrics, ended, world_size)
