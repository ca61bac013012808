"""cache."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, answering, context, show
from labctl.cli.output import table
from labctl.cli.run import complete_workload
from labctl.lab.spec import proxies
from labctl.system.progress import amount


def cache_command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", autocompletion=complete_workload)],
    directory: Directory = HERE,
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again goes on") as output:
        asked = context(directory, output, setting)
        # The hub's library takes these from the process's environment alone; the proxies may come from .env.
        known = replace(asked, emit=lambda _: None).settings()
        os.environ.update({key: value.reveal() for key, value in proxies(known)})
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        document = flows.cache(asked, name, dry_run=dry_run)
        show(output, document, lambda: cache_text(document))


def cache_text(document: dict[str, Any]) -> str:
    if not document["items"]:
        return f"workload {document['workload']} declares nothing to fetch (`cache` in its workload.yml)"
    rows = [
        (one["kind"], one["name"], one["revision"][:8], amount(one["bytes"]), one["state"]) for one in document["items"]
    ]
    shown = table(("KIND", "NAME", "REVISION", "SIZE", "STATE"), rows)
    return f"{shown}\nin {document['cache']}"
