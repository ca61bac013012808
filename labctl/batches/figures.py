"""Figures of a check, judged: by the profile's threshold, else by the baseline, else by the other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from labctl.batches.baseline import Baseline
from labctl.batches.profile import Check, Limit, digest
from labctl.records.verdict import final
from labctl.reports.page import number
from labctl.reports.validation import Figure


class JobOutcome(Struct, frozen=True, kw_only=True):
    """A run of a check on some nodes."""

    nodes: tuple[str, ...]
    passed: bool
    message: str
    run_id: str = ""
    metrics: Mapping[str, Mapping[str, Any]] = {}

    def value(self, metric: str) -> float | None:
        """The number of a metric; None where the run failed or gave none."""
        found = self.metrics.get(metric, {})
        value = found.get(final(found))
        return float(value) if value is not None and self.passed else None


class Bound(Struct, frozen=True, kw_only=True):
    """What a value must reach, or must not exceed, and where that comes from."""

    sign: str
    value: float
    source: str

    def holds(self, value: float | None) -> bool:
        return value is not None and (value >= self.value if self.sign == ">=" else value <= self.value)


def subject(nodes: Sequence[str], *, everyone: bool) -> str:
    """What a figure is of, as the page names it: a node, two nodes, or nothing for all of them."""
    return "" if everyone else " - ".join(nodes)


def bounds(
    check: Check,
    jobs: Sequence[JobOutcome],
    within: float,
    baseline: Baseline | None,
    hosts: Mapping[str, str],
) -> dict[tuple[str, str], Bound]:
    """What each metric of each job must reach, by metric and subject; none where there is nothing to compare with."""
    found = {}
    for limit in check.limits:
        values = [value for job in jobs if (value := job.value(limit.metric)) is not None]
        for job in jobs:
            of = subject(job.nodes, everyone=check.nodes == "all")
            if bound := _absolute(limit):
                found[limit.metric, of] = bound
            elif baseline and (before := _before(baseline, check, limit.metric, job.nodes, hosts)) is not None:
                found[limit.metric, of] = _relative(limit, before, f"baseline of {baseline.recorded[:10]}", within)
            elif len(values) > 1 and check.nodes != "all":
                found[limit.metric, of] = _relative(limit, *_usual(limit, values), within)
    return found


def _before(
    baseline: Baseline, check: Check, metric: str, nodes: Sequence[str], hosts: Mapping[str, str]
) -> float | None:
    """The baseline's value of the same check on the same hosts, or on as many nodes together; None without one."""
    if baseline.checks.get(check.name) != digest(check):
        return None
    everyone = check.nodes == "all"
    if len(nodes) != len(baseline.hosts) if everyone else any(baseline.hosts.get(one) != hosts[one] for one in nodes):
        return None
    known = (one for one in baseline.figures if (one.step, one.what) == (check.name, metric))
    return next((one.value for one in known if one.node == subject(nodes, everyone=everyone)), None)


def _usual(limit: Limit, values: Sequence[float]) -> tuple[float, str]:
    """What is usual among nodes or pairs, in words, too: of two the better, as their median is neither's."""
    from statistics import median

    if len(values) > 2:
        return median(values), f"median of {len(values)}"
    return (min if limit.lower_is_better else max)(values), "better of 2"


def _absolute(limit: Limit) -> Bound | None:
    if limit.min is not None:
        return Bound(sign=">=", value=limit.min, source=limit.source or "profile")
    if limit.max is not None:
        return Bound(sign="<=", value=limit.max, source=limit.source or "profile")
    return None


def _relative(limit: Limit, value: float, source: str, within: float) -> Bound:
    if limit.lower_is_better:
        return Bound(sign="<=", value=(1 + within) * value, source=f"{100 * within:g} % above the {source}")
    return Bound(sign=">=", value=(1 - within) * value, source=f"{100 * within:g} % below the {source}")


def judge(check: Check, jobs: Iterable[JobOutcome], limits: Mapping[tuple[str, str], Bound]) -> list[Figure]:
    """The figures of these jobs; one without a number has missed whatever its threshold."""
    figures = []
    for job in jobs:
        of = subject(job.nodes, everyone=check.nodes == "all")
        for limit in check.limits:
            value, bound = job.value(limit.metric), limits.get((limit.metric, of))
            unit = str(job.metrics.get(limit.metric, {}).get("unit", ""))
            figure = Figure(
                step=check.name,
                what=limit.metric,
                node=of,
                value=value,
                unit=unit,
                limit=f"{bound.sign} {bound.value:.6g} {unit}".rstrip() if bound else "",
                passed=bound.holds(value) if bound else None if value is not None else False,
                source=bound.source if bound else "",
            )
            figures.append(figure)
    return figures


def missed(figure: Figure) -> str:
    """A figure that missed, in words."""
    limit = f", not {figure.limit} ({figure.source})" if figure.limit else ""
    return f"{figure.step}: {figure.what} {number(figure.value)} {figure.unit}".rstrip() + limit
