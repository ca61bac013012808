"""The page of one run or several: verdict, curves, machine, ranks, log, environment; and its charts as pictures."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.model import Result
from labctl.records import last_words, metrics, places, store
from labctl.reports import chart, samples
from labctl.reports.chart import Bar, Drawing, Line
from labctl.reports.page import number, render
from labctl.runs import compare
from labctl.runs.compare import Comparison, RecordedRun, redact_fact
from labctl.system import files

PAGE = "report.html"
MOST = len(chart.STYLES)
"""Lines of a chart."""
EXCERPT = 50
"""Lines of the log, the last."""
LONGEST_LINE = 500
TAIL = 4 << 20
"""Bytes of the log that are searched for the cause."""
# What ranks write of themselves, as ``step time: 182 ms``.
STEP_TIME = re.compile(r"(?:step[ _-]?time|time per step)[ =:]+(\d+(?:\.\d+)?) ?(ms|s)?\b", re.IGNORECASE)


class Picture(Struct, frozen=True):
    """A chart: the name of its file, what it shows, and what can be read off it."""

    name: str
    title: str
    caption: str
    drawing: Drawing


class Section(Struct, frozen=True):
    """A run on the page; ``label`` is empty where it is the only one."""

    label: str
    result: Result
    cause: str
    """The lines of the log with the cause of a failure."""
    last: str
    """Its last lines."""


class Report(Struct, frozen=True):
    """A page and its pictures, by name."""

    html: str
    pictures: Mapping[str, bytes]


class WrittenReport(Struct, frozen=True):
    """Where a report was written."""

    page: str
    pictures: tuple[str, ...]


def write(directory: Path, report: Report) -> WrittenReport:
    """Write the page and its pictures. HostError where that fails."""
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in report.pictures.items():
            (directory / name).write_bytes(content)
    files.write(directory / PAGE, report.html, mode=0o644)
    return WrittenReport(page=str(directory / PAGE), pictures=tuple(str(directory / name) for name in report.pictures))


def write_csv(file: Path, directory: Path) -> WrittenReport:
    """Write the report of a metrics.csv. ConfigError if there is no such file."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file", hint="labctl report RUN, or its id")
    return write(directory.absolute(), of_csv(file))


def name_of(runs: Sequence[RecordedRun]) -> str:
    """Name the directory of a report of these runs."""
    first, others = runs[0].result.run_id, len(runs) - 1
    return f"{first}-and-{others}-more" if others else first


def of_runs(lab: Path, runs: Sequence[RecordedRun]) -> Report:
    """The report of runs, however they ended; of several with what differs between them and what that did."""
    compared = compare.compare(runs)
    labels = _labels(compared) if len(runs) > 1 else dict.fromkeys(compared.groups[0].runs, ("", ""))
    named = {labels[run.result.run_id]: run for run in runs}
    paths = {label: store.directory(lab, run.result.run_id) for label, run in named.items()}
    curves = list(_curves(named))
    machine = list(_machine({label: samples.read(path) for label, path in paths.items()}))
    ranks = list(_ranks({label[-1]: rank_times(lab, run.result) for label, run in named.items()}))
    sections = [_section(label[-1], run.result, paths[label]) for label, run in named.items()]
    by_id = {run.result.run_id: run for run in runs}
    return _report(
        "runs.html.j2",
        curves=curves,
        machine=machine,
        ranks=ranks,
        sections=sections,
        compared=compared,
        effects=[compare.in_words(effect) for effect in compared.effects],
        noise=compare.source_of_noise(compared),
        # Of several runs those that were missed: the others say nothing.
        checks=[
            (one.label, check) for one in sections for check in one.result.checks if len(runs) == 1 or not check.passed
        ],
        metrics=list(dict.fromkeys(name for group in compared.groups for name in group.metrics)),
        at_end={name for run in runs for name, metric in run.result.metrics.items() if "last" in metric},
        environments=[(group.name, *_environment(by_id[group.runs[0]].facts)) for group in compared.groups],
    )


