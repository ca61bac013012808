"""Commands compare, report and export."""

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
from labctl.system import human

if TYPE_CHECKING:
    from labctl.runs.compare import Comparison

LONGEST = 60
"""Characters of a value that the text shows."""


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Run ids, or `latest`.")],
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl compare`: print differences and effects between runs."""
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
    """`labctl report`: write an HTML report."""
    with answering(as_json=json) as output:
        answer = flows.report(context(directory, output), runs or ["latest"], out)
        output.answer(
            answer, "\n".join((f"report: {answer.page}", *(f"picture: {picture}" for picture in answer.pictures)))
        )


def export_command(
    run: Run = "latest",
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the metrics as an event file to this log directory.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdict and criteria as JUnit XML.")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl export`: write files for TensorBoard or a CI server."""
    with answering(as_json=json) as output:
        answer = flows.export(context(directory, output), run, tensorboard=tensorboard, junit=junit)
        output.answer(answer, "\n".join(answer.files))


def comparison_text(compared: Comparison) -> str:
    """Render groups of equal runs, their differences and effects; for a single group the spread of its metrics."""
    runs: list[tuple[str, str, str]] = []
    for group in compared.groups:
        runs += [(group.name, run_id, verdict) for run_id, verdict in zip(group.runs, group.verdicts, strict=True)]
    groups = table(("GROUP", "RUN", "VERDICT"), runs)
    if len(compared.groups) == 1:
        (group,) = compared.groups
        same = "nothing that was recorded differs: what their figures differ by is noise"
        return f"{groups}\n\n{same}\n\n{spread_table(group.metrics)}".rstrip()
    names = [group.name for group in compared.groups]
    rows = []
    for difference in compared.differences:
        values = (difference.values[name] or "-" for name in names)
        rows.append((difference.what, *map(shortened, values)))
    return "\n\n".join((groups, table(("DIFFERS", *names), rows), *effects(compared)))


def effects(compared: Comparison) -> Iterator[str]:
    """Yield the effect of the differences between each two groups, and the source of the noise estimate."""
    from labctl.runs.compare import in_words, source_of_noise

    for pair, lines in groupby(compared.effects, lambda effect: (effect.group, effect.against)):
        yield "\n".join((" against ".join(pair), *(f"  {in_words(effect)}" for effect in lines)))
    if source := source_of_noise(compared):
        yield source


def shortened(text: str) -> str:
    return human.shortened(text, LONGEST)
