"""Page of runs with verdict, curves, machine, ranks and log: written with its charts as PNG, or served."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.jobs import code
from labctl.model import LOSSES, CriterionResult, Metric, Result
from labctl.records import last_words, metrics, places, store, straggler, verdict
from labctl.records.metrics import Sample
from labctl.reports import chart, curves, samples
from labctl.reports.chart import Bar
from labctl.reports.curves import Chart, Label, Points, Series
from labctl.reports.page import policy, render, static
from labctl.runs import compare, next_step, origin, series
from labctl.runs.compare import Comparison, Difference, RecordedRun
from labctl.system import files, human

PAGE = "report.html"
RUNNING = "RUNNING"
"""Verdict of the provisional result of a run that is under way."""
COMMON = "common.js"
"""Script that served pages have anyway."""
SCRIPTS = ("uplot.js", "charts.js")
STYLES = ("uplot.css", "charts.css")
EXCERPT = 50
"""Last lines of the log to show."""
LONGEST_LINE = 500
"""Characters of a line of the log to show."""
TAIL = 4 << 20
"""Bytes at the end of the log to search for the cause."""
RANKS_TAIL = 1 << 20
"""Bytes at the end of all ranks' logs to read their step times from: a page of a million lines opens at once."""
HEADLINE_METRICS = ("throughput", *LOSSES)
"""Metrics of the headline, those that a run has."""
MOST_IN_HEADLINE = 2
"""Metrics of the headline of a run that has none of HEADLINE_METRICS."""
DIFFERENCES = 8
"""Differences between runs of which all are shown; of more, those of files and packages are folded."""
SUMMED_RATES = ("samples/s", "tokens/s", "images/s")
"""Units of rates to which every rank adds its part."""
FOLDED = ("file", "package")
"""Kinds of facts that may be many."""
MOST_SETTINGS, LONGEST_SETTINGS = 2, 30
"""Settings in the name of a line at most, and their characters."""
FILES = {
    store.OUTPUT: "output.log",
    "ranks": "output of each rank",
    "work": "code",
    code.DIFFERENCE: "changes since its commit",
    store.EVIDENCE: "debug bundle",
    store.RESULT: "result.json",
}
"""Files and folders of a record that the page links, with their name on it."""
EPOCH_COLUMNS = (
    ("Computation_Time", "epoch time", "s"),
    ("GPU_Load", "device load", "%"),
    ("GPU_Used_Mem_MB", "device memory", "MB"),
    ("GPU_Temp_C", "device temperature", "°C"),
)
"""Columns of a metrics.csv that are drawn, with title and unit."""
# Step times in the output of a rank, as ``step time: 182 ms``.
STEP_TIME = re.compile(r"(?:step[ _-]?time|time per step)[ =:]+(\d+(?:\.\d+)?) ?(ms|s)?\b", re.IGNORECASE)


class Ranks(Struct, frozen=True, kw_only=True):
    """Times of a run's ranks, slowest first."""

    name: str
    title: str
    caption: str
    unit: str
    bars: tuple[Bar, ...]

    @property
    def shown(self) -> tuple[Bar, ...]:
        """Return the slowest ranks, with a bar each on a page."""
        return self.bars[: chart.ROWS]


class Section(Struct, frozen=True):
    """A run on the page; ``label`` is empty for a single run."""

    label: str
    run: RecordedRun
    headline: tuple[str, ...]
    """Main figures, nodes and duration."""
    path: str
    """Directory of its record."""
    folder: str
    """Address of the same: relative to a written page; empty without links to it."""
    links: Mapping[str, str]
    """Addresses of files of its record, by their name on the page."""
    cause: str
    """Lines of the log with the cause of a failure; empty if that is a criterion."""
    missed: str
    """Lines of the log with the metrics that missed a criterion."""
    last: str
    """Last lines of the log."""
    late: str
    """Sentence on the node that the others waited for; empty if there is none."""
    command: str
    """The command line that repeats it, as far as it is recorded; else empty."""
    next_step: str
    """Advice on what to try next; empty if there is none."""
    origin: Mapping[str, str]
    """Arguments, image, nodes, hosts, devices and code, for people."""

    @property
    def result(self) -> Result:
        """Return the run's result."""
        return self.run.result

    @property
    def running(self) -> bool:
        """True if the run is under way."""
        return self.result.verdict == RUNNING

    @property
    def kind(self) -> str:
        """Return the kind of its end, which its look shows: a run that was stopped has not failed."""
        return "interrupted" if self.result.cause == "interrupted" else self.result.outcome


