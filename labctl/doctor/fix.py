"""``--fix``: run the fixes that change only labctl's own resources, one by one, and run all checks again after each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from labctl.backends.docker.deploy.preflight import runs_under_way
from labctl.backends.docker.lab.cluster import connect
from labctl.backends.finding import Finding
from labctl.config.context import Context
from labctl.doctor.report import AppliedFix
from labctl.errors import HostError
from labctl.system import process

LONGEST = 900.0
"""Seconds for a command; the longest brings a large lab up."""


def apply_fixes(
    context: Context, examine: Callable[[], tuple[Finding, ...]], ask: Callable[[str], bool] | None
) -> tuple[tuple[Finding, ...], tuple[AppliedFix, ...]]:
    """Run fixes, asking before each unless ``ask`` is None; returns the findings that are left, and what was run.

    HostError while a run is active: its nodes would change.
    """
    require_no_run(context)
    applied: list[AppliedFix] = []
    tried: set[str] = set()
    while True:
        findings = examine()
        problems = (one for level in ("error", "warn") for one in findings if one.level == level)
        finding = next((one for one in problems if one.auto_fixable and one.fix not in tried), None)
        if finding is None:
            return findings, tuple(applied)
        tried.add(finding.fix)
        context.notice(f"{finding.code} {finding.node}: {finding.summary}")
        if ask is not None and not ask(f"run `{finding.fix}`?"):
            continue
        require_no_run(context)  # One may have begun before the person answered.
        context.notice(f"$ {finding.fix}")
        applied.append(AppliedFix(command=finding.fix, code=run(context, finding.fix)))


def require_no_run(context: Context) -> None:
    settings = context.settings()
    with connect(context, settings, demand=False) as cluster:
        observed = cluster.engine.observe(settings.text("LAB_NAME"))
        if words := runs_under_way(context, cluster.engine, observed):
            message = f"{'; '.join(words)} is active, and fixes would change its nodes"
            raise HostError(message, hint="wait for it, or end it with `labctl stop`")


def run(context: Context, command: str) -> int:
    """Run simple commands joined by ``&&``, in the lab's directory and with the flags in force; the exit code."""
    # The labctl that runs, whatever is on the person's PATH.
    env = {**context.flags, "PATH": f"{Path(sys.executable).parent}:{context.environ.get('PATH', '')}"}
    for argv in simple_commands(command):
        done = process.stream(argv, context.line, env=env, cwd=context.directory, timeout=LONGEST, check=False)
        if done.code:
            context.warn(f"{shlex.join(argv)}: exit code {done.code}")
            return done.code
    return 0


def simple_commands(command: str) -> list[list[str]]:
    """``a b && c`` as argument lists."""
    groups = groupby(shlex.split(command), key="&&".__eq__)
    return [list(words) for is_and, words in groups if not is_and]
