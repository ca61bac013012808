"""Commands compare, report and export."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.browser import open_page
from labctl.cli.common import HERE, RUN_HELP, Directory, Json, Run, answering, context, not_an_option
from labctl.cli.output import fitted, table, width_of, wrapped
from labctl.cli.run import metric_title, spread_table
from labctl.system import human

if TYPE_CHECKING:
    from labctl.runs.compare import Comparison, Group
    from labctl.runs.export.mlflow import LoggedRun
    from labctl.runs.spread import Spread

LONGEST, SHORTEST = 60, 8
"""Characters of a value that the text shows, at most and in a narrow terminal at least."""
MLFLOW = {
    # Seconds, and attempts after the first: its client would try for minutes to reach a server that does not answer.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # It would print to stdout, and report its use to its makers.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Settings of MLflow's client where the user has none."""


def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", callback=not_an_option, autocompletion=complete.run, help=RUN_HELP),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare only this metric (repeatable; default: all).")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl compare`: print what differs between runs, their figures, and whether these differ more than usual."""
    with answering(as_json=json) as output:
        answer = flows.compare(context(directory, output), runs, metric or ())
        output.answer(answer, comparison_text(answer, width_of(sys.stdout)))


def report_command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            callback=not_an_option,
            autocompletion=complete.run,
            help=f"{RUN_HELP} Or one metrics.csv of a training script (default: latest).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the report (default: reports/RUN).")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser, or tell how to get it to one.")] = False,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl report`: write an HTML report of runs, or of a metrics.csv, and print its path."""
    with answering(as_json=json) as output:
        output.begin(f"drawing the report of {human.listed(runs or ['the latest run'])}")
        answer = flows.report(context(directory, output), runs or ["latest"], out)
        output.answer(answer, answer.page)
        if open_ and (advice := open_page(Path(answer.page), os.environ)):
            output.note(advice)


def export_command(
    run: Run = "latest",
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the metrics as CSV: a row per step, a column per metric and rank."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write metrics and hyperparameters to this log directory.")
    ] = None,
    mlflow: Annotated[
        bool,
        typer.Option("--mlflow", help="Log the run to the MLflow server at MLFLOW_TRACKING_URI; needs mlflow-skinny."),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdict and criteria as JUnit XML.")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl export`: write a run as a table, for TensorBoard, to MLflow or for a CI server."""
    from labctl.runs.export import Formats

    with answering(as_json=json) as output:
        if mlflow:
            for name, value in MLFLOW.items():
                os.environ.setdefault(name, value)
            output.begin("logging the run to MLflow")
        formats = Formats(csv=csv, tensorboard=tensorboard, mlflow=mlflow, junit=junit)
        answer = flows.export(context(directory, output), run, formats)
        output.answer(answer, "\n".join((*answer.files, *logged_text(answer.mlflow))))


def logged_text(logged: LoggedRun | None) -> Iterator[str]:
    """Yield a run's page in MLflow, else its experiment and id; nothing if it was not logged."""
    if logged:
        where = logged.url or f"MLflow experiment {logged.experiment}, run {logged.run_id}"
        yield where if logged.is_new else f"{where} (already logged; tags updated)"


def comparison_text(compared: Comparison, width: int = 0) -> str:
    """Render groups of runs, what differs, figures, remarks and conclusion in ``width`` columns; 0 for all."""
    from labctl.runs.compare import described

    parts = [compared_runs(compared, width), differences(compared, width), figures(compared.columns)]
    for heading, words in described(compared):
        parts.append("\n".join((heading, *(wrapped(f"  {line}", width, 4) for line in words)) if heading else words))
    return "\n\n".join(filter(None, (*parts, compared.conclusion)))


def compared_runs(compared: Comparison, width: int) -> str:
    """Render a table of the runs with groups, verdicts and notes, which are cut at ``width`` columns, 0 for none."""
    runs = list(chain.from_iterable(group.runs for group in compared.groups))
    columns = {
        "GROUP": list(chain.from_iterable([group.name] * len(group.runs) for group in compared.groups)),
        "RUN": runs,
        "VERDICT": list(chain.from_iterable(group.outcomes for group in compared.groups)),
        "NOTE": [compared.notes.get(run_id, "") for run_id in runs],
    }
    return fitted(columns, width if compared.notes else 0)


def differences(compared: Comparison, width: int = 0) -> str:
    """Render what differs in a table with a column per group, cut to ``width``, 0 for all; or that nothing does."""
    if not compared.differences:
        return "nothing that was recorded differs"
    names = [group.name for group in compared.groups]
    room = LONGEST
    if width:
        first = max(len("DIFFERS"), *(len(difference.what) for difference in compared.differences))
        room = min(LONGEST, max(SHORTEST, (width - first) // len(names) - 2))
    rows = []
    for difference in compared.differences:
        values = (difference.values[name] or "-" for name in names)
        rows.append((difference.what, *(human.shortened(value, room) for value in values)))
    return table(("DIFFERS", *names), rows)


def figures(columns: Sequence[Group]) -> str:
    """Render each metric with a column per group or run; of a single one its spread. Empty without metrics."""
    if len(columns) == 1:
        return spread_table(columns[0].metrics)
    titles: dict[str, str] = {}
    for column in columns:
        titles |= {name: metric_title(name, metric) for name, metric in column.metrics.items()}
    rows = [(title, *(figure_of(column.metrics.get(name)) for column in columns)) for name, title in titles.items()]
    return table(("METRIC", *(column.name for column in columns)), rows) if rows else ""


def figure_of(metric: Spread | None) -> str:
    """Render a mean, its runs if several, and its change, as ``11.2, mean of 3 (-54.8 %)``; ``none`` for None."""
    if metric is None:
        return "none"
    mean = ", ".join(filter(None, (metric.figure, metric.basis)))
    return mean if metric.change is None else f"{mean} ({human.share(metric.change, '+')})"


def shortened(text: str) -> str:
    """Cut a text to LONGEST characters."""
    return human.shortened(text, LONGEST)
