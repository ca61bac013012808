"""Charts of runs as data: for a page's script, which draws them, and for ``chart``, which draws pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from statistics import mean, median
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.records.metrics import Sample
from labctl.reports.samples import Track
from labctl.runs.compare import RecordedRun
from labctl.runs.series import step_times
from labctl.system import human

# Okabe and Ito's colors without black and yellow, which hardly show on dark and on white; with dashes and marks.
STYLES: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("#0072b2", (), "o"),
    ("#d55e00", (5, 2), "s"),
    ("#009e73", (1, 1.5), "^"),
    ("#cc79a7", (6, 1.5, 1, 1.5), "D"),
    ("#e69f00", (3, 1.5), "v"),
    ("#56b4e9", (8, 2, 1, 2, 1, 2), "X"),
)
MOST = len(STYLES)
"""Lines of a chart at most."""
PARTS = 500
"""Parts of a line of a page, of each of which the lowest and the highest point are kept."""
BAND_PARTS = 240
"""Parts of a line that stands for several, of each of which the median is kept with the lowest and the highest."""
DIGITS = 6
"""Significant digits of a value on a page."""

Points = Sequence[tuple[float, float | None]]
Axis = Literal["step", "seconds", "epoch", "value"]
Label = tuple[str, str]
"""Group and name of a run: both empty for a single run."""


class Line(Struct, frozen=True, kw_only=True):
    """Points by ascending x; several of one x if the line stands for several series. y is None if unknown."""

    name: str
    points: Points
    color: int = 0
    """Place of its color in STYLES: the same for all lines of a run."""
    dash: int = 0
    """Place of its dashes and marks in STYLES: another for each line of a chart."""
    band: Sequence[tuple[float | None, float | None]] = ()
    """Lowest and highest value at each point of a line that stands for several; empty for others."""


class Chart(Struct, frozen=True, kw_only=True):
    """Lines over an axis, with a title and a caption of their values; ``name`` is unique on a page."""

    name: str
    title: str
    caption: str
    along: Axis
    unit: str
    lines: tuple[Line, ...]


def of_runs(runs: Mapping[Label, RecordedRun]) -> list[Chart]:
    """Return a chart of each metric printed during the runs, loss first, and one of the step times."""
    charts: list[Chart] = []
    names = dict.fromkeys(chain.from_iterable(run.series for run in runs.values()))
    for name in sorted(names, key=lambda name: name != "loss"):
        by_run = {label: run.series.get(name, ()) for label, run in runs.items()}
        unit = next((run.unit(name) for run in runs.values() if name in run.series), "")
        axis = _axis(chain.from_iterable(by_run.values()))
        lines = _lines(((label, _points(of_run, axis)) for label, of_run in by_run.items()), runs)
        charts += of_lines(name, lines, axis, unit)
    steps = _lines(((label, _steps(run)) for label, run in runs.items()), runs)
    return charts + of_lines("step time", steps, "step", "s")


def of_machine(runs: Mapping[Label, Sequence[Track]]) -> list[Chart]:
    """Return a chart of each sampled quantity that is not zero throughout."""
    charts: list[Chart] = []
    kinds = dict.fromkeys((track.what, track.unit) for track in chain.from_iterable(runs.values()))
    for title, unit in kinds:
        lines = _lines(_tracks(runs, title, unit), runs)
        if any(map(_is_nonzero, lines)):
            charts += of_lines(title, lines, "seconds", unit)
    return charts


def of_lines(title: str, lines: Iterable[Line], along: Axis, unit: str) -> list[Chart]:
    """Return a chart of the lines with several values, if any; more than MOST are one line with a band."""
    drawn = [line for line in lines if _count(line) > 1]
    if not drawn:
        return []
    points = list(chain.from_iterable(line.points for line in drawn))
    if len(drawn) > MOST:
        drawn = [Line(name="all", points=sorted(points, key=_x))]
    values = [value for _, value in points if value is not None]
    absent = len(points) - len(values)
    caption = f"{human.span(values)} {unit}".rstrip()
    caption += f"; no value for {absent:,} of {absent + len(values):,}" if absent else ""
    return [Chart(name=name_of(title), title=title, caption=caption, along=along, unit=unit, lines=tuple(drawn))]


def name_of(title: str) -> str:
    """Return the name of a chart with this title, as ``step-time``."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "chart"


def named_apart(charts: Iterable[Chart]) -> list[Chart]:
    """Return charts, those with the name of an earlier one with a number behind it."""
    named: dict[str, Chart] = {}
    for chart in charts:
        names = chain([chart.name], (f"{chart.name}-{number}" for number in count(2)))
        name = next(name for name in names if name not in named)
        named[name] = replace(chart, name=name)
    return list(named.values())


def as_data(charts: Iterable[Chart]) -> str:
    """Return charts as JSON that can stand in a script element, whatever their names are; long lines are thinned."""
    text = msgspec.json.encode([thinned(chart) for chart in charts]).decode()
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def thinned(chart: Chart) -> Chart:
    """Return a chart with at most about 1,000 points a line, among them the lowest and highest of each part."""
    return replace(chart, lines=tuple(map(_thinned, chart.lines)))


