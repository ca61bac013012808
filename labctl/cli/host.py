"""Commands init, setup, doctor and config."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.backends.finding import Receiver, ignore
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, Json, Setting, answering, confirmation, context
from labctl.cli.output import Output, cut, printable, say, table, width_of, wrapped
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.backends.docker.lab.devices import EffectiveSettings
    from labctl.backends.finding import Finding, Level
    from labctl.doctor.causes import Problem
    from labctl.doctor.report import DoctorReport

INDENT = 7
"""Blanks before the rest of a line that is broken: below the code of a finding."""


def init_command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Lab directory; created if missing.")] = HERE,
    json: Json = False,
) -> None:
    """`labctl init`: create a lab directory, or the files that an existing one lacks."""
    with answering(as_json=json) as output:
        lab = flows.init(directory.resolve())
        cd = "" if directory == HERE else f"cd {shlex.quote(str(directory))} && "
        done = (
            f"wrote {', '.join(lab.written)} in {lab.directory}"
            if lab.written
            else f"{lab.directory} is complete already"
        )
        output.answer(lab, f"{done}\nnext: {cd}labctl up")


def setup_command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, json: Json = False
) -> None:
    """`labctl setup`: install Docker on this host."""
    with answering(as_json=json) as output:
        result = flows.setup(output.note, confirmation(), yes=yes)
        output.answer(result, "this host can run a lab" + ("" if result.changed else " already"))


def doctor_command(
    directory: Directory = HERE,
    node: Annotated[
        str,
        typer.Option(
            "--node", "-n", metavar="NODE", autocompletion=complete.node, help="Check only this node and its host."
        ),
    ] = "",
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply fixes that only change labctl's own resources (asks first).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show checks that passed.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl doctor`: print the findings, with ``--fix`` after their fixes; exit with an error if one is an error."""
    with answering(as_json=json) as output:
        if yes and not fix:
            raise ConfigError("--yes is for the commands of --fix", hint="labctl doctor --fix --yes")
        ask = None if yes else asking()
        lab = context(directory, output, setting)
        if fix:
            report, live = flows.fix(lab, ask, node=node), False
        else:
            live = sys.stdout.isatty() and not json
            receive = live_rows(output, verbose=verbose) if live else ignore
            report = flows.doctor(lab, node=node, receive=receive)
        rows = () if live else shown(report.findings, verbose=verbose)
        output.answer(report, "\n".join(filter(None, (findings_table(rows), advice(report, width_of(sys.stdout))))))
        if any(finding.level == "error" for finding in report.findings):
            sys.exit(HostError.exit_code)


def asking() -> Callable[[str], bool]:
    """Return a function that asks yes or no on stderr, and raises HostError if stdin is no terminal."""

    def ask(question: str) -> bool:
        """Ask a yes/no question on stderr; HostError if stdin is no terminal."""
        if not sys.stdin.isatty():
            raise HostError("cannot prompt: not a terminal (use --yes)", hint="labctl doctor --fix --yes")
        return typer.confirm(question, err=True)

    return ask


def live_rows(output: Output, *, verbose: bool) -> Receiver:
    """Say that checks have begun; return a receiver that prints findings as checks end."""
    output.note("checking ...")

    def receive(findings: Sequence[Finding]) -> None:
        """Print a row per finding to show."""
        for finding in shown(findings, verbose=verbose):
            row = f"{finding.level:<5}  {finding.code:<14}  {finding.node:<8}  {finding.summary}"
            say(printable(wrapped(row, width_of(sys.stdout), INDENT)))

    return receive


def shown(findings: Sequence[Finding], *, verbose: bool) -> tuple[Finding, ...]:
    """Return the findings to show: all if ``verbose``, else those that are not ok."""
    return tuple(finding for finding in findings if verbose or finding.level != "ok")


def findings_table(findings: Sequence[Finding]) -> str:
    """Render a table of findings; empty without any."""
    rows = [(finding.level, finding.code, finding.node, finding.summary) for finding in findings]
    return table(("LEVEL", "CODE", "NODE", "SUMMARY"), rows) if rows else ""


def advice(report: DoctorReport, width: int = 0) -> str:
    """Render impact and fix of each problem, the cause before what follows from it, and how many checks passed.

    Impacts are broken at ``width``, 0 for none; fixes are not, so that they can be copied.
    """
    from labctl.doctor import causes

    problems = causes.problems(report.findings)
    lines = list(chain.from_iterable(problem_lines(problem, width) for problem in problems))
    lines += ["", *totals(report)] if lines else totals(report)
    if any(finding.auto_fixable for finding in chain.from_iterable(problem.findings for problem in problems)):
        lines.append("hint: `labctl doctor --fix` runs those fixes that only change labctl's own resources")
    return "\n".join(lines)


def problem_lines(problem: Problem, width: int) -> Iterator[str]:
    """Yield the lines of a problem: impacts with their nodes, the fix, and what follows from it."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for finding in problem.findings:
        nodes.setdefault((finding.code, finding.impact), []).append(finding.node)
    yield ""
    for (code, impact), names in nodes.items():
        yield wrapped(f"{code} {', '.join(dict.fromkeys(names))}: {impact}", width, INDENT)
    order = "first" if problem.consequences else "fix"
    yield f"  {'then' if problem.last else order}: {problem.fix}"
    if problem.consequences:
        followers = dict.fromkeys(f"{finding.code} {finding.node}" for finding in problem.consequences)
        yield f"  also fixes: {', '.join(followers)}"


def totals(report: DoctorReport) -> list[str]:
    """Return lines on how many checks passed and did not, and what comes next without a lab."""
    counted = Counter(finding.level for finding in report.findings)
    passed = f"{human.count(counted['ok'], 'check')} passed"
    kinds: tuple[tuple[Level, str], ...] = (("error", "error"), ("warn", "warning"))
    failed = [human.count(counted[level], name) for level, name in kinds if counted[level]]
    lines = [f"{passed}, {', '.join(failed)}" if failed else f"no problems found: {passed}"]
    if not report.lab:
        ready = "this machine is not ready for a lab" if counted["error"] else "this machine is ready for a lab"
        lines = [f"{ready}; {lines[0]}", "hint: labctl init mylab"]
    return lines


def config_command(
    directory: Directory = HERE,
    every: Annotated[bool, typer.Option("--all", "-a", help="Show settings at their defaults, too.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl config`: print the settings that are set or were decided, with their origin, or all of them."""
    with answering(as_json=json) as output:
        config = flows.config(context(directory, output, setting))
        output.answer(config, config_text(config, width_of(sys.stdout), every=every))


def config_text(config: EffectiveSettings, width: int = 0, *, every: bool = False) -> str:
    """Render the settings that differ from their defaults or were decided, or ``every`` one."""
    decided = {row.key: (row.value, f"decided: {row.reason}") for row in config.resolved}
    shown = [row for row in config.settings if every or row.origin != "default" or row.key in decided]
    rows = [(row.key, *decided.get(row.key, (row.value, row.origin))) for row in shown]
    settings = {row.key for row in config.settings}
    rows += [(row.key, row.value, row.reason) for row in config.resolved if row.key not in settings]
    text = cut(table(("KEY", "VALUE", "ORIGIN"), rows), width)
    hidden = len(config.settings) - len(shown)
    defaults = human.count(hidden, "setting")
    return f"{text}\n\nnot shown: {defaults} at the default; labctl config --all" if hidden else text
