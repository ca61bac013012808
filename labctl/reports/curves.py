"""Charts of runs as data: for a page's script, which draws them, and for ``chart``, which draws pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import mean, median
from typing import Any, Literal
from urllib.parse import quote_plus

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.records.metrics import Sample
from labctl.reports.samples import Track
from labctl.runs.compare import RecordedRun
from labctl.runs.series import Tally, of_main_rank, repetition, step_times
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
KINDS = ("group", "run", "node", "device")
"""Kinds of the parts of a series' name."""
AXES = ("step", "seconds", "value")
"""X axes of metrics, the best first."""

Points = Sequence[tuple[float, float | None]]
Times = Sequence[float | None]
Axis = Literal["step", "seconds", "epoch", "value"]
Label = tuple[str, str]
"""Group and name of a run: both empty for a single run."""


class Series(Struct, frozen=True, kw_only=True):
    """Values of a run, or of a node or device, by its name in parts; ``times`` of points over steps, if known."""

    name: tuple[str, ...]
    points: Points
    times: Times = ()
    last: str = ""
    """The value that came last, as text: nan and infinity, too; empty if it is that of the last point."""


class Line(Struct, frozen=True, kw_only=True):
    """Points by ascending x; several of one x if several were printed at a step. y is None if unknown."""

    name: str
    points: Points
    color: int = 0
    """Place of its color in STYLES: the same for all lines of a run."""
    dash: int = 0
    """Place of its dashes and marks in STYLES: another for each line of a chart."""
    band: Sequence[tuple[float | None, float | None]] = ()
    """Lowest and highest value at each point of a line that stands for several; empty for others."""
    times: Times = ()
    """Seconds since the run's output began at each point over steps; empty if unknown."""
    last: str = ""
    """The value that came last, as its series has it; empty if the line stands for several."""


class Chart(Struct, frozen=True, kw_only=True):
    """Lines over an axis, with a title and a caption of their values; ``name`` is unique on a page.

    ``remark`` is the part of the caption that stays while the chart grows.
    """

    name: str
    title: str
    caption: str
    along: Axis
    unit: str
    lines: tuple[Line, ...]
    remark: str = ""


def of_runs(runs: Mapping[Label, RecordedRun]) -> list[Chart]:
    """Return a chart of each metric printed during the runs, loss first, and one of the step times."""
    names = dict.fromkeys(chain.from_iterable(run.series for run in runs.values()))
    charts = [_of_metric(name, runs) for name in sorted(names, key=lambda name: name != "loss")]
    steps = [Series(name=label, **_steps(run)) for label, run in runs.items()]
    return [*chain.from_iterable(charts), *of_series("step time", steps, list(runs), "step", "s")]


def of_machine(runs: Mapping[Label, Sequence[Track]]) -> list[Chart]:
    """Return a chart of each sampled quantity that is not zero throughout."""
    charts: list[Chart] = []
    kinds = dict.fromkeys((track.what, track.unit) for track in chain.from_iterable(runs.values()))
    for title, unit in kinds:
        series = list(_tracks(runs, title, unit))
        if any(map(_is_nonzero, series)):
            charts += of_series(title, series, list(runs), "seconds", unit)
    return [replace(chart, name=machine_name(chart.title)) for chart in charts]


def of_series(
    title: str,
    series: Iterable[Series],
    runs: Sequence[Label],
    along: Axis,
    unit: str,
    remark: str = "",
    kinds: Sequence[str] = KINDS,
) -> list[Chart]:
    """Return a chart of the series with several values, if any; if more than MOST, of their means with a band.

    ``kinds`` are those of the parts of a series' name.
    """
    drawn = [each for each in series if _count(each.points) > 1]
    if not drawn:
        return []
    values = list(chain.from_iterable((value for _, value in each.points) for each in drawn))
    known = [value for value in values if value is not None]
    lines, merged = _lines(drawn, runs, kinds)
    repeated = _repeated(drawn) if along == "step" and not merged else ""
    remark = "; ".join(filter(None, (merged, remark, repeated)))
    absent = len(values) - len(known)
    caption = f"{human.span(known)} {unit}".rstrip()
    caption += f"; no value for {absent:,} of {len(values):,}" if absent else ""
    caption += f"; {remark}" if remark else ""
    made = Chart(name=name_of(title), title=title, caption=caption, along=along, unit=unit, lines=lines, remark=remark)
    return [made]