class Report(Struct, frozen=True):
    """An HTML page, and its pictures as PNG by file name."""

    html: str
    pictures: Mapping[str, bytes]


class WrittenReport(Struct, frozen=True):
    """Paths of a report that was written."""

    page: str
    pictures: tuple[str, ...]


def write(directory: Path, report: Report) -> WrittenReport:
    """Write a report's page and pictures to a directory; return their paths. HostError if that fails."""
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in report.pictures.items():
            (directory / name).write_bytes(content)
    files.write(directory / PAGE, report.html, mode=0o644)
    return WrittenReport(page=str(directory / PAGE), pictures=tuple(str(directory / name) for name in report.pictures))


def write_csv(file: Path, directory: Path) -> WrittenReport:
    """Write the report of a metrics.csv to a directory; return its paths. ConfigError without a table of epochs."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file", hint="labctl report RUN, or its id")
    return write(directory.absolute(), of_csv(file))


def name_of(runs: Sequence[RecordedRun]) -> str:
    """Return the directory name for a report of these runs: the first run's id, and the number of others."""
    first, others = runs[0].result.run_id, len(runs) - 1
    return f"{first}-and-{others}-more" if others else first


def directory_of(lab: Path, runs: Sequence[RecordedRun]) -> Path:
    """Return the usual directory of a report of these runs."""
    return lab / "reports" / name_of(runs)


def of_runs(lab: Path, runs: Sequence[RecordedRun], out: Path | None = None, *, linked: bool = True) -> Report:
    """Return the report of ended runs; of several, with a comparison of their settings and metrics.

    The page is for the directory ``out``, from which it links the runs' files if ``linked``.
    """
    beside = out or directory_of(lab, runs)
    content = _content(lab, runs, lambda path: quote(os.path.relpath(path, beside)) if linked else "")
    return _written("runs.html.j2", content)


def served(lab: Path, runs: Sequence[RecordedRun], root: str) -> dict[str, Any]:
    """Return what runs.html.j2 needs for a page below the address ``root``, of ended runs or one under way.

    Such a run has a provisional result, with the verdict RUNNING. Nothing is drawn: the page's script does that.
    """
    return {
        **_content(lab, runs, lambda path: f"{root}/run/{quote(path.name)}/files"),
        "layout": "ui.html.j2",
        "drawings": {},
        "addresses": [f"{root}/static/{name}" for name in SCRIPTS],
        "scripts": (),
    }


def _content(lab: Path, runs: Sequence[RecordedRun], address: Callable[[Path], str]) -> dict[str, Any]:
    """Return what a page of runs shows; ``address`` is that of a record's directory."""
    compared = compare.compare(runs)
    labels = _labels(compared) if len(runs) > 1 else dict.fromkeys(compared.groups[0].runs, ("", ""))
    by_label = {labels[run.result.run_id]: run for run in runs}
    paths = {label: store.directory(lab, run.result.run_id) for label, run in by_label.items()}
    times = {label[-1]: rank_times(lab, run.result) for label, run in by_label.items()}
    sections = [_section(label[-1], run, paths[label], address(paths[label])) for label, run in by_label.items()]
    by_id = {run.result.run_id: run for run in runs}
    return {
        **_charts(by_label, paths, _line_names(compared, labels)),
        "ranks": list(_ranks(times)),
        "sections": sections,
        "compared": compared,
        "differences": _folded(compared.differences),
        "described": list(compare.described(compared)),
        "checks": _checks(sections, only_missed=len(runs) > 1),
        "metrics": _at_end(compared, runs),
        "found_in": _found_in(compared),
        "remarks": _remarks(runs[0]) if len(runs) == 1 else {},
        "environments": [(group.name, _environment(by_id[group.runs[0]].facts)) for group in compared.groups],
    }


