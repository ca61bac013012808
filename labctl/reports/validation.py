"""Page of a cluster validation: verdict, actions, nodes and links, and figures with their thresholds."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, permutations
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.reports import chart
from labctl.reports.page import finite, render
from labctl.system import files, human
from labctl.system.load import Measured

Health = Literal["failing", "not reached", "slow", "unsure", "good"]
HEALTH: tuple[Health, ...] = ("failing", "not reached", "slow", "unsure", "good")
"""Worst first."""
TIMES = ("us", "µs", "ms", "s")
"""Units of figures of which less is better."""
WIDEST = 32
"""Nodes of which a page has a table, each with each."""


class Figure(Struct, frozen=True, kw_only=True):
    """A measured number and its threshold."""

    step: str
    what: str
    """Metric, as ``all_reduce bus bandwidth``."""
    node: str = ""
    """A node; ``worker-0 - worker-1`` for a link; empty for all together."""
    value: float | None
    """None if the step gave no number."""
    unit: str
    limit: str = ""
    """``>=`` or ``<=``, a number and the unit: ``>= 127 GB/s``. Empty without a threshold."""
    passed: bool | None
    """None without a threshold, or if noise hides which it is."""
    source: str = ""
    """Source of the threshold, as ``baseline of 2026-11-20``."""
    values: tuple[float, ...] = ()
    """Each measurement, in order; empty if there is only ``value``, which is their median."""
    judged: str = ""
    """Comparison with the other nodes: ``98 % of the others (p < 0.001, 9 rounds)``."""


class StepResult(Struct, frozen=True, kw_only=True):
    """A step of a validation and its result."""

    name: str
    status: Literal["passed", "failed", "unsure", "skipped"]
    message: str = ""
    seconds: float
    advice: str = ""
    """Advice to the user; empty if there is nothing to do."""
    run_id: str = ""
    logs: tuple[str, ...] = ()
    """Directories with the logs of its runs, relative to the page."""


class NodeVerdict(Struct, frozen=True, kw_only=True):
    """Verdict on a node, with evidence and advice."""

    node: str
    host: str
    verdict: Health
    evidence: tuple[str, ...] = ()
    advice: str = ""
    runs: tuple[str, ...] = ()
    """Ids of runs that show it."""
    logs: tuple[str, ...] = ()
    """Directories with the logs of further runs, relative to the page."""


class LinkVerdict(Struct, frozen=True, kw_only=True):
    """Verdict on the network between two nodes."""

    a: str
    b: str
    verdict: Literal["failing", "slow", "good"]
    evidence: tuple[str, ...] = ()
    advice: str = ""
    runs: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    """As in ``NodeVerdict``."""


class Hardware(Struct, frozen=True, kw_only=True):
    """Hardware of a host, as far as it is known."""

    host: str
    processor: str = ""
    cores: int = 0
    memory: int = 0
    """Bytes."""
    accelerator: str = ""
    devices: str = ""
    """Number and name of its devices."""
    driver: str = ""


class Validation(Struct, frozen=True, kw_only=True):
    """Result of a validation; ``message`` is one line: the bad nodes, else those that are unsure, and the reason."""

    schema: int = 1
    lab: str
    profile: str
    started: str
    """ISO 8601, in UTC."""
    seconds: float
    verdict: Literal["PASS", "FAIL", "UNSURE", "ERROR"]
    message: str
    drained: tuple[str, ...] = ()
    """Machines that were left out, with the reason."""
    nodes: tuple[NodeVerdict, ...] = ()
    links: tuple[LinkVerdict, ...] = ()
    hardware: tuple[Hardware, ...] = ()
    steps: tuple[StepResult, ...] = ()
    figures: tuple[Figure, ...] = ()
    checks: Mapping[str, str] = {}
    """Digest of each check, by name."""
    versions: Mapping[str, str] = {}
    """Versions of labctl, Docker, the image, each host's kernel ..."""
    runs: str = ""
    """Directory of the lab's runs, relative to the page; empty if unknown."""
    busy: tuple[str, ...] = ()
    """Hosts that were busy while the lab ran nothing, and how much of them others used."""
    loads: tuple[Measured, ...] = ()
    """Load of each host before and after each measurement of single nodes, in order."""


class _Machines(Struct, frozen=True):
    """Nodes of equal hardware, with their hosts."""

    nodes: str
    hosts: str
    hardware: Hardware


class _Grid(Struct, frozen=True, kw_only=True):
    """Figures of one metric between nodes: rows and columns are nodes, None where the two were not measured."""

    step: str
    what: str
    unit: str
    rows: tuple[tuple[str, tuple[Figure | None, ...]], ...]


