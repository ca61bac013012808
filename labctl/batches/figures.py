"""Judge the figures of a check: by the profile's threshold, else by the baseline, else by the other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.batches.baseline import Baseline
from labctl.batches.evidence import DISTURBED, Round, undisturbed
from labctl.batches.profile import Check, Limit, digest
from labctl.records.verdict import final
from labctl.reports.validation import Figure
from labctl.system import human

LATENCY = "latency"


class JobOutcome(Struct, frozen=True, kw_only=True):
    """Result of one run of a check on some nodes."""

    nodes: tuple[str, ...]
    passed: bool
    message: str
    run_id: str = ""
    metrics: Mapping[str, Mapping[str, Any]] = {}
    notes: Mapping[str, str] = {}
    rounds: tuple[Round, ...] = ()
    """Readings of nodes that took turns in the run."""

    def value(self, metric: str) -> float | None:
        """Return the final value of a metric; None if the run failed or gave none."""
        values = self.metrics.get(metric, {})
        value = values.get(final(values))
        return float(value) if value is not None and self.passed else None


class Bound(Struct, frozen=True, kw_only=True):
    """Threshold of a value, and its source: ``>=`` a minimum or ``<=`` a maximum."""

    sign: str
    value: float
    source: str
    of_others: bool = False
    """It comes from other figures of the same validation."""
    of_baseline: bool = False
    """It comes from an earlier validation."""

    def text(self, unit: str) -> str:
        """Render as ``>= 12 GB/s``: exact, or if it is computed from other values, with four digits."""
        value = human.exact(self.value, 4) if self.of_others or self.of_baseline else human.exact(self.value)
        return f"{self.sign} {value} {unit}".rstrip()

    def holds(self, value: float | None) -> bool:
        """Tell if a value meets the bound; no value does not."""
        if value is None:
            return False
        return value >= self.value if self.sign == ">=" else value <= self.value

    def misses(self, value: float, lost: float) -> bool | None:
        """Tell if a value misses the bound; None if the share of time lost to other programs may be why."""
        if self.holds(value):
            return False
        if lost > DISTURBED:
            return None
        factor = undisturbed(1.0, lost)
        return None if self.holds(value * factor if self.sign == ">=" else value / factor) else True


def subject(nodes: Sequence[str], *, everyone: bool) -> str:
    """Return the name of a figure's nodes: a node, two nodes as ``a - b``, or empty for all nodes together."""
    return "" if everyone else " - ".join(nodes)


def measured(check: Check, job: JobOutcome) -> list[tuple[str, ...]]:
    """Return the nodes of each figure of a job: each node by itself if they take turns, else all nodes as one."""
    return [(node,) for node in job.nodes] if check.nodes == "turns" else [job.nodes]


def bounds(
    check: Check,
    jobs: Sequence[JobOutcome],
    within: float,
    baseline: Baseline | None,
    hosts: Mapping[str, str],
) -> dict[tuple[str, str], Bound]:
    """Return bounds by metric and subject: the profile's limit, else the baseline's value, else pairs' median.

    A pair without a constant bound is compared with the other pairs, if they are of several hosts: those of one host
    share its network. Nodes alone are not: ``evidence`` judges them.
    """
    by_subject = {}
    for limit in check.limits:
        values = [value for job in jobs if (value := job.value(limit.metric)) is not None]
        for nodes in chain.from_iterable(map(partial(measured, check), jobs)):
            name = subject(nodes, everyone=check.nodes == "all")
            if bound := _absolute(limit):
                by_subject[limit.metric, name] = bound
            elif baseline and (before := _before(baseline, check, limit.metric, nodes, hosts)) is not None:
                bound = _relative(limit, before, f"baseline of {baseline.recorded[:10]}", within)
                by_subject[limit.metric, name] = replace(bound, of_baseline=True)
            elif len(values) > 1 and check.nodes == "pairs" and len({hosts.get(node) for node in nodes}) > 1:
                bound = _relative(limit, *_usual(limit, values), within)
                by_subject[limit.metric, name] = replace(bound, of_others=True)
    return by_subject


