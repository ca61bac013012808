"""init, setup, doctor, config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context, show
from labctl.cli.output import table
from labctl.errors import ConfigError, HostError

if TYPE_CHECKING:
    from labctl.doctor.examination import Finding


def init_command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where; made if it is not there.")] = HERE,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        target = directory.resolve()
        written = flows.init(target)
        document = {"directory": str(target), "written": list(written)}
        done = f"wrote {', '.join(written)} in {target}" if written else f"{target} has all of it already"
        show(
            output,
            document,
            lambda: f"{done}\nnext: {'' if directory == HERE else f'cd {shlex.quote(str(directory))} && '}labctl up",
        )


def setup_command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, json: Json = False
) -> None:
    with answering(as_json=json) as output:
        ask = (lambda question: typer.confirm(question, err=True)) if sys.stdin.isatty() else None
        done = flows.setup(output.note, ask, yes=yes)
        show(output, {"changed": done}, lambda: "this host can run a lab" + ("" if done else " already"))


def doctor_command(
    directory: Directory = HERE,
    node: Annotated[str, typer.Option("--node", "-n", metavar="NODE", help="Only this node and the host.")] = "",
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply fixes that only change labctl's own resources (asks first).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        if yes and not fix:
            raise ConfigError("--yes is for the commands of --fix", hint="labctl doctor --fix --yes")
        here = context(directory, output, setting)
        findings, applied = (
            flows.doctor_fix(here, None if yes else asking(), node=node) if fix else (flows.doctor(here, node=node), ())
        )
        document: dict[str, Any] = {"findings": [one.document() for one in findings]}
        if fix:
            # The first is the deprecated name of schema 1.
            document["mended"] = document["fixed"] = [asdict(one) for one in applied]
        show(output, document, lambda: findings_text(findings))
        if any(one.level == "error" for one in findings):
            sys.exit(HostError.exit_code)


def asking() -> Callable[[str], bool]:
    """Asks the person at the terminal; HostError where there is none and something to ask."""

    def ask(question: str) -> bool:
        if not sys.stdin.isatty():
            raise HostError("cannot prompt: not a terminal (use --yes)", hint="labctl doctor --fix --yes")
        return typer.confirm(question, err=True)

    return ask


def findings_text(findings: tuple[Finding, ...]) -> str:
    """A table of all findings, and how to fix the problems."""
    rows = [(one.level, one.code, one.node, one.summary) for one in findings]
    wrong = [one for one in findings if one.level != "ok"]
    advice = [f"\n{one.code} {one.node}: {one.impact}\n  fix: {one.fix}" for one in wrong]
    if any(one.auto_fixable for one in wrong):
        advice.append("\n`labctl doctor --fix` runs those of these commands that only change labctl's own resources")
    return table(("LEVEL", "CODE", "NODE", "SUMMARY"), rows) + "".join(advice)


def config_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        rows, decided = flows.config(context(directory, output, setting))
        document = {
            "settings": [{"key": key, "value": value, "origin": origin} for key, value, origin in rows],
            "decided": [{"key": key, "value": value, "why": why} for key, value, why in decided],
        }
        show(output, document, lambda: table(("KEY", "VALUE", "FROM"), (*rows, *decided)))
