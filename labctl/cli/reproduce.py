"""Commands freeze, verify and replay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, DryRun, Json, Run, answer_plan, answering, context
from labctl.cli.output import table
from labctl.cli.results import shortened
from labctl.cli.run import run_text

if TYPE_CHECKING:
    from labctl.runs.freeze import Verification

LOCK = "lab.lock"
DRIFTED = 5
"""Exit code if the lab differs from its lock file."""


def freeze_command(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write (default: lab.lock of the lab).")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl freeze`: write the facts of the lab to its lock file."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        output.begin("reading images, packages, files, data and devices of the lab")
        answer = flows.freeze(lab, out or lab.directory / LOCK)
        text = f"wrote {answer.lock}" if answer.changed else f"{answer.lock} is unchanged"
        output.answer(answer, f"{text}: {answer.facts} facts")


def verify_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Lock file (default: lab.lock of the lab).")
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl verify`: compare the lab with its lock file; exit with 5 if it differs."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        output.begin("comparing images, packages, files, data and devices of the lab")
        answer = flows.verify(lab, file or lab.directory / LOCK)
        output.answer(answer, verification_text(answer))
        if answer.drift:
            sys.exit(DRIFTED)


def replay_command(
    run: Run = "latest", directory: Directory = HERE, dry_run: DryRun = False, json: Json = False
) -> None:
    """`labctl replay`: repeat a recorded run and exit with the code of its result, or print the plan."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        output.begin("comparing image, code, settings and data with the record")
        if dry_run:
            answer_plan(output, flows.plan_replay(lab, run))
            return
        answer = flows.replay(lab, run)
        output.answer(
            answer, f"{run_text(answer, lab.directory)}\nnext: labctl compare {answer.replays} {answer.run_id}"
        )
        sys.exit(answer.exit_code)


def verification_text(verification: Verification) -> str:
    """Render what differs from the lock file as a table, or a line if nothing does."""
    if not verification.drift:
        return f"the lab is as frozen in {verification.lock}: {verification.facts} facts"
    rows = [
        (drift.what, drift.where, shortened(drift.was or "-"), shortened(drift.now or "-"))
        for drift in verification.drift
    ]
    return table(("WHAT", "WHERE", "WAS", "IS"), rows)