def name_of(title: str) -> str:
    """Return the name of the chart with this title, also that of its picture: no two titles have the same."""
    return quote_plus(title)


def machine_name(title: str) -> str:
    """Return the name of the chart of a quantity that nodes sample, which is no metric's."""
    return name_of(f"machine {title}")


def value_text(sample: Sample) -> str:
    """Return the value of a sample, nan and infinity by their names."""
    return sample.note or human.number(sample.value)


def as_data(charts: Iterable[Chart]) -> str:
    """Return charts as JSON that can stand in a script element, whatever their names are; long lines are thinned."""
    text = msgspec.json.encode([thinned(chart) for chart in charts]).decode()
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def thinned(chart: Chart) -> Chart:
    """Return a chart with at most about 1,000 points a line, among them the lowest and highest of each part."""
    return replace(chart, lines=tuple(map(_thinned, chart.lines)))


# --- lines ---------------------------------------------------------------------------------------------------


def _of_metric(name: str, runs: Mapping[Label, RecordedRun]) -> list[Chart]:
    """Return the chart of a metric: over steps of the runs that have them, of all over time if none has."""
    by_run = {label: of_main_rank(run.series[name]) for label, run in runs.items() if name in run.series}
    axes = {label: _axis(samples) for label, (samples, _) in by_run.items()}
    axis = min(axes.values(), key=AXES.index)
    drawn = [_printed(label, samples, axis) for label, (samples, _) in by_run.items() if axes[label] == axis]
    unit = next(runs[label].unit(name) for label in by_run)
    remark = "; ".join(_remarks([rank for _, rank in by_run.values()], axes, axis))
    return of_series(name, drawn, list(runs), axis, unit, remark)


def _remarks(ranks: Sequence[str], axes: Mapping[Label, Axis], axis: Axis) -> Iterator[str]:
    """Yield the rank that is drawn, if others printed the metric too, and the runs without steps."""
    named = dict.fromkeys(filter(None, ranks))
    if named:
        yield next(iter(named)) if len(named) == 1 else "one rank of each run"
    if without := [label[-1] for label, own in axes.items() if own != axis]:
        yield f"without {human.listed(without)}: no {'steps' if axis == 'step' else 'times'}"


def _lines(series: Sequence[Series], runs: Sequence[Label], kinds: Sequence[str]) -> tuple[tuple[Line, ...], str]:
    """Return lines by the parts of their names; if more than MOST, merged by fewer of these, and of what each is."""
    depth = len(series[0].name)
    by_name = _by_name(series, depth)
    while len(by_name) > MOST:
        depth -= 1
        by_name = _by_name(series, depth)
    styles = _styles(list(by_name), runs)
    lines = tuple(
        _line(name, several, color, dash)
        for (name, several), (color, dash) in zip(by_name.items(), styles, strict=True)
    )
    return lines, _merged_of(by_name, max(depth + 1, 2), kinds)


def _repeated(series: Sequence[Series]) -> str:
    """Return of what the lines of series are the medians; empty if no step of a series comes again."""
    tallies = [Tally() for _ in series]
    for tally, each in zip(tallies, series, strict=True):
        for step, value in each.points:
            tally.add(step, value)
    return repetition(tallies)


def _by_name(series: Iterable[Series], depth: int) -> dict[tuple[str, ...], list[Series]]:
    """Return series by the first parts of their names."""
    by_name: dict[tuple[str, ...], list[Series]] = {}
    for each in series:
        by_name.setdefault(each.name[:depth], []).append(each)
    return by_name