def of_csv(path: Path) -> Report:
    """The report of a metrics.csv. ConfigError for what is none."""
    rows = samples.epochs(path)
    by_rank: dict[int, list[samples.EpochRow]] = {}
    for row in rows:
        by_rank.setdefault(row.rank, []).append(row)
    charts: list[Picture] = []
    for column, title, unit in (
        ("Computation_Time", "time of an epoch", "s"),
        ("GPU_Load", "device load", "%"),
        ("GPU_Used_Mem_MB", "device memory", "MB"),
        ("GPU_Temp_C", "device temperature", "°C"),
    ):
        lines = [
            Line(name=f"rank {rank}", points=[(row.epoch, row.values.get(column)) for row in of])
            for rank, of in by_rank.items()
        ]
        charts += _picture(title, lines, "epoch", unit)
    times = {rank: [row.seconds for row in of if row.seconds is not None] for rank, of in by_rank.items()}
    return _report(
        "metrics.html.j2",
        file=path.name,
        curves=charts,
        ranks=list(_ranks({"": (_means(times), "s/epoch")})),
        rows=[(rank, of[-1].name, len(of), mean(times[rank]) if times[rank] else None) for rank, of in by_rank.items()],
    )


def _report(template: str, **data: object) -> Report:
    pictures = [one for value in data.values() if isinstance(value, list) for one in value if isinstance(one, Picture)]
    return Report(render(template, **data), {f"{one.name}.png": one.drawing.png() for one in pictures})


Label = tuple[str, str]


def _labels(compared: Comparison) -> dict[str, Label]:
    """The group of each run and its own name: A, or A1 and A2 where the group has several."""
    return {
        run_id: (group.name, f"{group.name}{place}" if len(group.runs) > 1 else group.name)
        for group in compared.groups
        for place, run_id in enumerate(group.runs, start=1)
    }


