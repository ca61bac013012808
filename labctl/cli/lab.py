"""render, build, up, status, down, clean."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl import flows, model
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, answering, context, show
from labctl.cli.output import Output, table
from labctl.errors import HostError


def render_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        lab, changed = flows.render_files(context(directory, output, setting))
        document = {"lab": lab.name, "nodes": [node.name for node in lab.nodes], "changed": list(changed)}
        show(
            output,
            document,
            lambda: f"{len(lab.nodes)} nodes in {lab.directory / '.lab/nodes'}, {len(changed)} files changed",
        )


def devcontainer_command(
    directory: Directory = HERE,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that a person changed.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        program = str(Path(sys.argv[0]).absolute())
        document = flows.devcontainer(context(directory, output, setting), program, force=force)
        show(
            output,
            document,
            lambda: f"{document['file']}: in VS Code, open {document['folder']} and reopen it in its container",
        )


def build_command(
    directory: Directory = HERE,
    workload: Annotated[str, typer.Option(metavar="NAME", help="The image that this workload needs.")] = "",
    update_lock: Annotated[bool, typer.Option("--update-lock", help="Resolve the pinned versions anew.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again goes on") as output:
        document = flows.build(context(directory, output, setting), workload=workload, update_lock=update_lock)
        show(output, document, lambda: "\n".join(f"{key:<8} {value}" for key, value in document.items()))


def up_command(
    directory: Directory = HERE,
    workload: Annotated[str, typer.Option(metavar="NAME", help="With the image that this workload needs.")] = "",
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again goes on; `labctl down` removes the lab") as output:
        document = flows.up(context(directory, output, setting), workload=workload, dry_run=dry_run)
        if dry_run:
            show(output, document, lambda: plan_text(document))
        else:
            show_status(output, document)


def status_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        document = flows.status(context(directory, output, setting))
        show_status(output, document)


def down_command(
    directory: Directory = HERE,
    images: Annotated[
        bool,
        typer.Option("--images", help="The hosts of LAB_HOSTS lose the lab's image too, where nothing else uses it."),
    ] = False,
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again does the rest") as output:
        document = flows.down(context(directory, output, setting), images=images, dry_run=dry_run)
        show(output, document, lambda: plan_text(document) if dry_run else f"lab {document['lab']} is down")


def clean_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json, stopped="the same command again does the rest") as output:
        document = flows.clean(context(directory, output, setting))
        show(
            output,
            document,
            lambda: f"lab {document['lab']} is down, its keys and rendered files are gone; runs/ stays",
        )


def plan_text(document: dict[str, Any]) -> str:
    return "\n".join(document["plan"])


def show_status(output: Output, document: dict[str, Any]) -> None:
    """The answer; it ends with the code of a host that failed where one does not answer, as not all of it was seen."""
    show(output, document, lambda: status_text(document))
    if document["unreachable"]:
        sys.exit(HostError.exit_code)


def status_text(document: dict[str, Any]) -> str:
    elsewhere = any(node["host"] != model.HERE for node in document["nodes"])
    rows = [
        (
            *((node["name"], node["host"]) if elsewhere else (node["name"],)),
            *(node["role"], node["state"], health_word(node["health"]), node["slots"] or "-"),
        )
        for node in document["nodes"]
    ]
    columns = ("NODE", *(("HOST",) if elsewhere else ()), "ROLE", "STATE", "HEALTH", "SLOTS")
    nodes = table(columns, rows) if rows else "no containers"
    seen = (node for node in document["nodes"] if node["state"] != "unreachable")
    reasons = "".join(f"\n{node['name']}: {node['reason']}" for node in seen if node["reason"])
    unreachable = "".join(f"\n{one['message']}\n  hint: {one['hint']}" for one in document["unreachable"])
    return f"lab {document['lab']}: {document['state']}\n{nodes}{reasons}{unreachable}"


def health_word(health: str | None) -> str:
    """What calls for somebody stands out."""
    return health.upper() if health == "unhealthy" else health or "-"
