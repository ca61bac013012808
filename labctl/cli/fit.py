"""fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl import fit, flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context, pairs, show
from labctl.cli.output import table
from labctl.cli.run import complete_workload
from labctl.config import settings
from labctl.errors import ConfigError, HostError
from labctl.fit.memory import PHASES, SYMBOLS
from labctl.runs import request


def fit_command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", autocompletion=complete_workload)],
    directory: Directory = HERE,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in `run`, also deepspeed.KEY.")
    ] = None,
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="DeepSpeed's configuration in the workload's place.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; the lab's by default.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks per node; the lab's by default.")] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device, e.g. 80g; on a CPU there are none.")
    ] = None,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json) as output:
        options = request.RunOptions(
            arguments=tuple(pairs(set_ or [], "--set").items()), deepspeed_config=deepspeed_config
        )
        document = flows.fit(
            context(directory, output, setting),
            name,
            options,
            nodes=nodes,
            slots=slots,
            device=size(device_memory) if device_memory else None,
        )
        show(output, document, lambda: text(document))
        sys.exit(HostError.exit_code if document["fits"] is False else 0)


def size(written: str) -> int:
    """Bytes of ``80g``."""
    try:
        settings.size(written)
    except ValueError as error:
        raise ConfigError(f"--device-memory {written}: {error.args[0]}", hint="write it like 80g") from None
    return settings.in_bytes(written)


def text(document: dict[str, Any]) -> str:
    """The table, its legend, and the verdict with what to type."""
    lines = document["lines"]
    phases = [phase for phase in PHASES if any(line[phase] for line in lines)]
    sources = list(dict.fromkeys(line["source"] for line in lines))
    rows = [
        (
            line["part"],
            *(short(line[phase]) for phase in phases),
            "host" if line["place"] == "host" else "",
            line["formula"],
            f"[{sources.index(line['source']) + 1}]",
        )
        for line in lines
    ]
    head = ("PER RANK, WHILE IN", *(phase.upper() for phase in phases), "ON", "FORMULA, BYTES", "SOURCE")
    missing = [f"{part}: not counted" for part in document["not_counted"]]
    legend = [f"[{number}] {source}" for number, source in enumerate(sources, 1)]
    return "\n".join(
        [*summary(document), "", table(head, rows), "", SYMBOLS, *legend, "", *missing, *verdict(document)]
    )


def summary(document: dict[str, Any]) -> list[str]:
    """What is trained, how, and on what."""
    training = document["training"]
    models = training["model"] + (f" with critic {training['critic']}" if training["critic"] else "")
    length = training["sequence_length"]
    how = [
        f"ZeRO stage {training['stage']}",
        "bf16 or fp16" if training["mixed"] else "fp32",
        f"micro-batch {training['micro_batch']}" + (f" x {length} tokens" if length else ""),
        *(["gradient checkpointing"] if training["gradient_checkpointing"] else []),
        *([f"LoRA {training['lora_dim']}"] if training["lora_dim"] else []),
        *(["optimiser offloaded"] if training["offload_optimizer"] else []),
        *(["weights offloaded"] if training["offload_parameters"] else []),
    ]
    return [
        f"{document['workload']}: {training['task']} of {models}, {training['parameters']:,} parameters, "
        f"{training['trained']:,} trained",
        ", ".join(how),
        f"{training['ranks']} ranks, {document['nodes']} nodes of {training['slots']}",
    ]


def verdict(document: dict[str, Any]) -> list[str]:
    """What is needed and there, whether it fits, and the nearest setting that does."""
    needs, available, advice = document["needs"], document["available"], document["advice"]
    on_cpu = document["training"]["accelerator"] == "cpu"
    said = [] if on_cpu else [against("per device", needs["device"], needs["device_phase"], available["device"])]
    said.append(against("per node" if on_cpu else "per host", needs["host"], needs["host_phase"], available["host"]))
    answer = {True: "it fits", False: "it does not fit", None: "nothing that is known stands against it"}
    on_top = "".join(f"; {part} come on top" for part in document["not_counted"])
    said.append(answer[document["fits"]] + on_top)
    if available["device"] is None and not on_cpu:
        said.append("the memory of a device is not known: --device-memory 80g gives it")
    if document["fits"] is False and not advice:
        said.append("no setting makes it fit on so many ranks: more nodes (--nodes), or a smaller model")
    if advice:
        after = advice["needs"]["host" if on_cpu else "device"]
        said.append(f"the nearest that does, with {fit.gib(after)}:")
        said += [f"  --set {change['set']}  ({change['why']})" for change in advice["changes"]]
    return said


def short(size: int) -> str:
    return "-" if not size else fit.gib(size) if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def against(what: str, needed: int, phase: str, there: int | None) -> str:
    known = "unknown" if there is None else fit.gib(there)
    return f"{what}: {fit.gib(needed)} in {phase}, available {known}"
