"""Verdict of a run: from its metrics, its criteria, and how it ended."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from labctl.model import BOUNDS, Cause, Criterion, CriterionResult, Job, Relative, Sign, Verdict, Workload
from labctl.system import human

EXIT_CODES: dict[Cause, int] = {
    "does-not-fit": 3,
    "no-image": 3,
    "timeout": 124,
    "stalled": 124,
    "interrupted": 130,
    "no-progress": 7,
}
"""Exit code of an ERROR by cause; 4 for all other causes."""
HOLDS: dict[Sign, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class RunOutcome(Struct, frozen=True, kw_only=True):
    """End of a run: the launcher's exit code; cause and message if the run was stopped or failed."""

    exit_code: int
    cause: Cause | None
    message: str
    silent: bool = False
    """True if no rank wrote a line."""
    gave_up: str = ""
    """Rank that seems to have given up, and its last line, as ``rank 0: no GPU found``."""
    seconds: float = 0
    """Duration of its command, as measured in the launcher."""
    gone: tuple[str, ...] = ()
    """Nodes that it lost and went on without, with the reason."""


def judge(job: Job, metrics: Mapping[str, Mapping[str, Any]], ended: RunOutcome, world_size: int) -> Verdict:
    """Return PASS, FAIL or ERROR of a run by cause, exit code, missing ranks, missing numbers, then criteria.

    A missing or nan metric is never a pass.
    """
    if failed := _failure(job, ended, world_size):
        return failed
    judged: list[tuple[CriterionResult, str]] = []
    for criterion in job.workload.criteria:
        metric = metrics.get(criterion.metric, {})
        needed = ["first", "last"] if criterion.decrease is not None else [final(metric)]
        if any(metric.get(key) is None for key in needed):
            return error("no-metric", _why_absent(job.workload, criterion.metric, metrics))
        judged += _checks(criterion, metric)
    checks = tuple(check for check, _ in judged)
    if missed := [words for check, words in judged if not check.passed]:
        criteria = "criterion" if len(checks) == 1 else "criteria"
        message = f"{len(missed)} of {len(checks)} {criteria} not met: {'; '.join(missed)}."
        return Verdict(status="FAIL", cause="criteria", message=message, exit_code=5, checks=checks)
    message = _passed([words for _, words in judged], metrics, ended, world_size)
    return Verdict(status="PASS", cause=None, message=message, exit_code=0, checks=checks)


def _failure(job: Job, ended: RunOutcome, world_size: int) -> Verdict | None:
    """Return the ERROR verdict of a run with a cause, exit code or too few ranks; None if it completed."""
    if ended.cause:
        return error(ended.cause, ended.message or f"The run was stopped: {ended.cause}.")
    if ended.exit_code:
        return error("launcher-failed", ended.message or f"The launcher failed with exit code {ended.exit_code}.")
    if world_size < job.ranks:
        text = f"Only {world_size} of {job.ranks} ranks reported."
        none = " A program that starts no ranks: `labctl run --once`." if job.workload.starts_itself else ""
        return error("launcher-failed", text + none)
    return None


def _passed(met: Sequence[str], metrics: Mapping[str, Mapping[str, Any]], ended: RunOutcome, world_size: int) -> str:
    """Render the message of a run that passed: ``met`` criteria, silence, giving up, nan and lost nodes."""
    ranks = human.count(world_size, "rank") if world_size else ""
    message = f"{ranks or 'The program'} ended with code 0; no criteria."
    if met:
        message = f"All criteria met{f' on {ranks}' if ranks else ''}: {'; '.join(met)}."
    if ended.silent:
        message += " No rank wrote a line."
    if ended.gave_up and not met:
        message += f" The program may have given up; the last line of {ended.gave_up}"
    if odd := [f"`{name}` is {metric['note']}" for name, metric in metrics.items() if "note" in metric]:
        message += f" No criterion needs it, but {', '.join(odd)}."
    if ended.gone:
        message += f" It went on without {'; '.join(ended.gone)}."
    return message


def error(cause: Cause, message: str) -> Verdict:
    """Return an ERROR verdict with the cause's exit code, 4 by default."""
    return Verdict(status="ERROR", cause=cause, message=message, exit_code=EXIT_CODES.get(cause, 4))


def _why_absent(workload: Workload, name: str, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Render why a metric's criteria cannot be checked: it is nan, or was not found by its pattern."""
    if metric := metrics.get(name):
        return f"Metric `{name}` is {metric.get('note', 'incomplete')}; its criteria cannot be checked."
    pattern = next((declared.pattern for declared in workload.metrics if declared.name == name), "")
    if pattern:
        return f"Metric `{name}` not found in the output, by the pattern `{pattern}`; the criteria need it."
    others = f"; what was found: {human.listed(metrics)}" if metrics else ""
    return f"Metric `{name}` not found in the output, as `{name}: 1.2`, `{name}=1.2` or alike{others}."


def _checks(criterion: Criterion, metric: Mapping[str, Any]) -> Iterator[tuple[CriterionResult, str]]:
    """Yield a result, with a sentence of its figures, for each bound of a criterion, and for its decrease.

    Bounds are of the final value; the decrease is from the first to the last, in per cent, None if the first is 0.
    """
    name, unit = criterion.metric, metric.get("unit", "")
    of = f", {distance(criterion.relative)}" if criterion.relative else ""
    for sign, field in BOUNDS.items():
        bound = getattr(criterion, field)
        if bound is not None:
            text, value = f"{name} {sign} {human.exact(bound)} {unit}".strip() + of, metric[final(metric)]
            shown, limit = human.compared(value, bound)
            words = f"{name} {f'{shown} {unit}'.strip()} ({sign} {limit} wanted{of})"
            yield CriterionResult(criterion=text, value=value, passed=HOLDS[sign](value, bound)), words
    if criterion.decrease is not None:
        first, last = metric["first"], metric["last"]
        fall = (first - last) / abs(first) if first else None
        text, value = f"{name} falls by {human.exact(100 * criterion.decrease)} %", None if fall is None else 100 * fall
        passed = fall is not None and fall >= criterion.decrease
        yield CriterionResult(criterion=text, value=value, passed=passed), _fall_text(name, fall, criterion.decrease)


def _fall_text(name: str, fall: float | None, least: float) -> str:
    """Render by what share a metric fell, with one decimal, or as many as tell it apart from the least wanted."""
    wanted = f"(at least {human.exact(100 * least)} % wanted)"
    if fall is None:
        return f"{name} began at 0, so that its fall is undefined {wanted}"
    texts = (f"{100 * fall:.{digits}f}" for digits in range(1, 12))
    shown = next((text for text in texts if (float(text) / 100 >= least) == (fall >= least)), f"{100 * fall}")
    return f"{name} {'rose' if fall < 0 else 'fell'} by {shown.lstrip('-')} % {wanted}"


def final(metric: Mapping[str, Any]) -> str:
    """Return the key of a metric's judged number: ``value`` if it has one, else ``last``."""
    return "value" if "value" in metric else "last"


def distance(relative: Relative) -> str:
    """Render a relative bound's distance, as ``5 % below RUN``, or ``that of RUN``."""
    if not relative.share:
        return f"that of {relative.run}"
    return f"{human.exact(abs(100 * relative.share))} % {'below' if relative.share < 0 else 'above'} {relative.run}"
