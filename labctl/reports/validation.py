"""The page of a cluster validation: the verdict, what to do, each node and link, and figures against thresholds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from labctl.reports import chart
from labctl.reports.page import finite, number, render
from labctl.system import files

Health = Literal["failing", "not reached", "slow", "unsure", "good"]
HEALTH: tuple[Health, ...] = ("failing", "not reached", "slow", "unsure", "good")
"""Worst first."""


class Figure(Struct, frozen=True, kw_only=True):
    """A measured number and its threshold."""

    step: str
    what: str
    """As ``all_reduce bus bandwidth``."""
    node: str = ""
    """A node; ``worker-0 - worker-1`` for a link; empty for all together."""
    value: float | None
    """None where the step gave no number."""
    unit: str
    limit: str = ""
    """``>=`` or ``<=``, a number and the unit: ``>= 127 GB/s``. Empty without a threshold."""
    passed: bool | None
    """None without a threshold."""
    source: str = ""
    """Where the threshold comes from, as ``baseline of 2026-11-20``."""


class StepResult(Struct, frozen=True, kw_only=True):
    name: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    seconds: float
    advice: str = ""
    """What to do."""
    run_id: str = ""


class NodeVerdict(Struct, frozen=True, kw_only=True):
    node: str
    host: str
    verdict: Health
    evidence: tuple[str, ...] = ()
    advice: str = ""


class LinkVerdict(Struct, frozen=True, kw_only=True):
    """The network between two nodes."""

    a: str
    b: str
    verdict: Literal["failing", "slow", "good"]
    evidence: tuple[str, ...] = ()
    advice: str = ""


class Validation(Struct, frozen=True, kw_only=True):
    """A validation of a cluster; ``message`` is one line: which node is bad, and what to do."""

    schema: int = 1
    lab: str
    profile: str
    started: str
    """ISO 8601, in UTC."""
    seconds: float
    verdict: Literal["PASS", "FAIL", "ERROR"]
    message: str
    drained: tuple[str, ...] = ()
    """Machines that were left out, and why."""
    nodes: tuple[NodeVerdict, ...] = ()
    links: tuple[LinkVerdict, ...] = ()
    steps: tuple[StepResult, ...] = ()
    figures: tuple[Figure, ...] = ()
    checks: Mapping[str, str] = {}
    """Digests of what was run, by the check's name."""
    versions: Mapping[str, str] = {}
    """Of labctl, Docker, the image, each host's kernel ..."""


class _Measure(Struct, frozen=True, kw_only=True):
    """The figures of one kind, worst first, as the page shows them."""

    step: str
    what: str
    status: str
    result: str
    limit: str
    source: str
    figures: tuple[Figure, ...]
    svg: str
    """Its chart; empty where no figure is of a node or link."""


def write(path: Path, validation: Validation) -> None:
    """Write the page. HostError where that fails."""
    files.write(path, html(validation), mode=0o644)


def html(validation: Validation) -> str:
    """The page: all in one text, without a script or an address, below 200 KiB at 64 nodes and 1 MiB at 1,000."""
    return render(
        "validation.html.j2",
        validation=validation,
        actions=_actions(validation),
        nodes=_worst_first(validation.nodes),
        links=_worst_first(validation.links),
        node_counts=_counts(validation.nodes),
        link_counts=_counts(validation.links),
        measures=_measures(validation.figures),
        status_of=_status,
    )


def _worst_first(verdicts: Iterable[NodeVerdict | LinkVerdict]) -> list[NodeVerdict | LinkVerdict]:
    return sorted(verdicts, key=lambda one: HEALTH.index(one.verdict))


def _counts(verdicts: Iterable[NodeVerdict | LinkVerdict]) -> list[tuple[str, int]]:
    found = Counter(one.verdict for one in verdicts)
    return [(health, found[health]) for health in HEALTH if found[health]]


def _actions(validation: Validation) -> list[tuple[str, list[str]]]:
    """What to do, and for which nodes, links and steps; the same advice is given once."""
    concerned: dict[str, list[str]] = {}
    for one in (*_worst_first(validation.nodes), *_worst_first(validation.links), *validation.steps):
        if one.advice:
            concerned.setdefault(one.advice, []).append(_name(one))
    return list(concerned.items())


def _name(one: NodeVerdict | LinkVerdict | StepResult) -> str:
    if isinstance(one, NodeVerdict):
        return one.node if one.host in ("", one.node) else f"{one.node} on {one.host}"
    return f"{one.a} - {one.b}" if isinstance(one, LinkVerdict) else f"step {one.name}"


def _measures(figures: Iterable[Figure]) -> list[_Measure]:
    kinds: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        kinds.setdefault((figure.step, figure.what, figure.unit), []).append(figure)
    return [_measure(step, what, unit, sorted(kind, key=_badness)) for (step, what, unit), kind in kinds.items()]


def _measure(step: str, what: str, unit: str, figures: Sequence[Figure]) -> _Measure:
    limits, sources = ({getattr(one, key): None for one in figures} for key in ("limit", "source"))
    result = _result(figures, unit)
    return _Measure(
        step=step,
        what=what,
        status=_status(figures[0].passed),
        result=result,
        limit=next(iter(limits)) if len(limits) == 1 else "differs",
        source=", ".join(filter(None, sources)),
        figures=tuple(figures),
        svg=_chart(figures, unit, f"{what} ({step}): {result}"),
    )


def _status(passed: bool | None) -> str:
    return "no threshold" if passed is None else "passed" if passed else "missed"


def _badness(figure: Figure) -> tuple[int, bool, float]:
    """The order of figures: those that missed, no figure before a bad one, then from the worst value to the best."""
    value = finite(figure.value)
    sign = -1 if figure.limit.startswith("<=") else 1
    return (False, None, True).index(figure.passed), value is not None, sign * (value or 0)


def _result(figures: Sequence[Figure], unit: str) -> str:
    """The figures in words, as ``2 of 20 missed; 98.1 to 141 GB/s, median 140``."""
    from statistics import median

    values = [value for one in figures if (value := finite(one.value)) is not None]
    missed, absent = sum(one.passed is False for one in figures), len(figures) - len(values)
    several = len(figures) > 1
    parts = [f"{missed:,} of {len(figures):,} missed"] if missed and several else []
    parts += ([f"no figure for {absent:,}"] if several else ["no figure"]) if absent else []
    if len(values) > 1:
        parts.append(f"{number(min(values))} to {number(max(values))} {unit}, median {number(median(values))}")
    elif values:
        parts.append(f"{number(values[0])} {unit}")
    return "; ".join(parts)


def _chart(figures: Sequence[Figure], unit: str, alt: str) -> str:
    """Its chart, where there is a number of a node or link."""
    bars = [
        chart.Bar(name=one.node or "all", value=finite(one.value), limit=_limit(one), passed=one.passed)
        for one in figures
    ]
    drawn = any(one.node and bar.value is not None for one, bar in zip(figures, bars, strict=True))
    return chart.bars(bars, unit, alt).svg() if drawn else ""


def _limit(figure: Figure) -> float | None:
    found = re.match(r"[<>]=\s*(-?[\d.]+(?:e[+-]?\d+)?)", figure.limit)
    return float(found[1]) if found else None
