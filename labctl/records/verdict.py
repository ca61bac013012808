"""Metrics, criteria and how the run ended -> Verdict."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from labctl.model import BOUNDS, Cause, Criterion, CriterionResult, Job, Relative, Sign, Verdict, Workload

# Exit codes of an ERROR by its cause; 4 of every other cause.
EXIT_CODES: dict[Cause, int] = {"does-not-fit": 3, "no-image": 3, "timeout": 124, "stalled": 124, "interrupted": 130}
HOLDS: dict[Sign, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class RunOutcome(Struct, frozen=True, kw_only=True):
    """How a run ended: the launcher's exit code, and the cause, with a message, if it was stopped or failed."""

    exit_code: int
    cause: Cause | None
    message: str
    silent: bool = False
    """Whether no rank wrote a line."""
    seconds: float = 0
    """That its command took, as the agent in the launcher says."""
    gone: tuple[str, ...] = ()
    """The nodes that it lost and went on without, and how."""


def judge(job: Job, metrics: Mapping[str, Mapping[str, Any]], ended: RunOutcome, world_size: int) -> Verdict:
    """Judge a run. The first that applies decides: cause, exit code, ranks, missing numbers, criteria.

    A missing or nan metric is never a pass.
    """
    if ended.cause:
        return error(ended.cause, ended.message or f"The run was stopped: {ended.cause}.")
    if ended.exit_code:
        return error("launcher-failed", ended.message or f"The launcher failed with exit code {ended.exit_code}.")
    expected = sum(node.slots for node in job.nodes)
    if world_size < expected:
        return error("launcher-failed", f"Only {world_size} of {expected} ranks reported.")
    checks: list[CriterionResult] = []
    for criterion in job.workload.criteria:
        metric = metrics.get(criterion.metric, {})
        needed = ["first", "last"] if criterion.decrease is not None else [final(metric)]
        if any(metric.get(key) is None for key in needed):
            return error("no-metric", _why_absent(job.workload, criterion.metric, metric))
        checks += _checks(criterion, metric)
    missed = [check for check in checks if not check.passed]
    if missed:
        criteria = "criterion" if len(checks) == 1 else "criteria"
        message = f"{len(missed)} of {len(checks)} {criteria} not met: {_list(missed)}."
        return Verdict(status="FAIL", cause="criteria", message=message, exit_code=5, checks=tuple(checks))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    message = f"All criteria met on {ranks}: {_list(checks)}." if checks else f"Completed on {ranks}; no criteria."
    if ended.silent:
        message += " No rank wrote a line."
    if odd := [f"`{name}` is {metric['note']}" for name, metric in metrics.items() if "note" in metric]:
        message += f" No criterion needs it, but {', '.join(odd)}."
    if ended.gone:
        message += f" It went on without {'; '.join(ended.gone)}."
    return Verdict(status="PASS", cause=None, message=message, exit_code=0, checks=tuple(checks))


def error(cause: Cause, message: str) -> Verdict:
    return Verdict(status="ERROR", cause=cause, message=message, exit_code=EXIT_CODES.get(cause, 4))


def _why_absent(workload: Workload, name: str, metric: Mapping[str, Any]) -> str:
    if metric:
        return f"Metric `{name}` is {metric.get('note', 'incomplete')}; its criteria cannot be checked."
    pattern = next(one.pattern for one in workload.metrics if one.name == name)
    return f"Metric `{name}` not found in the output, by the pattern `{pattern}`; the criteria need it."


def _checks(criterion: Criterion, metric: Mapping[str, Any]) -> list[CriterionResult]:
    """The result per bound, which applies to the last value of a metric with a first and a last.

    The value of a decrease is in per cent; None if the first value is 0.
    """
    name, unit = criterion.metric, metric.get("unit", "")
    checks = []
    of = f", {distance(criterion.relative)}" if criterion.relative else ""
    for sign, field in BOUNDS.items():
        bound = getattr(criterion, field)
        if bound is not None:
            text, value = f"{name} {sign} {number(bound)} {unit}".strip() + of, metric[final(metric)]
            checks.append(CriterionResult(criterion=text, value=value, passed=HOLDS[sign](value, bound)))
    if criterion.decrease is not None:
        first, last = metric["first"], metric["last"]
        fall = (first - last) / abs(first) if first else None
        text, value = f"{name} falls by {100 * criterion.decrease:g} %", None if fall is None else 100 * fall
        passed = fall is not None and fall >= criterion.decrease
        checks.append(CriterionResult(criterion=text, value=value, passed=passed))
    return checks


def final(metric: Mapping[str, Any]) -> str:
    """The key of the number that a metric is judged by."""
    return "value" if "value" in metric else "last"


def distance(relative: Relative) -> str:
    """Where a relative bound lies, such as ``5 % below RUN``."""
    if not relative.share:
        return f"that of {relative.run}"
    return f"{abs(100 * relative.share):g} % {'below' if relative.share < 0 else 'above'} {relative.run}"


def number(value: float) -> str:
    """A number as a person writes it: six significant digits, and no exponent from a millionth to a quadrillion."""
    size = abs(value)
    if 999_999.5 <= size < 1e15:
        return f"{value:.0f}"
    return f"{value:.11f}".rstrip("0") if 1e-6 <= size < 1e-4 else f"{value:.6g}"


def _list(checks: Iterable[CriterionResult]) -> str:
    shown = ((check.criterion, "undefined" if check.value is None else number(check.value)) for check in checks)
    return "; ".join(f"{criterion} (was {value})" for criterion, value in shown)
