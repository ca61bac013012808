"""Command cache."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from labctl import flows
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, Workload, answering, context
from labctl.cli.output import failure_lines, table
from labctl.errors import ConfigError, HostError
from labctl.model import Cache
from labctl.system.human import size

if TYPE_CHECKING:
    from labctl.hub.report import CacheReport, HostCache


def cache_command(
    name: Workload = "",
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="A model, such as facebook/opt-350m (repeatable).")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="DATASET", help="A dataset, such as Dahoas/rm-static (repeatable).")
    ] = None,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Copy what is named, or the whole cache, from this machine to all hosts of LAB_HOSTS.",
        ),
    ] = False,
    directory: Directory = HERE,
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """`labctl cache`: download models and datasets, with ``--hosts`` copy them; exit with an error if a host failed."""
    with answering(as_json=json, stopped="re-run to resume") as output:
        if not (name or model or dataset or hosts):
            hint = "labctl cache WORKLOAD, labctl cache --model NAME or --dataset NAME; --hosts sends all to the hosts"
            raise ConfigError("neither a workload nor a model or dataset is named", hint=hint)
        asked = context(directory, output, setting)
        output.begin("looking for what is in the cache")
        # huggingface_hub reads these from the process environment only; proxies may come from .env.
        os.environ.update(flows.proxies(replace(asked, emit=lambda _: None)))
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        extra = Cache(models=tuple(model or ()), datasets=tuple(dataset or ()))
        report = flows.cache(asked, name, extra, hosts=hosts, dry_run=dry_run)
        output.answer(report, cache_text(report, dry_run=dry_run))
        if report.failed:
            sys.exit(HostError.exit_code)


def cache_text(report: CacheReport, *, dry_run: bool = False) -> str:
    """Render the downloads, files sent (or to send) to each host, and failed hosts; or that nothing is declared."""
    if report.workload and not report.items:
        return f"workload {report.workload} declares nothing to fetch (`cache` in its workload.yml)"
    lines = []
    if report.items:
        rows = [
            (item.kind, item.name, item.revision[:8] or "-", size(item.bytes) if item.revision else "-", item.state)
            for item in report.items
        ]
        lines += [table(("KIND", "NAME", "REVISION", "SIZE", "STATE"), rows), f"in {report.cache}"]
    if report.hosts:
        sent = [(host.host, host.files, size(host.bytes), state_of(host, dry_run=dry_run)) for host in report.hosts]
        lines.append(table(("HOST", "FILES", "SIZE", "STATE"), sent))
    coming = sum(item.bytes for item in report.items if item.state == "to fetch")
    if report.hosts and coming:
        lines.append(f"and to each the {size(coming)} to fetch, as far as it does not have that")
    return "\n".join((*lines, *failure_lines(report.failed)))


def state_of(host: HostCache, *, dry_run: bool) -> str:
    """Return ``present`` if a host lacked no file, else ``sent``, or ``to send`` in a dry run."""
    if not host.files:
        return "present"
    return "to send" if dry_run else "sent"
