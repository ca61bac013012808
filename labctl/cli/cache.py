"""cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from labctl import flows
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, answering, context
from labctl.cli.output import table
from labctl.cli.run import complete_workload
from labctl.errors import ConfigError
from labctl.model import Cache
from labctl.system.progress import amount

if TYPE_CHECKING:
    from labctl.hub.prefetch import CacheReport


def cache_command(
    name: Annotated[str, typer.Argument(metavar="[WORKLOAD]", autocompletion=complete_workload)] = "",
    model: Annotated[list[str] | None, typer.Option(help="A model, such as facebook/opt-350m (repeatable).")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="A dataset, such as Dahoas/rm-static (repeatable).")] = None,
    directory: Directory = HERE,
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="re-run to resume") as output:
        if not (name or model or dataset):
            hint = "labctl cache WORKLOAD, labctl cache --model NAME or --dataset NAME"
            raise ConfigError("neither a workload nor a model or dataset is named", hint=hint)
        asked = context(directory, output, setting)
        # huggingface_hub reads these from the process environment only; proxies may come from .env.
        os.environ.update(flows.proxies(replace(asked, emit=lambda _: None)))
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        extra = Cache(models=tuple(model or ()), datasets=tuple(dataset or ()))
        report = flows.cache(asked, name, extra, dry_run=dry_run)
        output.answer(report, cache_text(report))


def cache_text(report: CacheReport) -> str:
    if not report.items:
        return f"workload {report.workload} declares nothing to fetch (`cache` in its workload.yml)"
    rows = [(item.kind, item.name, item.revision[:8], amount(item.bytes), item.state) for item in report.items]
    return f"{table(('KIND', 'NAME', 'REVISION', 'SIZE', 'STATE'), rows)}\nin {report.cache}"
