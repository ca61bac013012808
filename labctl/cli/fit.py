"""Command fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.output import table
from labctl.cli.run import SetArgument, complete_workload, options_of
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.fit import FitReport


def fit_command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", autocompletion=complete_workload)],
    directory: Directory = HERE,
    set_: SetArgument = None,
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this DeepSpeed configuration.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes (default: the lab's).")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks per node (default: the lab's).")] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device, such as 80g.")
    ] = None,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl fit`: estimate memory; exit with an error if it does not fit."""
    with answering(as_json=json) as output:
        options = options_of(set_=set_, deepspeed_config=deepspeed_config)
        lab = context(directory, output, setting)
        device = size(device_memory) if device_memory else None
        report = flows.fit(lab, name, options, nodes=nodes, slots=slots, device=device)
        output.answer(report, text(report))
        sys.exit(HostError.exit_code if report.fits is False else 0)


def size(written: str) -> int:
    """Parse a size such as ``80g`` into bytes. ConfigError if it is invalid."""
    from labctl.config import settings

    try:
        settings.size(written)
    except ValueError as error:
        raise ConfigError(f"--device-memory {written}: {error.args[0]}", hint="write it like 80g") from None
    return settings.in_bytes(written)


def text(report: FitReport) -> str:
    """Render the estimate as a table with its sources, and whether it fits."""
    from labctl.fit.memory import PHASES, SYMBOLS

    phases = [phase for phase in PHASES if is_used(report, phase)]
    sources = list(dict.fromkeys(item.source for item in report.items))
    rows = []
    for item in report.items:
        sizes = (human.memory(count) if count else "-" for count in map(item.during, phases))
        location = "host" if item.location == "host" else ""
        rows.append((item.component, *sizes, location, item.formula, f"[{sources.index(item.source) + 1}]"))
    head = ("COMPONENT, PER RANK", *map(str.upper, phases), "ON", "FORMULA, BYTES", "SOURCE")
    excluded = [f"{component}: not counted" for component in report.excluded]
    legend = [f"[{number}] {source}" for number, source in enumerate(sources, 1)]
    return "\n".join([*summary(report), "", table(head, rows), "", SYMBOLS, *legend, "", *excluded, *verdict(report)])


def is_used(report: FitReport, phase: str) -> bool:
    """Tell if any item takes memory in a phase."""
    return any(item.during(phase) for item in report.items)


def summary(report: FitReport) -> list[str]:
    """Render the training: model, settings and ranks."""
    training = report.training
    models = training["model"] + (f" with critic {training['critic']}" if training["critic"] else "")
    length = training["sequence_length"]
    how = [
        f"ZeRO stage {training['stage']}",
        "bf16 or fp16" if training["mixed_precision"] else "fp32",
        f"micro-batch {training['micro_batch']}" + (f" x {length} tokens" if length else ""),
        *(["gradient checkpointing"] if training["gradient_checkpointing"] else []),
        *([f"LoRA {training['lora_dim']}"] if training["lora_dim"] else []),
        *(["optimizer offloaded"] if training["offload_optimizer"] else []),
        *(["weights offloaded"] if training["offload_parameters"] else []),
    ]
    return [
        f"{report.workload}: {training['task']} of {models}, {training['parameters']:,} parameters, "
        f"{training['trained']:,} trained",
        ", ".join(how),
        f"{training['ranks']} ranks, {report.nodes} nodes of {training['slots']}",
    ]


def verdict(report: FitReport) -> list[str]:
    """Render required and available memory, whether it fits, and the cheapest settings that would fit."""
    required, available, advice = report.required, report.available, report.advice
    on_cpu = report.training["accelerator"] == "cpu"
    lines = [] if on_cpu else [compare("per device", required.device, required.device_phase, available.device)]
    lines.append(compare("per node" if on_cpu else "per host", required.host, required.host_phase, available.host))
    answer = {True: "fits", False: "does not fit", None: "unknown whether it fits"}
    lines.append(answer[report.fits] + "".join(f" ({component} not counted)" for component in report.excluded))
    if available.device is None and not on_cpu:
        lines.append("device memory unknown: set it with --device-memory 80g")
    if report.fits is False and not advice:
        lines.append("no settings make it fit on so many ranks: use more hosts or a smaller model")
    if advice:
        after = advice.required.host if on_cpu else advice.required.device
        lines.append(f"would fit, with {human.memory(after)}, after:")
        lines += [f"  --set {change.set}  ({change.reason})" for change in advice.changes]
    return lines


def compare(scope: str, required: int, phase: str, available: int | None) -> str:
    """Render required and available memory of a device, node or host."""
    limit = "unknown" if available is None else human.memory(available)
    return f"{scope}: {human.memory(required)} in {phase}, available {limit}"