class _Measure(Struct, frozen=True, kw_only=True):
    """Figures of one metric of a step, worst first, as the page shows them."""

    step: str
    what: str
    status: str
    result: str
    limit: str
    source: str
    figures: tuple[Figure, ...]
    svg: str
    """Chart; empty if no figure is of a node or link."""


def write(path: Path, validation: Validation) -> None:
    """Write the HTML page of a validation to a file. HostError if that fails."""
    files.write(path, html(validation), mode=0o644)


def html(validation: Validation) -> str:
    """Render a validation's page, self-contained and without scripts: below 200 KiB at 64 nodes, 1 MiB at 1,000."""
    return render(
        "validation.html.j2",
        validation=validation,
        actions=_actions(validation),
        nodes=_worst_first(validation.nodes),
        links=_worst_first(validation.links),
        node_counts=_counts(validation.nodes),
        link_counts=_counts(validation.links),
        machines=_machines(validation),
        measures=_measures(validation.figures),
        grids=_grids(validation),
        status_of=status,
    )


def _worst_first(verdicts: Iterable[NodeVerdict | LinkVerdict]) -> list[NodeVerdict | LinkVerdict]:
    """Return the verdicts sorted by health, worst first."""
    return sorted(verdicts, key=lambda verdict: HEALTH.index(verdict.verdict))


def _counts(verdicts: Iterable[NodeVerdict | LinkVerdict]) -> list[tuple[str, int]]:
    """Return (health, number of verdicts) for each health that occurs, worst first."""
    counter = Counter(verdict.verdict for verdict in verdicts)
    return [(health, counter[health]) for health in HEALTH if counter[health]]


def _actions(validation: Validation) -> list[tuple[str, list[str]]]:
    """Return each distinct advice with the names of its nodes, links and steps, the worst nodes first."""
    concerned: dict[str, list[str]] = {}
    for item in (*_worst_first(validation.nodes), *_worst_first(validation.links), *validation.steps):
        if item.advice:
            concerned.setdefault(item.advice, []).append(_name(item))
    return list(concerned.items())


def _machines(validation: Validation) -> list[_Machines]:
    """Group hosts by equal hardware; return each hardware with the names of its nodes and hosts."""
    nodes_of: defaultdict[str, list[str]] = defaultdict(list)
    for node in validation.nodes:
        if node.node != node.host:
            nodes_of[node.host].append(node.node)
    alike: defaultdict[Hardware, list[str]] = defaultdict(list)
    for hardware in validation.hardware:
        alike[replace(hardware, host="")].append(hardware.host)
    return [
        _Machines(_ranges(chain.from_iterable(nodes_of[host] for host in hosts)), _ranges(hosts), hardware)
        for hardware, hosts in alike.items()
    ]


def _ranges(names: Iterable[str]) -> str:
    """Join names with commas, runs of consecutive numbers as ``worker-0 to worker-3``."""
    spans: list[list[str]] = []
    for name in names:
        if spans and name == _following(spans[-1][-1]):
            spans[-1][1:] = [name]
        else:
            spans.append([name])
    return human.listed(" to ".join(span) for span in spans)


def _following(name: str) -> str:
    """Return the name with the next number; empty if it has none."""
    match = re.fullmatch(r"(.*?)([0-9]+)", name)
    return f"{match[1]}{str(int(match[2]) + 1).zfill(len(match[2]))}" if match else ""


def _grids(validation: Validation) -> list[_Grid]:
    """Return a node-by-node table per link metric; none for one host, or for more than WIDEST nodes."""
    nodes = [node.node for node in validation.nodes if node.node != node.host]
    if len({node.host for node in validation.nodes}) < 2 or len(nodes) > WIDEST:
        return []
    pairs = {f"{a} - {b}": {a, b} for a, b in permutations(nodes, 2)}
    kinds: defaultdict[tuple[str, str, str], dict[frozenset[str], Figure]] = defaultdict(dict)
    for figure in validation.figures:
        if figure.node in pairs:
            kinds[figure.step, figure.what, figure.unit][frozenset(pairs[figure.node])] = figure
    return [_grid(*kind, nodes, of_kind) for kind, of_kind in kinds.items()]


def _grid(step: str, what: str, unit: str, nodes: Sequence[str], figures: Mapping[frozenset[str], Figure]) -> _Grid:
    """Return the node-by-node table of one metric of links."""

    def row(node: str) -> tuple[Figure | None, ...]:
        return tuple(figures.get(frozenset((node, other))) for other in nodes)

    return _Grid(step=step, what=what, unit=unit, rows=tuple((node, row(node)) for node in nodes))


