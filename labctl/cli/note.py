"""Command note: add a note to a run, print or remove it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, RUN_HELP, Directory, Json, answering, context, not_an_option

if TYPE_CHECKING:
    from labctl.records.note import RunNote

OPTION = re.compile(r"--?[A-Za-z][\w-]*")


def not_misspelt(ctx: typer.Context, words: list[str] | None) -> list[str] | None:
    """Return the words of a note as they are given; a usage error if one is an unknown option."""
    for word in filter(OPTION.fullmatch, words or []):
        ctx.fail(f"No such option: {word}")
    return words


def note_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", callback=not_an_option, autocompletion=complete.run, help=RUN_HELP)
    ],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            callback=not_misspelt,
            help='Text of the note, at most 500 characters; "" removes it (default: print it).',
        ),
    ] = None,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl note`: keep a note on a run, in place of an earlier one; print it without a text."""
    with answering(as_json=json) as output:
        answer = flows.note(context(directory, output), run, " ".join(text) if text else None)
        output.answer(answer, changed_text(answer) if text else noted_text(answer))


def noted_text(noted: RunNote) -> str:
    """Render the note of a run, or that it has none."""
    return noted.note or f'run {noted.run_id} has no note\nhint: labctl note {noted.run_id} "TEXT"'


def changed_text(changed: RunNote) -> str:
    """Render what was done to the note of a run."""
    earlier = f"\nprevious note: {changed.replaced}" if changed.replaced else ""
    if changed.note:
        return f"run {changed.run_id}: {changed.note}{earlier}"
    return f"removed the note of run {changed.run_id}{earlier}" if earlier else f"run {changed.run_id} has no note"
