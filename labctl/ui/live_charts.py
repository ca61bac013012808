"""Charts of a run under way: new points of its metrics, and of the samples of its nodes."""

from __future__ import annotations

import csv
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from msgspec import Struct

from labctl.model import Job
from labctl.records import samples, store
from labctl.records.metrics import Sample
from labctl.reports.curves import MOST, Axis, Chart, Line, Points, Times, machine_name, name_of, thinned, value_text
from labctl.runs.series import Tally, main_rank, named_rank, repetition
from labctl.system import files, human
from labctl.system.decode import decode

ROWS = 20_000
"""Rows of samples that a node is asked for at once."""
ALL = "all"
"""Name of the line that stands for all nodes of a run with many."""
LARGEST = 8 << 20
"""Bytes of a file that are read at once."""
STEP_TIME = "step time"


class SampleTable:
    """Samples of a node: a file that new rows are appended to, and the last rows."""

    def __init__(self, node: str, file: Path) -> None:
        """Begin without rows."""
        self.node, self.file = node, file
        self._count = self._offset = 0
        self.head = ""
        self.problem = ""
        """Why the node does not answer; empty if it did."""
        self._last = deque[str](maxlen=samples.RECENT)

    @property
    def last(self) -> str:
        """Return the header and the last rows."""
        return "\n".join((self.head, *list(self._last)))

    def rest(self, job: Job) -> tuple[str, ...]:
        """Return a shell command that prints the rows that are new, the first time with the header, and a full stop."""
        script = 'tail -n "+$2" "$1" | head -n "$3"; echo .'
        file = f"{job.directory}/samples/{self.node}.csv"
        return ("sh", "-c", script, "sh", file, str(self._count + 1), str(ROWS))

    def add(self, printed: str) -> None:
        """Add the rows that the command printed; the last one, if it was not whole, comes again."""
        self._append(printed.rstrip("\n").split("\n")[:-1])

    def read(self, file: Path) -> None:
        """Add the new rows of the node's own file, which is on this machine; none once it is gone."""
        lines, self._offset = lines_after(file, self._offset)
        self._append([line.decode("utf-8", "replace") for line in lines])

    @property
    def is_read(self) -> bool:
        """Return True if rows were read from the node's own file."""
        return bool(self._offset)

    def _append(self, rows: list[str]) -> None:
        """Append rows, of which the first of all is the header."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{row}\n" for row in rows))
        self._count += len(rows)
        if rows and not self.head:
            self.head, *rows = rows
        self._last.extend(rows)


class LinePoints(Struct, frozen=True, omit_defaults=True):
    """Points to add to a line of a chart; with times if over steps, with ranges if the line stands for several."""

    chart: str
    line: str
    points: Points
    times: Times = ()
    band: Sequence[tuple[float | None, float | None]] = ()
    remark: str = ""
    last: str = ""
    """The value that came last, as text; empty if it is that of the last point."""
    replaces: bool = False
    """True if all earlier points of the line are replaced."""


class LiveCharts:
    """Charts of a run so far; each point of the run belongs to one of them."""

    def __init__(self) -> None:
        self.by_name: dict[str, Chart] = {}

    def chart(self, name: str, title: str, along: Axis, unit: str) -> Chart:
        """Return the chart of this name, a new one if there is none."""
        new = Chart(name=name, title=title, caption="", along=along, unit=unit, lines=())
        return self.by_name.setdefault(name, new)

    def section(self, chart: Chart) -> str:
        """Return the id of the section of the page that a chart is in."""
        return "machine" if chart.name == machine_name(chart.title) else "curves"


class NewPoints:
    """New points by line; several of a line at the same time become one, their mean with a band."""

    def __init__(self, earlier: NewPoints | None = None) -> None:
        """Begin without points; values at the last x of the earlier ones, as of other nodes, still count."""
        self.charts: dict[str, Chart] = {}
        self.remarks: dict[str, str] = {}
        """By the names of charts."""
        self.last_values: dict[str, str] = {}
        """The value that came last, as text, by the names of charts of one line."""
        self.replaced: set[str] = set()
        """Names of charts whose earlier points are replaced."""
        self._values: dict[tuple[str, str], dict[float, list[float]]] = {}
        self._times: dict[tuple[str, str, float], list[float | None]] = {}
        """Of the values at a step, by chart, line and step."""
        self._last = earlier.last() if earlier else {}

    def last(self) -> dict[tuple[str, str], tuple[float, list[float]]]:
        """Return the last x of each line so far, with its values."""
        return self._last | {key: max(values.items(), key=_x) for key, values in self._values.items()}

    def add(self, chart: Chart, line: str, x: float, y: float | None, seconds: float | None = None) -> None:
        """Add a point; y is None if it is unknown, and so are the seconds of a point over steps."""
        self.charts[chart.name] = chart
        key = (chart.name, line)
        values = self._values.setdefault(key, {})
        if x not in values:
            last, earlier = self._last.get(key, (None, []))
            values[x] = [*earlier] if last == x and chart.along == "seconds" else []
        if y is not None:
            values[x].append(y)
        times = self._times.setdefault((chart.name, line, x), [])
        if y is not None or not times:
            times.append(seconds)

    def points(self) -> list[LinePoints]:
        """Return the points of each line by ascending x; many are thinned."""
        return [self._line_points(*key, values) for key, values in self._values.items()]

    def _line_points(self, chart: str, name: str, values: dict[float, list[float]]) -> LinePoints:
        """Return the points of a line, thinned."""
        ordered = sorted(values.items())
        made = self._of_steps(chart, name, ordered) if self.charts[chart].along == "step" else _of_nodes(name, ordered)
        (drawn,) = thinned(msgspec.structs.replace(self.charts[chart], lines=(made,))).lines
        return LinePoints(
            chart,
            name,
            drawn.points,
            drawn.times,
            drawn.band,
            self.remarks.get(chart, ""),
            self.last_values.get(chart, ""),
            chart in self.replaced,
        )

    def _of_steps(self, chart: str, name: str, ordered: Sequence[tuple[float, list[float]]]) -> Line:
        """Return all values, with their times: steps may begin again in another epoch."""
        points: list[tuple[float, float | None]] = []
        times: list[float | None] = []
        for x, ys in ordered:
            values: Sequence[float | None] = ys or (None,)
            points += [(x, y) for y in values]
            # Before the times of the values there may be that of an unknown one.
            times += self._times[chart, name, x][-len(values) :]
        return Line(name=name, points=points, times=() if None in times else times)


def _of_nodes(name: str, ordered: Sequence[tuple[float, list[float]]]) -> Line:
    """Return the means of values by time, with their ranges if there are several at one time, as of several nodes."""
    points = [(x, mean(ys) if ys else None) for x, ys in ordered]
    band = [(min(ys), max(ys)) if ys else (None, None) for _, ys in ordered]
    return Line(name=name, points=points, band=band if any(len(ys) > 1 for _, ys in ordered) else ())


def lines_after(file: Path, offset: int) -> tuple[list[bytes], int]:
    """Return the whole lines of a file from an offset on, at most LARGEST bytes, and the offset behind them."""
    try:
        with files.open_regular(file) as stream:
            stream.seek(offset)
            content = stream.read(LARGEST)
    except OSError:
        return [], offset
    whole = content[: content.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


# --- metrics -------------------------------------------------------------------------------------------------


class MetricsReader:
    """Reader of the metrics of a run, from its record's file."""

    def __init__(self, charts: LiveCharts, job: Job) -> None:
        """Begin without samples."""
        self._charts = charts
        self._units = {metric.name: metric.unit for metric in job.workload.metrics}
        self._timed = ""
        """Metric by which steps are timed: the first with steps and times."""
        self._step, self._at = 0, 0.0
        self._ranks: dict[str, dict[int | None, Tally]] = {}
        """Counts of the samples of each rank, by metric."""
        self._counted = 0
        """Offset up to which they are counted."""

    def read(self, folder: Path, offset: int, new: NewPoints) -> int:
        """Add the points of new samples; return the offset behind them.

        If by now another rank of a metric is to be drawn, add all points. They replace those on the page, as the first
        do, with which it was loaded.
        """
        file, before = folder / store.METRICS, self._drawn()
        lines, end = lines_after(file, offset)
        self._count(file, end)
        drawn = self._drawn()
        if offset and any(drawn[metric] != rank for metric, rank in before.items()):
            offset = 0
            lines, end = lines_after(file, offset)
            self._step, self._at = 0, 0.0
        for sample in filter(None, map(_sample, lines)):
            if sample.rank == drawn.get(sample.metric):
                self._add(sample, new)
        self._add_remarks(new, drawn)
        new.replaced |= set() if offset else set(new.charts)
        return end

    def _count(self, file: Path, end: int) -> None:
        """Count the samples of each rank up to an offset."""
        lines = [b""]
        while self._counted < end and lines:
            lines, self._counted = lines_after(file, self._counted)
            for sample in filter(None, map(_sample, lines)):
                tallies = self._ranks.setdefault(sample.metric, {})
                tallies.setdefault(sample.rank, Tally()).add(sample.step, sample.value)

    def _drawn(self) -> dict[str, int | None]:
        """Return the rank to draw of each metric."""
        return {metric: main_rank(_counts(tallies)) for metric, tallies in self._ranks.items()}

    def _add_remarks(self, new: NewPoints, drawn: Mapping[str, int | None]) -> None:
        """Add what captions say of all samples so far of the ranks that are drawn."""
        grown = {chart.title for chart in new.charts.values()}
        for metric in drawn.keys() & grown:
            tallies = self._ranks[metric]
            tally = tallies[drawn[metric]]
            rank = named_rank(drawn[metric]) if len(tallies) > 1 else ""
            repeated = repetition([tally])
            new.remarks[name_of(metric)] = "; ".join(filter(None, (tally.absence, rank, repeated)))
            if metric == self._timed:
                new.remarks.setdefault(name_of(STEP_TIME), repeated)

    def _add(self, sample: Sample, new: NewPoints) -> None:
        """Add the point of a sample, and the time of its step."""
        along: Axis = "seconds" if sample.step is None else "step"
        chart = self._charts.chart(name_of(sample.metric), sample.metric, along, self._units.get(sample.metric, ""))
        x = sample.step if chart.along == "step" else sample.seconds
        new.last_values[chart.name] = value_text(sample)
        if x is not None:
            new.add(chart, "", x, sample.value, sample.seconds)
        self._time(sample, new)

    def _time(self, sample: Sample, new: NewPoints) -> None:
        """Add the time of a step, between two samples of the metric by which steps are timed."""
        if sample.step is None or sample.seconds is None:
            return
        self._timed = self._timed or sample.metric
        if sample.metric != self._timed:
            return
        # In another epoch steps may begin again.
        if sample.step > self._step > 0:
            chart = self._charts.chart(name_of(STEP_TIME), STEP_TIME, "step", "s")
            seconds = (sample.seconds - self._at) / (sample.step - self._step)
            new.last_values[chart.name] = human.number(seconds)
            new.add(chart, "", sample.step, seconds, sample.seconds)
        self._step, self._at = sample.step, sample.seconds


