"""Command fit."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, Workload, answering, context
from labctl.cli.output import table
from labctl.cli.run import SetArgument, options_of
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.fit import Change, FitAdvice, FitReport, Least, Requirement

UNKNOWN = {
    "activations": "activations not counted",
    "device": "memory of a device not known: --device-memory 80g",
    "host": "memory of a host not known: --host-memory 512g",
}
UNKNOWN_HOST = "; what a host has is not known (--host-memory 512g)"


def fit_command(
    name: Workload,
    directory: Directory = HERE,
    set_: SetArgument = None,
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this DeepSpeed configuration.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of nodes (default: the lab's).")] = None,
    slots: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks per node (default: the lab's).")] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device, such as 80g (default: the lab's).")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one host, such as 512g (default: the lab's).")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print each component with formula and source.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl fit`: tell if a workload fits in memory, and what makes it fit; exit with an error if it does not."""
    from labctl.runs.fitting import Hardware

    with answering(as_json=json) as output:
        options = options_of(set_=set_, deepspeed_config=deepspeed_config)
        lab = context(directory, output, setting)
        hardware = Hardware(
            nodes=nodes,
            slots=slots,
            device_memory=size("--device-memory", device_memory),
            host_memory=size("--host-memory", host_memory),
        )
        report = flows.fit(lab, name, options, hardware)
        output.answer(report, text(report, explain=explain))
        sys.exit(HostError.exit_code if report.fits is False else 0)


def size(option: str, written: str | None) -> int | None:
    """Parse an option's value, such as ``80g``, into bytes; None if it is not given. ConfigError if it is invalid."""
    from labctl.config import settings

    if written is None:
        return None
    try:
        settings.size(written)
    except ValueError as error:
        raise ConfigError(f"{option} {written}: {error.args[0]}", hint="write it like 80g") from None
    return settings.in_bytes(written)


def text(report: FitReport, *, explain: bool = False) -> str:
    """Render the answer, memory used, settings, advice and least hardware; with ``explain`` also each component."""
    lines = [headline(report), *usage(report, report.required, report.unknown), settings_line(report)]
    if report.advice:
        lines += ["", *advice_lines(report, report.advice)]
    if report.least:
        lines += ["", least_line(report, report.least)]
    return "\n".join([*lines, *(["", *explanation(report)] if explain else [])])


def on_cpu(report: FitReport) -> bool:
    """Tell if the lab's accelerator is the CPU."""
    return bool(report.training["accelerator"] == "cpu")


def hosts_of(report: FitReport, count: int, such: str = "") -> str:
    """Render the hardware of ``count`` hosts like the report's, as ``2 nodes`` or ``16 devices on 2 hosts``."""
    if on_cpu(report):
        return human.count(count, f"{such}node")
    devices = human.count(count * report.training["slots"], f"{such}device")
    return devices + (f" on {human.count(count, f'{such}host')}" if count > 1 else "")


def headline(report: FitReport) -> str:
    """Render in a line that a workload fits, does not, or why that is unknown, with the hardware."""
    name, place = report.workload, hosts_of(report, report.nodes)
    if report.fits is not None:
        return f"{name} {'fits' if report.fits else 'does not fit'} on {place}"
    if report.unknown == ("host",):
        return f"{name} fits on {place}, if the host has the memory"
    return f"{name}: unknown whether it fits on {place} ({human.listed(map(UNKNOWN.__getitem__, report.unknown))})"


def usage(report: FitReport, required: Requirement, unknown: Collection[str]) -> list[str]:
    """Render memory taken per device and per host, or per node on CPU, with the share of what is available."""
    available = report.available
    host = taken(required.host, available.host) + (UNKNOWN_HOST if "host" in unknown else "")
    if on_cpu(report):
        return [f"  per node    {host}"]
    return [f"  per device  {taken(required.device, available.device)}", f"  per host    {host}"]


def taken(required: int, available: int | None) -> str:
    """Render required memory, and its share of the available memory if that is known."""
    if not required:
        return "only what its processes take"
    if available is None:
        return human.memory(required)
    return f"{human.memory(required)} of {human.memory(available)} ({human.share(required / available)})"


def settings_line(report: FitReport) -> str:
    """Render ZeRO stage, precision, micro-batch and other settings that decide a training's memory."""
    training = report.training
    length = training["sequence_length"]
    how = (
        f"ZeRO stage {training['stage']}",
        "bf16 or fp16" if training["mixed_precision"] else "fp32",
        f"micro-batch {training['micro_batch']}" + (f" x {length} tokens" if length else ""),
        "gradient checkpointing" if training["gradient_checkpointing"] else "",
        f"LoRA {training['lora_dim']}" if training["lora_dim"] else "",
        "optimizer offloaded" if training["offload_optimizer"] else "",
        "parameters offloaded" if training["offload_parameters"] else "",
    )
    return f"  with        {', '.join(filter(None, how))}"


def advice_lines(report: FitReport, advice: FitAdvice) -> list[str]:
    """Render the changes after which a workload would fit, and the memory that it takes then."""
    doubt = f" ({UNKNOWN['activations']})" if "activations" in advice.unknown else ""
    changes = map(change_line, advice.changes)
    return [f"it would fit with{doubt}", *changes, *usage(report, advice.required, advice.unknown)]


def change_line(change: Change) -> str:
    """Render a change as `--set OPTION`, or in words if the workload has no option for it, with the reason."""
    return f"  {f'--set {change.set}' if change.set else f'in its script: {change.words}'}  ({change.reason})"


def least_line(report: FitReport, least: Least) -> str:
    """Render the hosts, or memory per host, with which it would fit; or that one device is always too small."""
    enough = [
        *([f"on {hosts_of(report, least.hosts, 'such ')}"] if least.hosts else []),
        *([f"with {human.memory(least.host)} per {'node' if on_cpu(report) else 'host'}"] if least.host else []),
    ]
    subject = "all weights would train" if report.advice else "no settings make it fit; it would"
    if not enough:
        return "no settings make it fit on any number of such devices: one is too small"
    return f"{subject} {', or '.join(enough)}"


def explanation(report: FitReport) -> list[str]:
    """Render the training, its peak phases, a table of components with formula and source, and exclusions."""
    from labctl.fit.memory import PHASES, SYMBOLS

    training, required = report.training, report.required
    models = training["model"] + (f" with critic {training['critic']}" if training["critic"] else "")
    phases = [phase for phase in PHASES if any(item.during(phase) for item in report.items)]
    sources = list(dict.fromkeys(item.source for item in report.items))
    rows = []
    for item in report.items:
        sizes = (human.memory(count) if count else "-" for count in map(item.during, phases))
        location = "host" if item.location == "host" else ""
        rows.append((item.component, *sizes, location, item.formula, f"[{sources.index(item.source) + 1}]"))
    head = ("COMPONENT, PER RANK", *map(str.upper, phases), "ON", "FORMULA, BYTES", "SOURCE")
    return [
        f"{training['task']} of {models}, {training['parameters']:,} parameters, {training['trained']:,} trained, "
        f"{human.count(training['ranks'], 'rank')}, {report.nodes} x {training['slots']}",
        f"peak of a device in {required.device_phase}, of a host in {required.host_phase}",
        "",
        table(head, rows),
        "",
        SYMBOLS,
        *(f"[{number}] {source}" for number, source in enumerate(sources, 1)),
        *(f"{component}: not counted" for component in report.excluded),
    ]