def _line(name: tuple[str, ...], several: Sequence[Series], color: int, dash: int) -> Line:
    """Return the line of a series, sorted by x, or the mean of several."""
    # The name of a run begins with that of its group.
    text = " ".join(filter(None, name[1:] or name))
    if len(several) > 1:
        points, band = _means(several)
        return Line(name=text or "all", points=points, band=band, color=color, dash=dash)
    (only,) = several
    order = sorted(range(len(only.points)), key=lambda place: only.points[place][0])
    times = [only.times[place] for place in order] if only.times else ()
    points = [only.points[place] for place in order]
    return Line(name=text, points=points, times=times, color=color, dash=dash, last=only.last)


def _merged_of(by_name: Mapping[tuple[str, ...], Sequence[Series]], parts: int, kinds: Sequence[str]) -> str:
    """Return ``mean of 2 nodes`` for lines that stand for several series, told apart by so many parts; else empty."""
    if all(len(several) == 1 for several in by_name.values()):
        return ""
    counts = [len({each.name[:parts] for each in several}) for several in by_name.values()]
    fewest = "" if min(counts) == max(counts) else f"{min(counts):,} to "
    return f"mean of {fewest}{human.count(max(counts), kinds[parts - 1])}"


def _means(several: Sequence[Series]) -> tuple[Points, list[tuple[float | None, float | None]]]:
    """Return the mean of several series in each part of the axis, and their lowest and highest values there."""
    parts: dict[float, dict[int, list[float]]] = {}
    place_of = _places([each.points for each in several])
    for number, each in enumerate(several):
        for x, y in each.points:
            part = parts.setdefault(place_of(x), {})
            if y is not None:
                part.setdefault(number, []).append(y)
    points: list[tuple[float, float | None]] = []
    band: list[tuple[float | None, float | None]] = []
    for x, part in sorted(parts.items()):
        values = list(chain.from_iterable(part.values()))
        # Each counts once, however often it was sampled.
        points.append((x, mean(map(mean, part.values())) if values else None))
        band.append((min(values), max(values)) if values else (None, None))
    return points, band


