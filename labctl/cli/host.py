"""init, setup, doctor, config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, confirmation, context
from labctl.cli.output import table
from labctl.doctor import Finding
from labctl.errors import ConfigError, HostError


def init_command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Lab directory; created if missing.")] = HERE,
    json: Json = False,
) -> None:
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
    with answering(as_json=json) as output:
        result = flows.setup(output.note, confirmation(), yes=yes)
        output.answer(result, "this host can run a lab" + ("" if result.changed else " already"))


def doctor_command(
    directory: Directory = HERE,
    node: Annotated[str, typer.Option("--node", "-n", metavar="NODE", help="Only this node and the host.")] = "",
    fix: Annotated[
        bool, typer.Option("--fix", help="Run what mends and touches only labctl's own; asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        if yes and not fix:
            raise ConfigError("--yes is for the commands of --fix", hint="labctl doctor --fix --yes")
        here = context(directory, output, setting)
        findings, attempts = (
            flows.mend(here, None if yes else asking(), node=node) if fix else (flows.doctor(here, node=node), ())
        )
        document: dict[str, Any] = {"findings": [asdict(one) for one in findings]}
        if fix:
            document["mended"] = [asdict(one) for one in attempts]
        output.answer(document, findings_text(findings))
        if any(one.level == "error" for one in findings):
            sys.exit(HostError.exit_code)


def asking() -> Callable[[str], bool]:
    """Asks the person at the terminal; HostError where there is none and something to ask."""

    def ask(question: str) -> bool:
        if not sys.stdin.isatty():
            raise HostError("nobody is here to ask whether the commands may be run", hint="labctl doctor --fix --yes")
        return typer.confirm(question, err=True)

    return ask


def findings_text(findings: tuple[Finding, ...]) -> str:
    """What was looked at, and what mends what is wrong."""
    rows = [(one.level, one.code, one.node, one.seen) for one in findings]
    wrong = [one for one in findings if one.level != "ok"]
    advice = [f"\n{one.code} {one.node}: {one.why}\n  mend it: {one.fix}" for one in wrong]
    if any(one.runnable for one in wrong):
        advice.append("\n`labctl doctor --fix` runs those of these commands that touch only labctl's own")
    return table(("LEVEL", "CODE", "NODE", "SEEN"), rows) + "".join(advice)


def config_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        config = flows.config(context(directory, output, setting))
        rows = [(row.key, row.value, row.origin) for row in config.settings]
        rows += [(row.key, row.value, row.reason) for row in config.resolved]
        output.answer(config, table(("KEY", "VALUE", "ORIGIN"), rows))
