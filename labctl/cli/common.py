"""Shared by all commands: common options, the context, and errors as messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl.cli import complete
from labctl.cli.output import Output
from labctl.config.context import Context, find_lab
from labctl.errors import ConfigError, Interrupted, LabError, OutputClosed, OutputFailed

if TYPE_CHECKING:
    from labctl.backends.plan import PlanPreview


def not_an_option(ctx: typer.Context, runs: str | list[str] | None) -> str | list[str] | None:
    """Return runs as they are given; a usage error if one is an unknown option, as only ``-1`` and so on are runs."""
    for run in [runs] if isinstance(runs, str) else runs or []:
        if run.startswith("-") and not run[1:].isdigit():
            ctx.fail(f"No such option: {run}")
    return runs


Directory = Annotated[
    Path,
    typer.Option(
        "--directory",
        "-C",
        metavar="DIR",
        show_default=False,
        help="Lab directory (default: the current directory or its nearest parent with a lab).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show a progress bar instead of the output of the run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan without executing it.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        "-s",
        metavar="KEY=VALUE",
        autocompletion=complete.setting,
        help="Override a setting (repeatable).",
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        metavar="NAME[:WAY]",
        autocompletion=complete.launcher,
        help="Use this launcher, such as mpirun or horovod:mpi.",
    ),
]
Workload = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", autocompletion=complete.workload, help="Name, as in `labctl workloads`."),
]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Time limit, such as 90s, 20m or 2h.")]
RUN_HELP = "Run id, 4 or more characters that begin or end it, or begin its last part; `latest`; -1, -2 to count back."
Run = Annotated[str, typer.Argument(metavar="RUN", callback=not_an_option, autocompletion=complete.run, help=RUN_HELP)]

HERE = Path()


def context(directory: Path, output: Output, overrides: list[str] | None = None, *, create: bool = False) -> Context:
    """Return the context of -C's directory, or of the nearest lab. ConfigError if missing, unless ``create``."""
    try:
        resolved = directory.resolve()
    except FileNotFoundError as error:
        hint = "cd to the lab directory, or name it with -C"
        raise ConfigError("the current directory no longer exists", hint=hint) from error
    if not resolved.is_dir() and not create:
        raise ConfigError(f"{directory}: no such directory", hint="-C names the lab directory; labctl init creates one")
    if directory != HERE:
        output.directory = str(directory)
    elif not create:
        resolved = find_lab(resolved, os.environ)
    return Context(directory=resolved, environ=os.environ, emit=output.event, flags=pairs(overrides or [], "--setting"))


def pairs(arguments: list[str], option: str) -> dict[str, str]:
    """Parse ``KEY=VALUE`` arguments into a mapping. ConfigError if one has no ``=``."""
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"{option} {argument}: expected KEY=VALUE")
    return dict(argument.split("=", 1) for argument in arguments)


@contextmanager
def answering(
    *, as_json: bool = False, stopped: str = "", quiet: bool = False, only_shows: bool = False
) -> Iterator[Output]:
    """Yield the output of a command; print a LabError or Ctrl-C with its hint, and exit with its code.

    ``stopped`` is the hint after Ctrl-C; ``quiet`` and ``only_shows`` as in ``Output``.
    """
    output = Output(as_json=as_json, quiet=quiet, only_shows=only_shows)
    try:
        yield output
    except OutputClosed:
        sys.exit(OutputClosed.exit_code)
    except OutputFailed:
        # An error as JSON would go where nothing can be written.
        raise
    except LabError as error:
        output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        output.error(Interrupted("stopped by Ctrl-C", hint=stopped))
        sys.exit(Interrupted.exit_code)


def answer_plan(output: Output, preview: PlanPreview) -> None:
    """Print the plan of a dry run, a line per entry, or as JSON."""
    output.answer(preview, "\n".join(preview.plan))


def confirmation(as_json: bool = False) -> Callable[[str], bool] | None:
    """Return a function that asks yes or no on stderr; None if stdin is no terminal or with --json."""
    return (lambda question: typer.confirm(question, err=True)) if sys.stdin.isatty() and not as_json else None