def _name(item: NodeVerdict | LinkVerdict | StepResult) -> str:
    """Render the name of a node with its host, of a link, or of a step."""
    if isinstance(item, NodeVerdict):
        return item.node if item.host in ("", item.node) else f"{item.node} on {item.host}"
    return f"{item.a} - {item.b}" if isinstance(item, LinkVerdict) else f"step {item.name}"


def _measures(figures: Iterable[Figure]) -> list[_Measure]:
    """Group figures by step, metric and unit, each sorted worst first, and summarise each group."""
    kinds: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        kinds.setdefault((figure.step, figure.what, figure.unit), []).append(figure)
    return [_measure(step, metric, unit, sorted(kind, key=_badness)) for (step, metric, unit), kind in kinds.items()]


def worst(figures: Iterable[Figure], most: int) -> list[Figure]:
    """Return the worst figure of each metric, at most so many: missed ones, then those nearest to their threshold."""
    kinds: dict[tuple[str, str, str], Figure] = {}
    for figure in sorted(figures, key=_badness):
        kinds.setdefault((figure.step, figure.what, figure.unit), figure)
    return sorted(kinds.values(), key=lambda figure: (_badness(figure)[:2], _margin(figure)))[:most]


def _margin(figure: Figure) -> float:
    """Return how many times a figure is better than its threshold; infinity without a threshold or a number."""
    value, limit = finite(figure.value), _limit(figure)
    if not value or not limit:
        return math.inf
    return limit / value if figure.limit.startswith("<=") else value / limit


def _measure(step: str, metric: str, unit: str, figures: Sequence[Figure]) -> _Measure:
    """Summarise the figures of one metric, given worst first: status of the worst, limit, sources and chart."""
    limits = {figure.limit for figure in figures}
    sources = dict.fromkeys(figure.source for figure in figures)
    result = _result(figures, unit)
    return _Measure(
        step=step,
        what=metric,
        status=status(figures[0]),
        result=result,
        limit=next(iter(limits)) if len(limits) == 1 else "differs",
        source=", ".join(filter(None, sources)),
        figures=tuple(figures),
        svg=_chart(figures, unit, f"{metric} ({step}): {result}"),
    )


def status(figure: Figure) -> str:
    """Return ``passed``, ``missed``, or if that is None ``unsure`` if judged or limited, else ``no threshold``."""
    if figure.passed is None:
        return "unsure" if figure.judged or figure.limit else "no threshold"
    return "passed" if figure.passed else "missed"


def _badness(figure: Figure) -> tuple[int, bool, float]:
    """Sort key of figures: missed, undecided, passed; in each those without a number first, then worst to best."""
    value = finite(figure.value)
    sign = -1 if figure.limit.startswith("<=") or figure.unit in TIMES else 1
    return (False, None, True).index(figure.passed), value is not None, sign * (value or 0)


def _result(figures: Sequence[Figure], unit: str) -> str:
    """Summarise figures, as ``2 of 20 missed; 98.1 to 141 GB/s, median 140``."""
    from statistics import median

    values = [value for figure in figures if (value := finite(figure.value)) is not None]
    missed = sum(figure.passed is False for figure in figures)
    absent = len(figures) - len(values)
    several = len(figures) > 1
    parts = [f"{missed:,} of {len(figures):,} missed"] if missed and several else []
    if absent:
        parts.append(f"no value for {absent:,}" if several else "no value")
    if values:
        middle = f", median {human.number(median(values))}" if len(values) > 1 else ""
        parts.append(f"{human.span(values)} {unit}".rstrip() + middle)
    return "; ".join(parts)


def _chart(figures: Sequence[Figure], unit: str, alt: str) -> str:
    """Draw figures as an SVG; empty if none is of a node or link, or for a single figure without a limit."""
    bars = [
        chart.Bar(name=figure.node or "all", value=finite(figure.value), limit=_limit(figure), passed=figure.passed)
        for figure in figures
    ]
    drawn = any(figure.node and bar.value is not None for figure, bar in zip(figures, bars, strict=True))
    compared = len(figures) > 1 or any(bar.limit is not None for bar in bars)
    return chart.bars(bars, unit, alt).svg() if drawn and compared else ""


def _limit(figure: Figure) -> float | None:
    """Parse the number of a limit, as ``>= 127 GB/s``; None without one."""
    match = re.match(r"[<>]=\s*(-?[\d.]+(?:e[+-]?\d+)?)", figure.limit)
    return float(match[1]) if match else None
