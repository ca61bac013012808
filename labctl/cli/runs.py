"""Command runs: a list of runs as a table or CSV, and removal of old ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, DryRun, Json, answering, context
from labctl.cli.output import fitted, printable, width_of, write
from labctl.errors import ConfigError
from labctl.model import LOSSES
from labctl.system import human

if TYPE_CHECKING:
    from labctl.records.store import RunList, RunSummary

RATES = ("throughput",)
"""Metrics of the column of rates: the first that a run has."""
SHOWN_NOTE = 40
"""Characters of a note in a list for a terminal."""
CSV_FIELDS = ("run_id", "started", "seconds", "workload", "state", "verdict", "cause", "world_size")

runs_command = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


class RunVerdict(str, Enum):
    """Choices of `runs --verdict`."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    ERROR = "ERROR"


@runs_command.callback()
@runs_command.command("ls", help="List runs, as `labctl runs` alone does.")
def list_runs(
    ctx: typer.Context,
    workload: Annotated[
        str,
        typer.Option(metavar="WORKLOAD", autocompletion=complete.workload, help="List only runs of this workload."),
    ] = "",
    verdict: Annotated[
        RunVerdict | None,
        typer.Option(metavar="PASS|FAIL|ERROR", case_sensitive=False, help="List only runs with this verdict."),
    ] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="List only runs since 2d, 3h or 2026-11-25.")] = "",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with a column for each metric.")] = False,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl runs`: list runs; nothing for a subcommand, whose options must follow it."""
    if name := ctx.invoked_subcommand:
        if any(getattr(ctx.get_parameter_source(option), "name", "") == "COMMANDLINE" for option in ctx.params):
            ctx.fail(f"options follow the subcommand: labctl runs {name} [OPTIONS]")
        return
    from labctl.records.store import RunFilter

    with answering(as_json=json) as output:
        if csv and json:
            raise ConfigError("--csv and --json exclude each other", hint="labctl runs --csv")
        run_filter = RunFilter(
            workload=workload, verdict=verdict.value if verdict else "", since=parse_since(since) if since else None
        )
        listed = flows.runs(context(directory, output), run_filter)
        if csv:
            write(csv_text(listed.runs), sys.stdout, end="")
        else:
            output.answer(listed, list_text(listed, width_of(sys.stdout)))


def list_text(listed: RunList, width: int) -> str:
    """Render a table of runs for a terminal of this width, 0 for none; without runs say that there are none."""
    if not listed.total:
        return "no runs yet\nhint: labctl run opt-tiny"
    if not listed.runs:
        return f"no matching run; labctl runs lists all {listed.total:,}"
    columns = run_columns(listed.runs)
    if width:
        columns["NOTE"] = [human.shortened(note, SHOWN_NOTE) for note in columns["NOTE"]]
    whole = fitted(columns, 0)
    if not width or max(map(len, whole.splitlines())) <= width:
        return whole
    return fitted(columns | {"RUN": [run.short_id for run in listed.runs]}, width, ("NODES", "TIME"))