def _places(several: Sequence[Points]) -> Callable[[float], float]:
    """Return a function from x to the place of its part: x itself if few are shared, else the part's middle.

    In each part every series has a value, as far as they are sampled equally often.
    """
    xs = {x for points in several for x, _ in points}
    longest = max(map(len, several))
    if len(xs) <= min(longest, BAND_PARTS):
        return lambda x: x
    first, count = min(xs), max(1, min(BAND_PARTS, longest // 2))
    width = (max(xs) - first) / count
    return lambda x: first + (min(int((x - first) / width), count - 1) + 0.5) * width


def _styles(names: Sequence[tuple[str, ...]], runs: Sequence[Label]) -> list[tuple[int, int]]:
    """Return color and dashes of each line: both are the run's if it has one line, the color if it has several."""
    if len(runs) == 1:
        return [(place % MOST, place % MOST) for place in range(len(names))]
    depth = min(2, min(map(len, names), default=2))
    owners = list(dict.fromkeys(run[:depth] for run in runs))
    colors = [owners.index(name[:depth]) % MOST for name in names]
    apart = len(set(colors)) == len(colors)
    return [(color, color if apart else place % MOST) for place, color in enumerate(colors)]


def _tracks(runs: Mapping[Label, Sequence[Track]], title: str, unit: str) -> Iterator[Series]:
    """Yield the tracks of one quantity, each with its group, run, node and device."""
    for label, tracks in runs.items():
        for track in tracks:
            if (track.what, track.unit) == (title, unit):
                yield Series(name=(*label, track.node, track.device), points=track.points)


def _axis(samples: Sequence[Sample]) -> Axis:
    """Return a metric's x axis: steps, else time, if all samples have it; else their number."""
    if all(sample.step is not None for sample in samples):
        return "step"
    return "seconds" if all(sample.seconds is not None for sample in samples) else "value"


def _printed(label: Label, samples: Sequence[Sample], axis: Axis) -> Series:
    """Return the values of a metric of a run along an axis, with their times along steps."""
    last = value_text(samples[-1])
    if axis == "step":
        times = [sample.seconds for sample in samples]
        points = [(float(sample.step or 0), sample.value) for sample in samples]
        return Series(name=label, points=points, times=() if None in times else times, last=last)
    if axis == "seconds":
        points = [(float(sample.seconds or 0), sample.value) for sample in samples]
        return Series(name=label, points=points, last=last)
    points = [(float(number), sample.value) for number, sample in enumerate(samples, 1)]
    return Series(name=label, points=points, last=last)


def _steps(run: RecordedRun) -> dict[str, Any]:
    """Return (step, seconds) for each step of a run, and its times."""
    steps = step_times({name: of_main_rank(samples)[0] for name, samples in run.series.items()})
    points = [(float(step), seconds) for step, seconds, _ in steps]
    last = human.number(points[-1][1]) if points else ""
    return {"points": points, "times": [end for *_, end in steps], "last": last}


def _count(points: Points) -> int:
    """Return the number of values."""
    return sum(value is not None for _, value in points)


def _is_nonzero(series: Series) -> bool:
    """Return True if a series has a value other than zero."""
    return any(value for _, value in series.points)


# --- thinning ------------------------------------------------------------------------------------------------


def _thinned(line: Line) -> Line:
    """Return a line whose points are few, with rounded values; with a band if it has many, and several of one x."""
    if line.band:
        return _rounded_band(line)
    points, times = line.points, dict(zip((x for x, _ in line.points), line.times, strict=False))
    if len({x for x, _ in points}) < len(points):
        return _of_epochs(line)
    if len(points) > 2 * PARTS:
        points = list(chain.from_iterable(map(_extremes, _parts(points, PARTS))))
    kept = [times[x] for x, _ in points] if times else ()
    return replace(line, points=[(round(x, 3), _rounded(y)) for x, y in points], times=kept)


def _rounded_band(line: Line) -> Line:
    """Return a line with a band, with rounded values; of many points the means and ranges of parts."""
    ranges = dict(zip((x for x, _ in line.points), line.band, strict=True))
    parts = _parts(line.points, BAND_PARTS) if len(line.points) > BAND_PARTS else [[point] for point in line.points]
    points: list[tuple[float, float | None]] = []
    band: list[tuple[float | None, float | None]] = []
    for part in parts:
        values = [y for _, y in part if y is not None]
        bounds = [bound for x, _ in part for bound in ranges[x] if bound is not None]
        points.append((round(mean(x for x, _ in part), 3), _rounded(mean(values)) if values else None))
        band.append((_rounded(min(bounds)), _rounded(max(bounds))) if bounds else (None, None))
    return replace(line, points=points, band=band, times=())


def _of_epochs(line: Line) -> Line:
    """Return a line whose steps begin again: the page draws it over either axis, but if it is long only over steps."""
    if not line.times or len(line.points) > 2 * PARTS:
        return _banded(line)
    return replace(line, points=[(round(x, 3), _rounded(y)) for x, y in line.points])


def _banded(line: Line) -> Line:
    """Return a line of the medians of its parts, with their lowest and highest values as band."""
    points: list[tuple[float, float | None]] = []
    band: list[tuple[float | None, float | None]] = []
    for part in _parts(line.points, BAND_PARTS):
        values = [y for _, y in part if y is not None]
        points.append((round(mean(x for x, _ in part), 3), _rounded(median(values)) if values else None))
        band.append((_rounded(min(values)), _rounded(max(values))) if values else (None, None))
    # The values of a part are of several epochs: they have no time in common.
    return replace(line, points=points, band=band, times=())


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
