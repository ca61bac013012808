"""``--fix``: run fixes that change only labctl's own resources, one by one, with all checks after each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from itertools import chain, groupby
from pathlib import Path

from labctl.backends import Backend
from labctl.backends.finding import Finding
from labctl.config.context import Context
from labctl.doctor import causes
from labctl.doctor.report import AppliedFix, DoctorReport
from labctl.system import process

LONGEST = 900.0
"""Time limit of a command in seconds: `labctl up` of a large lab is the longest."""


def apply(backend: Backend, ask: Callable[[str], bool] | None, *, node: str = "") -> DoctorReport:
    """Run each fix once, asking first unless ``ask`` is None; report what is left and was run. HostError during a run.

    HostError while a run is active: its nodes would change.
    """
    context = backend.context
    backend.require_idle()
    applied: list[AppliedFix] = []
    tried: set[str] = set()
    while True:
        findings = backend.findings(node)
        finding = next_fix(findings, tried)
        if finding is None:
            return DoctorReport(findings, tuple(applied), backend.settings.text("LAB_NAME"))
        tried.add(finding.fix)
        context.notice(f"{finding.code} {finding.node}: {finding.summary}")
        if ask is not None and not ask(f"run `{finding.fix}`?"):
            continue
        backend.require_idle()  # One may have begun before the person answered.
        context.notice(f"$ {finding.fix}")
        applied.append(AppliedFix(command=finding.fix, code=run(context, finding.fix)))


def next_fix(findings: tuple[Finding, ...], tried: set[str]) -> Finding | None:
    """Return the first finding, causes and errors first, with a fix that may be run and was not tried; else None."""
    mendable = chain.from_iterable(problem.findings for problem in causes.problems(findings))
    return next((finding for finding in mendable if finding.auto_fixable and finding.fix not in tried), None)


def run(context: Context, command: str) -> int:
    """Run ``&&``-joined commands in the lab directory with this command's flags; return the first failing code or 0."""
    # This labctl, whichever is first on PATH.
    env = {**context.flags, "PATH": f"{Path(sys.executable).parent}:{context.environ.get('PATH', '')}"}
    for argv in simple_commands(command):
        done = process.stream(argv, context.line, env=env, cwd=context.directory, timeout=LONGEST, check=False)
        if done.code:
            context.warn(f"{shlex.join(argv)}: exit code {done.code}")
            return done.code
    return 0


def simple_commands(command: str) -> list[list[str]]:
    """Split ``a b && c`` into argument lists."""
    groups = groupby(shlex.split(command), key="&&".__eq__)
    return [list(group) for is_and, group in groups if not is_and]