def _counts(tallies: Mapping[int | None, Tally]) -> dict[int | None, int]:
    """Return the number of samples of each rank."""
    return {rank: tally.samples for rank, tally in tallies.items()}


def _sample(line: bytes) -> Sample | None:
    """Return the sample in a line; None if it was not written whole, as on a full disk."""
    try:
        return decode(line, Sample)
    except ValueError:
        return None


# --- samples of nodes ----------------------------------------------------------------------------------------


def read_samples(charts: LiveCharts, tables: Sequence[SampleTable], offsets: list[int], new: NewPoints) -> None:
    """Add the points of new samples, and move the offset of each node behind them."""
    for number, table in enumerate(tables):
        lines, offsets[number] = lines_after(table.file, offsets[number])
        rows = list(csv.reader(line.decode("utf-8", "replace") for line in lines))
        columns = samples.columns(next(csv.reader([table.head]), []))
        devices = Counter(column.title for column in columns)
        for column in columns:
            line = _line_of(table.node, column.device, len(tables), devices[column.title])
            remark = _merged_of(line, table.node, len(tables), devices[column.title])
            _add_column(charts, column, line, rows, new, remark)


def _line_of(node: str, device: str, nodes: int, devices: int) -> str:
    """Return the name of a line: of a device or a node, or ``all`` if a chart would have more lines than MOST."""
    if nodes * devices <= MOST:
        return f"{node} {device}".rstrip()
    return node if nodes <= MOST else ALL


def _merged_of(line: str, node: str, nodes: int, devices: int) -> str:
    """Return of what a line is the mean; empty if it is of one node or device."""
    if line == ALL:
        return f"mean of {human.count(nodes, 'node')}"
    return f"mean of {human.count(devices, 'device')}" if line == node and devices > 1 else ""


def _add_column(
    charts: LiveCharts, column: samples.Column, line: str, rows: Sequence[Sequence[str]], new: NewPoints, remark: str
) -> None:
    """Add the points of a column; none as long as it was always zero."""
    points = [
        (samples.cell_value(row[0]), samples.cell_value(row[column.place])) for row in rows if len(row) > column.place
    ]
    name = machine_name(column.title)
    if name not in charts.by_name and not any(value for at, value in points if at is not None):
        return
    chart = charts.chart(name, column.title, "seconds", column.unit)
    new.remarks[chart.name] = remark
    for at, value in points:
        if at is not None:
            new.add(chart, line, round(at) if line == ALL else at, value)


def _x(point: tuple[float, Any]) -> float:
    return point[0]
