"""Metrics, criteria and how the run ended -> Verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from labctl.model import Cause, Criterion, CriterionResult, Verdict

EXIT_CODES: dict[Cause, int] = {
    "does-not-fit": 3,
    "node-lost": 4,
    "device-lost": 4,
    "rank-crashed": 4,
    "out-of-memory": 4,
    "launcher-failed": 4,
    "no-metric": 4,
    "criteria": 5,
    "timeout": 124,
    "stalled": 124,
    "interrupted": 130,
}


def judge(
    workload_criteria: Iterable[Criterion],
    reduced_metrics: Iterable[tuple[str, dict[str, Any]]],
    *,
    exit_code: int,
    cause: Cause | None,
    message: str,
    world_size: int,
    expected_world_size: int,
) -> Verdict:
    """Judge a run. The first that applies decides: cause, exit code, ranks, missing numbers, criteria.

    ``message`` explains the cause; a missing or nan metric is never a pass.
    """
    if cause:
        return _error(cause, message or f"The run was stopped: {cause}.")
    if exit_code:
        return _error("launcher-failed", message or f"The launcher failed with exit code {exit_code}.")
    if world_size < expected_world_size:
        return _error("launcher-failed", f"Only {world_size} of {expected_world_size} ranks reported.")
    metrics = dict(reduced_metrics)
    criteria = tuple(workload_criteria)
    for criterion in criteria:
        if absent := _absent(criterion, metrics.get(criterion.metric)):
            return _error("no-metric", absent)
    checks = tuple(check for criterion in criteria for check in _checks(criterion, metrics[criterion.metric]))
    missed = [check for check in checks if not check.passed]
    if missed:
        message = f"{len(missed)} of {_count(len(checks), 'criterion', 'criteria')} not met: {_list(missed)}."
        return Verdict(status="FAIL", cause="criteria", message=message, exit_code=5, checks=checks)
    ranks = _count(world_size, "rank", "ranks")
    message = f"All criteria met on {ranks}: {_list(checks)}." if checks else f"Completed on {ranks}; no criteria."
    return Verdict(status="PASS", cause=None, message=message, exit_code=0, checks=checks)


def _error(cause: Cause, message: str) -> Verdict:
    return Verdict(status="ERROR", cause=cause, message=message, exit_code=EXIT_CODES[cause])


def _absent(criterion: Criterion, metric: dict[str, Any] | None) -> str | None:
    """Why a criterion cannot be checked; None if its numbers are there and finite."""
    if metric is None:
        return f"Metric `{criterion.metric}` not found in the output; the criteria need it."
    needed = ["first", "last"] if criterion.decrease is not None else [_final(metric)]
    if all(metric.get(key) is not None for key in needed):
        return None
    return f"Metric `{criterion.metric}` is {metric.get('note', 'incomplete')}; its criteria cannot be checked."


def _checks(criterion: Criterion, metric: dict[str, Any]) -> list[CriterionResult]:
    """The result per bound; ``min`` and ``max`` apply to the last value of a metric with a first and a last.

    The value of a decrease is in per cent; None if the first value is 0.
    """
    name, unit = criterion.metric, metric.get("unit", "")
    checks = []
    if criterion.min is not None:
        value = metric[_final(metric)]
        checks.append(_check(f"{name} >= {criterion.min:g} {unit}", value, passed=value >= criterion.min))
    if criterion.max is not None:
        value = metric[_final(metric)]
        checks.append(_check(f"{name} <= {criterion.max:g} {unit}", value, passed=value <= criterion.max))
    if criterion.decrease is not None:
        first, last = metric["first"], metric["last"]
        fall = (first - last) / abs(first) if first else None
        value = None if fall is None else 100 * fall
        passed = fall is not None and fall >= criterion.decrease
        checks.append(_check(f"{name} falls by {100 * criterion.decrease:g} %", value, passed=passed))
    return checks


def _check(text: str, value: float | None, *, passed: bool) -> CriterionResult:
    return CriterionResult(criterion=text.strip(), value=value, passed=passed)


def _final(metric: dict[str, Any]) -> str:
    return "value" if "value" in metric else "last"


def _list(checks: Iterable[CriterionResult]) -> str:
    shown = ((check.criterion, "undefined" if check.value is None else f"{check.value:.6g}") for check in checks)
    return "; ".join(f"{criterion} (was {value})" for criterion, value in shown)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
