"""workloads, run, runs, show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl import flows, launchers
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, answering, context, pairs, show
from labctl.cli.output import quantity, result_text, table
from labctl.config import settings
from labctl.errors import ConfigError
from labctl.runs import request, store
from labctl.workloads import external
from labctl.workloads.schema import parse_duration, parse_expectation


def complete_workload(incomplete: str) -> list[str]:
    """Names for the shell's completion."""
    try:
        roots = external.roots(settings.load(Path(), os.environ, {}))
        known, _ = external.list_all(Path("workloads"), launchers.known(), roots)
    except ConfigError:
        return []
    return [one.name for one in known if one.name.startswith(incomplete)]


def workloads_command(directory: Directory = HERE, json: Json = False) -> None:
    with answering(as_json=json) as output:
        roots = external.roots(context(directory, output).settings())
        known, errors = external.list_all(directory.resolve() / "workloads", launchers.known(), roots)
        for error in errors:
            output.error(error) if not json else None
        document = {
            "workloads": [
                {
                    "name": one.name,
                    "launcher": one.launcher,
                    "description": one.description,
                    "source": one.declared,
                    # Deprecated: description and source by their names of before.
                    "describe": one.description,
                    "declared": one.declared,
                }
                for one in known
            ],
            "errors": [error.message for error in errors],
        }
        rows = [(one.name, one.launcher, one.description) for one in known]
        show(output, document, lambda: table(("WORKLOAD", "LAUNCHER", "WHAT"), rows))
        if errors:
            sys.exit(ConfigError.exit_code)


def run_command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", autocompletion=complete_workload)],
    directory: Directory = HERE,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="The same path with a shrunk model and a few steps.")
    ] = False,
    timeout: Annotated[str | None, typer.Option(help="Time limit, e.g. 90s, 20m, 2h.")] = None,
    expect: Annotated[list[str] | None, typer.Option(help="A criterion, e.g. 'throughput>=600'.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Give the script --KEY VALUE; deepspeed.KEY is one of DeepSpeed's."
        ),
    ] = None,
    launcher: Annotated[
        str, typer.Option(metavar="NAME[:WAY]", help="Another launcher, e.g. mpirun or horovod:mpi.")
    ] = "",
    launcher_arg: Annotated[
        list[str] | None, typer.Option(metavar="WORD", help="One word for the launcher itself; repeat it.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="A script of your own, unmodified, in the workload's place.")
    ] = None,
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="DeepSpeed's configuration in the workload's place.")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Nodes and slots to use; all by default.")] = None,
    include: Annotated[str, typer.Option(metavar="NODES", help="Use only these, e.g. worker-0@worker-1:0,2.")] = "",
    exclude: Annotated[str, typer.Option(metavar="NODES", help="Use all but these.")] = "",
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again begins anew; `labctl down` removes the lab") as output:
        options = request.RunOptions(
            rehearse=rehearse,
            timeout=parse_duration(timeout) if timeout else None,
            expect=tuple(map(parse_expectation, expect or [])),
            arguments=tuple(pairs(set_ or [], "--set").items()),
            launcher=launcher,
            launcher_arguments=tuple(launcher_arg or ()),
            script=script,
            deepspeed_config=deepspeed_config,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            dry_run=dry_run,
        )
        ask = (lambda question: typer.confirm(question, err=True)) if sys.stdin.isatty() and not json else None
        document = flows.run(context(directory, output, setting), name, options, ask)
        show(
            output,
            document,
            lambda: "\n".join(document["plan"]) if dry_run else show_text(document, directory.resolve()),
        )
        sys.exit(document.get("exit_code", 0))


def runs_command(directory: Directory = HERE, json: Json = False) -> None:
    with answering(as_json=json) as output:
        found = store.listing(context(directory, output).directory)
        rows = [
            (
                run["run_id"],
                run["state"],
                run.get("verdict", "-"),
                run.get("cause") or "-",
                quantity(run.get("seconds", "-")),
            )
            for run in found
        ]
        show(output, {"runs": found}, lambda: table(("RUN", "STATE", "VERDICT", "CAUSE", "SECONDS"), rows))


def show_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or `latest`.")] = "latest",
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        lab = context(directory, output).directory
        known = store.listing(lab)
        if run == "latest" and not known:
            raise ConfigError(f"no run in {lab / 'runs'} yet", hint="labctl run opt-tiny")
        document = store.read(lab, known[0]["run_id"] if run == "latest" else run)
        show(output, document, lambda: show_text(document, lab))


def show_text(document: dict[str, Any], lab: Path) -> str:
    files = store.directory(lab, document["run_id"])
    if "verdict" not in document:
        return f"run   {document['run_id']}\nstate {document['state']}\nfiles {files}"
    return result_text(document, files)