def _charts(
    runs: Mapping[Label, RecordedRun], paths: Mapping[Label, Path], names: Mapping[Label, Label]
) -> dict[str, object]:
    """Return the charts of runs and of their machines, with data and styles; ``names`` are those of their lines."""
    of_metrics = curves.of_runs({names[label]: run for label, run in runs.items()})
    of_machine = curves.of_machine({names[label]: samples.read(path) for label, path in paths.items()})
    return {"curves": of_metrics, "machine": of_machine, **_looks([*of_metrics, *of_machine])}


def _looks(charts: Sequence[Chart]) -> dict[str, object]:
    """Return the data of a page's charts for its script, and the styles."""
    return {
        "data": curves.as_data(charts),
        "line_styles": curves.STYLES,
        "styles": "\n".join(map(static, STYLES)),
    }


def _written(template: str, content: Mapping[str, Any]) -> Report:
    """Render content as a page in one file; return it with a PNG of each chart."""
    drawings = {each.name: chart.curves(each) for each in (*content["curves"], *content.get("machine", ()))}
    scripts = tuple(map(static, (COMMON, *SCRIPTS)))
    html = render(
        template,
        **content,
        layout="page.html.j2",
        drawings={name: drawing.svg() for name, drawing in drawings.items()},
        addresses=(),
        scripts=scripts,
        policy=policy(scripts),
    )
    drawings |= {
        ranks.name: chart.bars(ranks.bars, f"{ranks.title} ({ranks.unit})", ranks.caption) for ranks in content["ranks"]
    }
    return Report(html, {f"{name}.png": drawing.png() for name, drawing in drawings.items()})


def _folded(differences: Sequence[Difference]) -> tuple[list[Difference], list[Difference]]:
    """Return the differences to show, what a person chose first, and those to fold: files and packages, if many."""
    chosen = [difference for difference in differences if _part(difference.what) not in FOLDED]
    ordered = chosen + [difference for difference in differences if difference not in chosen]
    shown = len(chosen) if chosen and len(ordered) > DIFFERENCES else DIFFERENCES
    return ordered[:shown], ordered[shown:]


def _checks(sections: Iterable[Section], *, only_missed: bool) -> list[tuple[str, CriterionResult]]:
    """Return the checked criteria of all runs, each with the run's label; with ``only_missed`` those not met."""
    checks: list[tuple[str, CriterionResult]] = []
    for section in sections:
        shown = (check for check in section.result.checks if not (only_missed and check.passed))
        checks += [(section.label, check) for check in shown]
    return checks


def _at_end(compared: Comparison, runs: Sequence[RecordedRun]) -> dict[str, bool]:
    """Return, for each metric by name, True if its values are the last ones of a series."""
    spreads = chain.from_iterable(group.metrics.items() for group in compared.groups)
    return {name: spread.at_end or any(_is_last(name, run) for run in runs) for name, spread in spreads}


def _is_last(name: str, run: RecordedRun) -> bool:
    """Return True if a metric is declared as the last of its values, and there are several."""
    declared = run.declared.get(name)
    return declared is not None and declared.reduce == "last" and len(run.series.get(name, ())) > 1


def _found_in(compared: Comparison) -> dict[str, str]:
    """Return, for each metric by name, the text in the output that gave it; empty for a declared metric."""
    spreads = chain.from_iterable(group.metrics.items() for group in compared.groups)
    return {name: spread.found for name, spread in spreads}