def run_columns(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Return the cells of runs by the head of their column, empty where a run has no such value."""
    now = datetime.now().astimezone()
    return {
        "RUN": [run.run_id for run in runs],
        "WHEN": [when(run, now) for run in runs],
        "WORKLOAD": [run.workload or "" for run in runs],
        "RESULT": list(map(result_cell, runs)),
        "LOSS": [metric_cell(run.metrics, LOSSES) for run in runs],
        **throughput_column(runs),
        "METRIC": [other_metric(run.metrics) for run in runs],
        "NODES": [str(len(run.nodes) or "") for run in runs],
        "TIME": list(map(duration_cell, runs)),
        "NOTE": [run.note for run in runs],
    }


def when(run: RunSummary, now: datetime) -> str:
    """Render how long ago a run began; empty if that is not known."""
    from labctl.records import store

    start = store.start(run.run_id, run.started)
    return human.ago((now - start).total_seconds()) if start else ""


def result_cell(run: RunSummary) -> str:
    """Render a run's verdict and its cause, or the state and step of a run without a result."""
    return " ".join(filter(None, (run.outcome, run.cause) if run.outcome else (run.shown_state, run.step)))


def duration_cell(run: RunSummary) -> str:
    """Render how long a run took, or has taken so far; empty if that is not known."""
    seconds = run.age if run.seconds is None else run.seconds
    return human.duration(seconds) if seconds else ""


def metric_cell(metrics: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str:
    """Render the value and unit of the first of these metrics that a run has; empty if it has none."""
    from labctl.records.verdict import final

    metric = next((metrics[name] for name in names if name in metrics), None)
    return f"{human.figure(metric, final(metric))} {metric.get('unit', '')}".rstrip() if metric else ""


def throughput_column(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Return the cells of throughput by head, which is the unit if all runs that have a rate have the same."""
    rates = [run.metrics.get("throughput", {}) for run in runs]
    units = {rate.get("unit", "") for rate in rates if rate}
    if len(units) != 1 or "" in units:
        return {"THROUGHPUT": [metric_cell(run.metrics, RATES) for run in runs]}
    return {units.pop().upper(): [human.figure(rate) if rate else "" for rate in rates]}


def other_metric(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the first metric of a run, with its name, if it has neither loss nor throughput; else empty."""
    if not metrics or any(name in metrics for name in (*LOSSES, *RATES)):
        return ""
    name = next(iter(metrics))
    return f"{name} {metric_cell(metrics, (name,))}"


def csv_text(runs: Sequence[RunSummary]) -> str:
    """Render runs as CSV (RFC 4180): their fields, and a column for each metric, with its unit in the head."""
    import csv
    import io

    numbers = [dict(metric_values(run.metrics)) for run in runs]
    names = dict.fromkeys(chain.from_iterable(numbers))
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow((*CSV_FIELDS, "nodes", *names, "note"))
    for run, values in zip(runs, numbers, strict=True):
        fields = (getattr(run, name) for name in CSV_FIELDS)
        writer.writerow((*fields, " ".join(run.nodes), *map(values.get, names), run.note))
    return printable(stream.getvalue(), "\r\n")


def metric_values(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the head and the value of each metric, ``nan`` and ``inf`` as such, and of the first one of a series."""
    from labctl.records.verdict import final

    for name, metric in metrics.items():
        unit = f" ({metric['unit']})" if metric.get("unit") else ""
        for title, key in ((name, final(metric)), (f"{name} first", "first")):
            if key in metric:
                value = metric[key]
                yield f"{title}{unit}", metric.get("note") if value is None else value


@runs_command.command("prune", help="Remove the oldest finished runs.")
def prune_command(
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Number of finished runs to keep.")],
    directory: Directory = HERE,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """`labctl runs prune`: remove the oldest finished runs, or print them in a dry run."""
    with answering(as_json=json, stopped="re-run to finish") as output:
        lab = context(directory, output)
        if dry_run:
            chosen = flows.plan_prune(lab, keep)
            output.answer(chosen, "\n".join(f"remove runs/{run_id}" for run_id in chosen.removed))
            return
        pruned = flows.prune_runs(lab, keep)
        output.answer(pruned, f"{len(pruned.removed)} removed, {pruned.kept} kept")


def parse_since(text: str) -> datetime:
    """Parse ``2d``, ``3h``, ``30m`` ago, or an ISO date or time, into local time. ConfigError if it is neither."""
    if ago := re.fullmatch(r"(\d{1,5})([dhm])", text):
        unit = {"d": "days", "h": "hours", "m": "minutes"}[ago[2]]
        return datetime.now() - timedelta(**{unit: int(ago[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ConfigError(f"--since: `{text}` is not a time", hint="--since 2d, 3h, 30m or 2026-11-25") from None