def _before(
    baseline: Baseline, check: Check, metric: str, nodes: Sequence[str], hosts: Mapping[str, str]
) -> float | None:
    """Return a check's baseline value for the same nodes and hosts, or as many nodes; None if any has changed."""
    if baseline.checks.get(check.name) != digest(check):
        return None
    everyone = check.nodes == "all"
    if everyone and len(nodes) != len(baseline.hosts):
        return None
    if not everyone and any(baseline.hosts.get(node) != hosts[node] for node in nodes):
        return None
    key = (check.name, metric, subject(nodes, everyone=everyone))
    return next((figure.value for figure in baseline.figures if (figure.step, figure.what, figure.node) == key), None)


def _usual(limit: Limit, values: Sequence[float]) -> tuple[float, str]:
    """Return the median of values, or the better of two, with text that names it, such as ``median of 5``."""
    from statistics import median

    if len(values) > 2:
        return median(values), f"median of {len(values)}"
    return (min if limit.lower_is_better else max)(values), "better of 2"


def _absolute(limit: Limit) -> Bound | None:
    """Return the minimum or maximum that a limit of the profile sets; None if it sets neither."""
    if limit.min is not None:
        return Bound(sign=">=", value=limit.min, source=limit.source or "profile")
    if limit.max is not None:
        return Bound(sign="<=", value=limit.max, source=limit.source or "profile")
    return None


def _relative(limit: Limit, value: float, source: str, within: float) -> Bound:
    """Return the bound ``within`` worse than a value: below it, or above it if lower is better."""
    if limit.lower_is_better:
        return Bound(sign="<=", value=(1 + within) * value, source=f"{human.exact(100 * within)} % above the {source}")
    return Bound(sign=">=", value=(1 - within) * value, source=f"{human.exact(100 * within)} % below the {source}")


def judge(check: Check, jobs: Iterable[JobOutcome], limits: Mapping[tuple[str, str], Bound]) -> list[Figure]:
    """Return a figure per job and metric: False without a number or a miss, None without a bound, else True."""
    figures = []
    for job in jobs:
        name = subject(job.nodes, everyone=check.nodes == "all")
        for limit in check.limits:
            value, bound = job.value(limit.metric), limits.get((limit.metric, name))
            unit = str(job.metrics.get(limit.metric, {}).get("unit", ""))
            passed = bound.holds(value) if bound else None
            if value is None:
                passed = False
            figure = Figure(
                step=check.name,
                what=limit.metric,
                node=name,
                value=value,
                unit=unit,
                limit=bound.text(unit) if bound else "",
                passed=passed,
                source=bound.source if bound else "",
            )
            figures.append(figure)
    return figures


def latencies(check: Check, jobs: Iterable[JobOutcome]) -> list[Figure]:
    """Return unjudged latency figures of pairs that gave one; [] unless the check is of pairs without that limit."""
    if check.nodes != "pairs" or any(limit.metric == LATENCY for limit in check.limits):
        return []
    return judge(
        replace(check, limits=(Limit(metric=LATENCY),)), [job for job in jobs if job.value(LATENCY) is not None], {}
    )


def against(figure: Figure, bound: Bound | None, runs: int) -> str:
    """Render a figure that is not good: its value, the bound that it misses, and in how many of the runs."""
    value = f"{figure.step}: {figure.what} {human.number(figure.value)} {figure.unit}".rstrip()
    counted = human.count(runs, "run")
    if not bound:
        return f"{value}, in {counted}"
    limit = f"not {figure.limit} ({figure.source})"
    if not bound.holds(figure.value):
        return f"{value}, {limit}, {figure.judged or f'in {counted}'}"
    misses = [single for single in figure.values if not bound.holds(single)]
    return f"{value}, {figure.judged or f'{limit} in {len(misses)} of {counted}'}"