def of_csv(path: Path) -> Report:
    """Return the report of a metrics.csv. ConfigError if the file is not a table of epochs."""
    by_rank: dict[int, list[samples.EpochRow]] = {}
    for row in samples.epochs(path):
        by_rank.setdefault(row.rank, []).append(row)
    charts = list(chain.from_iterable(_epoch_chart(by_rank, *column) for column in EPOCH_COLUMNS))
    times = {rank: _seconds(rows) for rank, rows in by_rank.items()}
    content = {
        "file": path.name,
        "curves": charts,
        "ranks": list(_ranks({"": (_means(times), "s/epoch")})),
        "rows": [(rank, rows[-1].name, len(rows), _mean(times[rank])) for rank, rows in by_rank.items()],
        **_looks(charts),
    }
    return _written("metrics.html.j2", content)


def _epoch_chart(by_rank: Mapping[int, Sequence[samples.EpochRow]], column: str, title: str, unit: str) -> list[Chart]:
    """Return the chart of a column of a metrics.csv, with a line per rank; none without values."""
    ranks = [Series(name=("", f"rank {rank}"), points=_column(rows, column)) for rank, rows in by_rank.items()]
    return curves.of_series(title, ranks, [("", "")], "epoch", unit, kinds=("", "rank"))


def _mean(times: Sequence[float]) -> float | None:
    """Return the mean of times; None if there are none."""
    return mean(times) if times else None


def _column(rows: Iterable[samples.EpochRow], name: str) -> Points:
    """Return a column of a metrics.csv, by epoch."""
    return [(row.epoch, row.values.get(name)) for row in rows]


def _seconds(rows: Iterable[samples.EpochRow]) -> list[float]:
    """Return the training times of the epochs that have one."""
    return [row.seconds for row in rows if row.seconds is not None]


def _labels(compared: Comparison) -> dict[str, Label]:
    """Return the label of each run: group A and name A, or A1 and A2 if the group has several runs."""
    labels = {}
    for group in compared.groups:
        for place, run_id in enumerate(group.runs, start=1):
            labels[run_id] = (group.name, f"{group.name}{place}" if len(group.runs) > 1 else group.name)
    return labels


def _line_names(compared: Comparison, labels: Mapping[str, Label]) -> dict[Label, Label]:
    """Return the names of lines by label: with the settings that differ if few and short, else with the run's id."""
    if len(labels) == 1:
        return {label: label for label in labels.values()}
    differing = [difference for difference in compared.differences if _is_setting(difference.what)]
    settings = {group.name: _settings_of(group.name, differing) for group in compared.groups}
    long = any(len(text) > LONGEST_SETTINGS for text in settings.values())
    if long or not 0 < len(differing) <= MOST_SETTINGS:
        return {label: (label[0], f"{label[1]} {run_id.rpartition('-')[2]}") for run_id, label in labels.items()}
    named = ((label, settings[label[0]]) for label in labels.values())
    return {label: (f"{label[0]} {text}", f"{label[1]} {text}") for label, text in named}


def _settings_of(group: str, differing: Iterable[Difference]) -> str:
    """Return the settings of a group that differ, as ``learning-rate=0.003``."""
    names = ((each.what.lstrip("-").rpartition(".")[2], each.values[group] or "none") for each in differing)
    return " ".join(f"{name}={value}" for name, value in names)


def _is_setting(fact: str) -> bool:
    """Return True if a fact is an option of the script, a setting, or part of a configuration."""
    return fact.isupper() or fact.startswith(("--", "deepspeed.", "environment."))


