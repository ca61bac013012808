"""init, setup, doctor, config."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context, show
from labctl.errors import HostError
from labctl.output import table


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


def doctor_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        findings = flows.doctor(context(directory, output, setting))
        rows = [(one.level, one.code, one.node, one.seen) for one in findings]
        advice = [f"\n{one.code} {one.node}: {one.why}\n  mend it: {one.fix}" for one in findings if one.level != "ok"]
        document = {"findings": [asdict(one) for one in findings]}
        show(output, document, lambda: table(("LEVEL", "CODE", "NODE", "SEEN"), rows) + "".join(advice))
        if any(one.level == "error" for one in findings):
            sys.exit(HostError.exit_code)


def config_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        rows, decided = flows.config(context(directory, output, setting))
        document = {
            "settings": [{"key": key, "value": value, "origin": origin} for key, value, origin in rows],
            "decided": [{"key": key, "value": value, "why": why} for key, value, why in decided],
        }
        show(output, document, lambda: table(("KEY", "VALUE", "FROM"), (*rows, *decided)))
