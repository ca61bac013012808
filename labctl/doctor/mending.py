"""``--fix``: run the mending commands that touch only what is labctl's own, one by one, and look again after each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labctl.config.context import Context
from labctl.doctor.finding import Finding
from labctl.errors import HostError
from labctl.system import filelock, process

Ask = Callable[[str], bool]
LONGEST = 900.0
"""Seconds for a command; the longest brings a large lab up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A mending command that was run, and its exit code."""

    command: str
    code: int


def mend(
    context: Context, look: Callable[[], tuple[Finding, ...]], ask: Ask | None
) -> tuple[tuple[Finding, ...], tuple[Attempt, ...]]:
    """Run what mends, asking before each unless ``ask`` is None; returns what is left, and what was run.

    HostError while a run is under way: its nodes would change.
    """
    require_no_run(context)
    attempts: list[Attempt] = []
    refused: set[str] = set()
    while True:
        findings = look()
        wrong = first_to_mend(findings, refused | {attempt.command for attempt in attempts})
        if wrong is None:
            return findings, tuple(attempts)
        context.notice(f"{wrong.code} {wrong.node}: {wrong.seen}")
        if ask is not None and not ask(f"run `{wrong.fix}`?"):
            refused.add(wrong.fix)
            continue
        # One may have begun while the person thought it over.
        require_no_run(context)
        context.notice(f"$ {wrong.fix}")
        attempts.append(Attempt(command=wrong.fix, code=run(context, wrong.fix)))


def require_no_run(context: Context) -> None:
    held = context.directory / filelock.RUN
    if filelock.is_held(held):
        seen = f"{filelock.holder(held)} is under way, and mending would change its nodes"
        raise HostError(seen, hint="wait for it, or stop it first")


def first_to_mend(findings: tuple[Finding, ...], tried: set[str]) -> Finding | None:
    """The first, errors before warnings, whose command may be run and was not tried yet."""
    wrong = (one for level in ("error", "warn") for one in findings if one.level == level)
    return next((one for one in wrong if one.runnable and one.fix not in tried), None)


def run(context: Context, command: str) -> int:
    """Run simple commands joined by ``&&``, in the lab's directory and with the flags in force; the exit code."""
    # The labctl that runs, whatever is on the person's PATH.
    path = f"{Path(sys.executable).parent}:{context.environ.get('PATH', '')}"
    for argv in simple_commands(command):
        done = process.stream(
            argv,
            context.line,
            env={**context.flags, "PATH": path},
            cwd=context.directory,
            timeout=LONGEST,
            check=False,
        )
        if done.code:
            context.warn(f"{shlex.join(argv)}: exit code {done.code}")
            return done.code
    return 0


def simple_commands(command: str) -> list[list[str]]:
    """``a b && c`` as argument lists."""
    found: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return found