def _environment(facts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a run's redacted facts in parts by title: the main ones, with an empty title, come first."""
    parts: dict[str, dict[str, str]] = {"": {}}
    for name, value in compare.redacted(facts).items():
        parts.setdefault(_part(name), {})[name] = value
    return {title and human.count(len(part), title): part for title, part in parts.items()}


def _part(fact: str) -> str:
    """Return the title of the part that a fact is in; empty for the main facts."""
    if fact.isupper():
        return "setting"
    kind = fact.partition(" ")[0]
    return kind if kind in FOLDED else ""


# --- figures -------------------------------------------------------------------------------------------------


def _headline(result: Result) -> Iterator[str]:
    """Yield a run's main figures, its nodes and its duration, as ``208.6 samples/s`` and ``loss 8.12 → 4.87``."""
    names = [name for name in HEADLINE_METRICS if name in result.metrics]
    names = names or list(result.metrics)[:MOST_IN_HEADLINE]
    yield from (_figure(name, result.metrics[name]) for name in names)
    if nodes := {rank.node for rank in result.ranks}:
        yield human.count(len(nodes), "node")
    yield human.duration(result.seconds)


def _figure(name: str, metric: Mapping[str, Any]) -> str:
    """Render a metric's value, or first and last, with unit and name; a throughput's unit names it."""
    value = human.figure(metric, verdict.final(metric))
    if "first" in metric:
        value = f"{human.figure(metric, 'first', 3)} → {human.figure(metric, 'last', 3)}"
    text = f"{value} {metric.get('unit', '')}".rstrip()
    return text if name == "throughput" and metric.get("unit") else f"{name} {text}"


def _remarks(run: RecordedRun) -> dict[str, str]:
    """Return, for each metric by name, how its value was made of what was printed, and a rank's part of a rate."""
    return {name: ", ".join(_remarks_on(name, metric, run)) for name, metric in run.result.metrics.items()}


def _remarks_on(name: str, metric: Mapping[str, Any], run: RecordedRun) -> Iterator[str]:
    """Yield a metric's first value, what it is the median or such of, and its part per rank."""
    if "first" in metric:
        yield f"{human.figure(metric, 'first')} at the start"
    declared = run.declared.get(name)
    if declared and (kept := run.series.get(name, ())[declared.skip :]):
        yield from _reduction(declared, kept)
    value, ranks = metric.get(verdict.final(metric)), run.result.world_size
    if run.unit(name) in SUMMED_RATES and isinstance(value, int | float) and ranks > 1:
        yield f"{human.number(value / ranks)} per rank"


def _reduction(metric: Metric, kept: Sequence[Sample]) -> Iterator[str]:
    """Yield what values a metric was reduced from, as ``median of steps 4 to 120``; nothing if it is one of them."""
    if metric.reduce in ("first", "last", "first-last") or len(kept) < 2:
        return
    first, last = kept[0].step, kept[-1].step
    # The samples of a long run were thinned: their beginning is not where the reduced ones begin.
    if first is not None and last is not None and len(kept) < series.MOST // 2:
        yield f"{metric.reduce} of steps {first:,} to {last:,}"
    else:
        yield metric.reduce + (f" without the first {metric.skip}" if metric.skip else "")


# --- ranks ---------------------------------------------------------------------------------------------------


def rank_times(lab: Path, result: Result) -> tuple[dict[int, float], str]:
    """Return each rank's mean seconds and the unit: s/epoch from metrics.csv, else s/step from the ranks' output."""
    # A script may write another table of this name.
    with suppress(ConfigError):
        of_epochs: dict[int, list[float]] = {}
        for row in samples.epochs(store.directory(lab, result.run_id) / "metrics.csv"):
            if row.seconds:
                of_epochs.setdefault(row.rank, []).append(row.seconds)
        return _means(of_epochs), "s/epoch"
    printed: dict[int, Sequence[float]] = {}
    timed: dict[int, float | None] = {}
    ranks = [rank.rank for rank in result.ranks]
    for rank, lines in store.last_output(lab, result.run_id, ranks, RANKS_TAIL).items():
        printed[rank], timed[rank] = _step_times(lines)
    return _means(printed) or {rank: seconds for rank, seconds in timed.items() if seconds is not None}, "s/step"


def _step_times(lines: Iterable[tuple[float | None, str]]) -> tuple[array[float], float | None]:
    """Return the step times that lines mention, and the mean time from their first to last step; None if unknown."""
    printed = array("d")
    first: tuple[int, float] | None = None
    last = (0, 0.0)
    for when, line in lines:
        if len(line) > metrics.LONGEST_LINE:
            continue
        if match := STEP_TIME.search(line):
            printed.append(float(match[1]) / (1000 if (match[2] or "").lower() == "ms" else 1))
        if when is not None and (count := places.step(line.lower())):
            last = (count[0], when)
            first = first or last
    # The time is not known if all steps were printed at once.
    if not first or last[0] <= first[0] or last[1] <= first[1]:
        return printed, None
    return printed, (last[1] - first[1]) / (last[0] - first[0])


def _means(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return each rank's mean, by rank, without its first value (warm-up) unless it is the only one."""
    return {rank: mean(values[1:] or values) for rank, values in sorted(times.items()) if values}


def _ranks(runs: Mapping[str, tuple[Mapping[int, float], str]]) -> Iterator[Ranks]:
    """Yield the ranks' times, slowest first, of each run with two ranks or more."""
    for label, (times, unit) in runs.items():
        if len(times) < 2:
            continue
        slowest = max(times, key=lambda rank: times[rank])
        caption, usual = f"rank {slowest} is the slowest", median(times.values())
        if usual:
            caption += f": {human.share(times[slowest] / usual - 1)} above the median"
        ordered = sorted(times.items(), key=lambda item: -item[1])
        yield Ranks(
            name=f"ranks-{label.lower()}".rstrip("-"),
            title=f"time per rank {label}".rstrip(),
            caption=caption,
            unit=unit,
            bars=tuple(Bar(name=f"rank {rank}", value=value) for rank, value in ordered),
        )


# --- log -----------------------------------------------------------------------------------------------------


def _section(label: str, run: RecordedRun, path: Path, folder: str) -> Section:
    """Read the end of a run's log; return its headline, links, last lines, cause, missed metrics and late node."""
    result, lines = run.result, store.last_lines(path / store.OUTPUT, TAIL)
    failed = result.verdict not in ("PASS", RUNNING) and result.cause != "criteria"
    cause = last_words.cause_of(result, lines) if failed else []
    return Section(
        label,
        run,
        headline=tuple(_headline(result)),
        path=str(path),
        folder=folder,
        links={title: f"{folder}/{name}" for name, title in FILES.items() if folder and (path / name).exists()},
        cause=_excerpt(cause),
        missed=_excerpt(_missed(run, lines)),
        last=_excerpt(lines[-EXCERPT:]),
        late=straggler.sentence(result.straggler) if result.straggler else "",
        command=run.command,
        next_step=next_step.of_record(path, result),
        origin=_origin(path, run),
    )


def _origin(path: Path, run: RecordedRun) -> dict[str, str]:
    """Return arguments, image, nodes, hosts, devices and code of a run, those that are recorded."""
    return origin.rows(path, compare.redacted(run.facts), compare.versions(path))


def _missed(run: RecordedRun, lines: Sequence[str]) -> Iterator[str]:
    """Yield the log line of each metric whose criterion was not met."""
    criteria = [check.criterion for check in run.result.checks if not check.passed]
    for name, recorded in run.result.metrics.items():
        if not any(criterion.startswith(f"{name} ") for criterion in criteria):
            continue
        if name in run.declared:
            yield from metrics.line_of(run.declared[name], recorded.get(verdict.final(recorded)), lines)
        elif "line" in recorded:
            yield str(recorded["line"])


def _excerpt(lines: Iterable[str]) -> str:
    """Join lines, each cut to LONGEST_LINE characters."""
    return "\n".join(map(_shortened, lines))


def _shortened(line: str) -> str:
    """Return a line, cut to LONGEST_LINE characters with its length behind."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... {len(line):,} characters"
