"""What all commands share: the options every command has, and errors turned into words and exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl.cli.output import Output
from labctl.config.context import Context
from labctl.errors import ConfigError, Interrupted, LabError, OutputClosed

Directory = Annotated[Path, typer.Option("--directory", "-C", help="The lab's directory, with its .env.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")]
Setting = Annotated[list[str] | None, typer.Option("--setting", "-s", metavar="KEY=VALUE", help="Override a setting.")]

HERE = Path()


def context(directory: Path, output: Output, overrides: list[str] | None = None) -> Context:
    """Where the command works. ConfigError in a directory that is not there, or was removed."""
    try:
        resolved = directory.resolve()
    except FileNotFoundError as error:
        raise ConfigError("this directory is not there any more", hint="cd to the lab's, or name it with -C") from error
    if not resolved.is_dir():
        raise ConfigError(f"{directory}: no such directory", hint="-C names the lab's directory; labctl init makes one")
    return Context(directory=resolved, environ=os.environ, emit=output.event, flags=pairs(overrides or [], "--setting"))


def named(directory: Path, output: Output, overrides: list[str] | None = None) -> tuple[Context, str]:
    """Where a command works that goes into a lab's nodes, and the lab's name.

    Without -C it is the nearest directory upwards that is a lab's, as the person may stand anywhere within.
    ConfigError where no lab is named.
    """
    from labctl.deploy.preflight import require_named

    where = context(directory, output, overrides)
    if directory == HERE:
        around = (where.directory, *where.directory.parents)
        where = replace(where, directory=next(filter(names_lab, around), where.directory))
    found = where.settings()
    require_named(where, found)
    return where, found.text("LAB_NAME")


def names_lab(directory: Path) -> bool:
    """Whether this directory's .env names a lab: code that lies within one may have a .env of its own."""
    try:
        text = (directory / ".env").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^\s*(export\s+)?LAB_NAME\s*=", text, re.MULTILINE) is not None


def pairs(words: list[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` words as a mapping."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{option} {word}: expected KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


@contextmanager
def answering(*, as_json: bool = False, stopped: str = "") -> Iterator[Output]:
    """Run a command: its failures become a message, a hint and the exit code that design promises.

    The hint after Ctrl-C, where there is something to be said, is what is true of a command that was ``stopped``.
    """
    output = Output(as_json=as_json)
    try:
        yield output
    except OutputClosed:
        sys.exit(OutputClosed.exit_code)
    except LabError as error:
        output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        output.error(Interrupted("stopped by Ctrl-C", hint=stopped))
        sys.exit(Interrupted.exit_code)


def show(output: Output, document: dict[str, Any], text: Callable[[], str]) -> None:
    """The answer; the text is only made when people read it."""
    output.answer(document, "" if output.as_json else text())
