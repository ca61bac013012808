"""compare, report, export."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, answering, context
from labctl.cli.output import table
from labctl.cli.run import Run, spread_table

if TYPE_CHECKING:
    from labctl.runs.compare import Comparison

# Characters of a value that differs, in the text.
LONGEST = 60


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Run ids, or `latest`.")],
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        answer = flows.compare(context(directory, output), runs)
        output.answer(answer, comparison_text(answer))


def report_command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Run ids; or one metrics.csv of a training script.  [default: latest]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the report.  [default: reports/RUN]")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        answer = flows.report(context(directory, output), runs or ["latest"], out)
        output.answer(answer, "\n".join((f"report: {answer.page}", *(f"picture: {one}" for one in answer.pictures))))


def export_command(
    run: Run = "latest",
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write its metrics as an event file below this log directory.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write its verdict and criteria as JUnit XML.")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        answer = flows.export(context(directory, output), run, tensorboard=tensorboard, junit=junit)
        output.answer(answer, "\n".join(answer.files))


def comparison_text(compared: Comparison) -> str:
    """The groups, what differs between them and what it did; the spread where all runs are the same."""
    groups = table(
        ("GROUP", "RUN", "VERDICT"),
        [
            (group.name, run_id, verdict)
            for group in compared.groups
            for run_id, verdict in zip(group.runs, group.verdicts, strict=True)
        ],
    )
    if len(compared.groups) == 1:
        (group,) = compared.groups
        same = "nothing that was recorded differs: what their figures differ by is noise"
        return f"{groups}\n\n{same}\n\n{spread_table(group.metrics)}".rstrip()
    names = [group.name for group in compared.groups]
    rows = [(one.what, *(shortened(one.values[name] or "-") for name in names)) for one in compared.differences]
    return "\n\n".join((groups, table(("DIFFERS", *names), rows), *effects(compared)))


def effects(compared: Comparison) -> Iterator[str]:
    """What the differences did, between each two groups, and what the noise is known from."""
    from labctl.runs.compare import in_words, source_of_noise

    for pair, lines in groupby(compared.effects, lambda effect: (effect.group, effect.against)):
        yield "\n".join((" against ".join(pair), *(f"  {in_words(effect)}" for effect in lines)))
    if source := source_of_noise(compared):
        yield source


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