# --- lines ---------------------------------------------------------------------------------------------------


def _lines(named: Iterable[tuple[tuple[str, ...], Points]], runs: Iterable[Label]) -> list[Line]:
    """Return lines by group, run, node and device, sorted by x; if more than MOST, merged by fewer of these."""
    named = list(named)
    lines: dict[tuple[str, ...], list[tuple[float, float | None]]] = {}
    for depth in reversed(range(1, 1 + max((len(name) for name, _ in named), default=0))):
        lines = {}
        for name, points in named:
            lines.setdefault(name[:depth], []).extend(points)
        if len(lines) <= MOST:
            break
    return [
        # The name of a run begins with that of its group.
        Line(name=" ".join(filter(None, name[1:] or name)), points=sorted(points, key=_x), color=color, dash=dash)
        for (name, points), (color, dash) in zip(lines.items(), _styles(list(lines), list(runs)), strict=True)
    ]


def _styles(names: Sequence[tuple[str, ...]], runs: Sequence[Label]) -> list[tuple[int, int]]:
    """Return color and dashes of each line: both are the run's if it has one line, the color if it has several."""
    if len(runs) == 1:
        return [(place % MOST, place % MOST) for place in range(len(names))]
    depth = min(2, min(map(len, names), default=2))
    owners = list(dict.fromkeys(run[:depth] for run in runs))
    colors = [owners.index(name[:depth]) % MOST for name in names]
    apart = len(set(colors)) == len(colors)
    return [(color, color if apart else place % MOST) for place, color in enumerate(colors)]


def _tracks(runs: Mapping[Label, Sequence[Track]], title: str, unit: str) -> Iterator[tuple[tuple[str, ...], Points]]:
    """Yield the tracks of one quantity, each with its group, run, node and device."""
    for label, tracks in runs.items():
        for track in tracks:
            if (track.what, track.unit) == (title, unit):
                yield (*label, track.node, track.device), track.points


def _axis(samples: Iterable[Sample]) -> Axis:
    """Return a metric's x axis: steps, else time, if all samples have it; else their number."""
    of_all = list(samples)
    if all(sample.step is not None for sample in of_all):
        return "step"
    return "seconds" if all(sample.seconds is not None for sample in of_all) else "value"


def _points(samples: Sequence[Sample], axis: Axis) -> Points:
    """Return the values of a metric along an axis."""
    if axis == "step":
        return [(float(sample.step or 0), sample.value) for sample in samples]
    if axis == "seconds":
        return [(float(sample.seconds or 0), sample.value) for sample in samples]
    return [(float(number), sample.value) for number, sample in enumerate(samples, 1)]


def _steps(run: RecordedRun) -> Points:
    """Return (step, seconds) for each step of a run."""
    return [(float(step), seconds) for step, seconds in step_times(run.series)]


def _count(line: Line) -> int:
    """Return the number of values of a line."""
    return sum(value is not None for _, value in line.points)


def _is_nonzero(line: Line) -> bool:
    """Return True if a line has a value other than zero."""
    return any(value for _, value in line.points)


def _x(point: tuple[float, float | None]) -> float:
    return point[0]


# --- thinning ------------------------------------------------------------------------------------------------


def _thinned(line: Line) -> Line:
    """Return a line whose points are few, with rounded values; with a band if it has several points of one x."""
    places = {x for x, _ in line.points}
    if len(places) < len(line.points):
        return _banded(line)
    points = line.points
    if len(points) > 2 * PARTS:
        points = list(chain.from_iterable(map(_extremes, _parts(points, PARTS))))
    return replace(line, points=[(round(x, 3), _rounded(y)) for x, y in points])


def _banded(line: Line) -> Line:
    """Return a line of the medians of its parts, with their lowest and highest values as band."""
    points: list[tuple[float, float | None]] = []
    band: list[tuple[float | None, float | None]] = []
    for part in _parts(line.points, BAND_PARTS):
        values = [y for _, y in part if y is not None]
        points.append((round(mean(x for x, _ in part), 3), _rounded(median(values)) if values else None))
        band.append((_rounded(min(values)), _rounded(max(values))) if values else (None, None))
    return replace(line, points=points, band=band)


def _parts(points: Points, most: int) -> list[list[tuple[float, float | None]]]:
    """Return points in at most so many parts of the same width, without those that are empty."""
    first, width = points[0][0], (points[-1][0] - points[0][0]) / most or 1
    parts: dict[int, list[tuple[float, float | None]]] = {}
    for x, y in points:
        parts.setdefault(min(int((x - first) / width), most - 1), []).append((x, y))
    return list(parts.values())


def _extremes(part: Sequence[tuple[float, float | None]]) -> Points:
    """Return the points with the lowest and the highest value, in order; one without a value if none has one."""
    known: list[Any] = [point for point in part if point[1] is not None]
    if not known:
        return part[:1]
    return sorted({min(known, key=_y), max(known, key=_y)})


def _y(point: tuple[float, float]) -> float:
    return point[1]


def _rounded(value: float | None) -> float | None:
    """Return a value with DIGITS significant digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