def _environment(facts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a run ran as: what is shown at once, and its settings and files."""
    redacted = {name: redact_fact(name, value) for name, value in facts.items()}
    main = {name: value for name, value in redacted.items() if not (name.isupper() or name.startswith("file "))}
    return main, {name: value for name, value in redacted.items() if name not in main}


# --- charts --------------------------------------------------------------------------------------------------


def _picture(title: str, lines: Iterable[Line], along: str, unit: str) -> Iterator[Picture]:
    """Its chart, where a line has two values. More lines than can be told apart are drawn as one, with its band."""
    drawn = [line for line in lines if sum(value is not None for _, value in line.points) > 1]
    if not drawn:
        return
    if len(drawn) > MOST:
        points = sorted((point for line in drawn for point in line.points), key=lambda point: point[0])
        drawn = [Line(name="all", points=points)]
    values = [value for line in drawn for _, value in line.points if value is not None]
    absent = sum(len(line.points) for line in drawn) - len(values)
    caption = f"{number(min(values))} to {number(max(values))} {unit}".rstrip()
    caption += f"; no figure for {absent:,} of {absent + len(values):,}" if absent else ""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    yield Picture(
        name, title, caption, chart.lines(drawn, along, f"{title} ({unit})" if unit else title, f"{title}: {caption}")
    )


Points = Sequence[tuple[float, float | None]]


def _lines(named: Iterable[tuple[tuple[str, ...], Points]]) -> list[Line]:
    """Lines by group, run, node and device; where those are too many to be told apart, by fewer of these."""
    named = list(named)
    for depth in reversed(range(1, 1 + max((len(name) for name, _ in named), default=0))):
        lines: dict[tuple[str, ...], list[tuple[float, float | None]]] = {}
        for name, points in named:
            lines.setdefault(name[:depth], []).extend(points)
        if len(lines) <= MOST:
            break
    return [
        # A run's own name has its group's in it.
        Line(name=" ".join(filter(None, name[1:] or name)), points=sorted(points, key=lambda point: point[0]))
        for name, points in lines.items()
    ]


def _curves(runs: Mapping[Label, RecordedRun]) -> Iterator[Picture]:
    """Each metric that was printed on the way, the loss first; and the time of each step."""
    names = dict.fromkeys(name for run in runs.values() for name in run.series)
    for name in sorted(names, key=lambda name: name != "loss"):
        every = {label: run.series.get(name, ()) for label, run in runs.items()}
        unit = next((run.declared[name].unit for run in runs.values() if name in run.declared), "")
        timed = all(one.seconds is not None for of in every.values() for one in of)
        # Rates are over time, as what is sampled of the machine.
        rate = timed and unit.endswith("/s")
        stepped = not rate and all(one.step is not None for of in every.values() for one in of)
        lines = _lines(
            (
                label,
                [
                    (float((one.step if stepped else one.seconds if timed else at) or 0), one.value)
                    for at, one in enumerate(of, 1)
                ],
            )
            for label, of in every.items()
        )
        yield from _picture(name, lines, "step" if stepped else "seconds" if timed else "value", unit)
    times = (
        (label, [(float(step), seconds) for step, seconds in compare.step_times(run.series)])
        for label, run in runs.items()
    )
    yield from _picture("time of a step", _lines(times), "step", "s")


def _machine(runs: Mapping[Label, Sequence[samples.Track]]) -> Iterator[Picture]:
    """A chart for everything that was sampled, but for what was zero all the time."""
    kinds = dict.fromkeys((track.what, track.unit) for tracks in runs.values() for track in tracks)
    for kind in kinds:
        lines = _lines(
            ((*label, track.node, track.device), track.points)
            for label, tracks in runs.items()
            for track in tracks
            if (track.what, track.unit) == kind
        )
        if any(value for line in lines for _, value in line.points):
            yield from _picture(kind[0], lines, "seconds", kind[1])


def rank_times(lab: Path, result: Result) -> tuple[dict[int, float], str]:
    """The time of an epoch or of a step of each rank, as it wrote it or by when it printed its steps; with the unit."""
    # A script may write any table of this name.
    with suppress(ConfigError):
        rows = samples.epochs(store.directory(lab, result.run_id) / "metrics.csv")
        times = {row.rank: [one.seconds for one in rows if one.rank == row.rank and one.seconds] for row in rows}
        return _means(times), "s/epoch"
    said, timed = {}, {}
    for rank in (one.rank for one in result.ranks):
        # Old records do not have the logs of ranks.
        with suppress(ConfigError):
            said[rank], timed[rank] = _step_times(store.output(lab, result.run_id, rank))
    return _means(said) or {rank: seconds for rank, seconds in timed.items() if seconds is not None}, "s/step"


def _step_times(lines: Iterable[tuple[float | None, str]]) -> tuple[array[float], float | None]:
    """The times of steps that lines tell of, and the mean from the first step that is named to the last."""
    said = array("d")
    first: tuple[int, float] | None = None
    last = (0, 0.0)
    for when, line in lines:
        if len(line) > metrics.LONGEST_LINE:
            continue
        if match := STEP_TIME.search(line):
            said.append(float(match[1]) / (1000 if (match[2] or "").lower() == "ms" else 1))
        if when is not None and (count := places.step(line.lower())):
            last = (count[0], when)
            first = first or last
    # Steps that came at once have no time that is known.
    if not first or last[0] <= first[0] or last[1] <= first[1]:
        return said, None
    return said, (last[1] - first[1]) / (last[0] - first[0])


def _means(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Without the first, which has what begins, unless it is the only one."""
    return {rank: mean(values[1:] or values) for rank, values in sorted(times.items()) if values}


def _ranks(runs: Mapping[str, tuple[Mapping[int, float], str]]) -> Iterator[Picture]:
    """The ranks, slowest first, of each run that has several."""
    for label, (times, unit) in runs.items():
        if len(times) < 2:
            continue
        slowest = max(times, key=lambda rank: times[rank])
        caption, usual = f"rank {slowest} is the slowest", median(times.values())
        if usual:
            caption += f": {100 * (times[slowest] / usual - 1):.0f} % above the median"
        ordered = sorted(times.items(), key=lambda one: -one[1])
        title = f"time of each rank {label}".rstrip()
        drawing = chart.bars(
            [Bar(name=f"rank {rank}", value=value) for rank, value in ordered], f"{title} ({unit})", caption
        )
        yield Picture(f"ranks-{label.lower()}".rstrip("-"), title, caption, drawing)


# --- log -----------------------------------------------------------------------------------------------------


def _section(label: str, result: Result, path: Path) -> Section:
    lines = store.last_lines(path / store.OUTPUT, TAIL)
    stalled = result.cause == "stalled"
    cause = last_words.cause_lines(result.message, lines, stalled=stalled) if result.verdict != "PASS" else []
    shown = ("\n".join(map(_shortened, some)) for some in (cause, lines[-EXCERPT:]))
    return Section(label, result, *shown)


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... {len(line):,} characters"
