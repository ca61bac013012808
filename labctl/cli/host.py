"""Commands init, setup, doctor and config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, confirmation, context
from labctl.cli.output import table
from labctl.errors import ConfigError, HostError

if TYPE_CHECKING:
    from labctl.backends.finding import Finding


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
    node: Annotated[str, typer.Option("--node", "-n", metavar="NODE", help="Check only this node and its host.")] = "",
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply fixes that only change labctl's own resources (asks first).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl doctor`: print the findings, with ``--fix`` after their fixes; exit with an error if one is an error."""
    with answering(as_json=json) as output:
        if yes and not fix:
            raise ConfigError("--yes is for the commands of --fix", hint="labctl doctor --fix --yes")
        ask = None if yes else asking()
        lab = context(directory, output, setting)
        report = flows.fix(lab, ask, node=node) if fix else flows.doctor(lab, node=node)
        output.answer(report, findings_text(report.findings))
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


def findings_text(findings: tuple[Finding, ...]) -> str:
    """Render a table of findings, impact and fix of each that is not ok, and a hint on --fix if it applies."""
    rows = [(finding.level, finding.code, finding.node, finding.summary) for finding in findings]
    wrong = [finding for finding in findings if finding.level != "ok"]
    advice = [f"\n{finding.code} {finding.node}: {finding.impact}\n  fix: {finding.fix}" for finding in wrong]
    if any(finding.auto_fixable for finding in wrong):
        advice.append("\n`labctl doctor --fix` runs those of these commands that only change labctl's own resources")
    return table(("LEVEL", "CODE", "NODE", "SUMMARY"), rows) + "".join(advice)


def config_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    """`labctl config`: print effective settings and their origin."""
    with answering(as_json=json) as output:
        config = flows.config(context(directory, output, setting))
        rows = [(row.key, row.value, row.origin) for row in config.settings]
        rows += [(row.key, row.value, row.reason) for row in config.resolved]
        output.answer(config, table(("KEY", "VALUE", "ORIGIN"), rows))
