"""Estimates a training's memory by component and compares it with what devices and hosts have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from labctl.fit import memory
from labctl.fit.memory import Location, MemoryItem, peak
from labctl.fit.training import Training, of
from labctl.system import human

__all__ = ["Capacity", "FitReport", "Training", "advise", "check", "fits", "needs", "of", "report"]

LORA_DIM = 8
"""Rank of the suggested LoRA adapters: the smallest that Hu et al. 2021, section 7.2, find sufficient."""


class Capacity(Struct, frozen=True, kw_only=True):
    """Bytes available, None if unknown. On a CPU there are no devices, and a host is a node."""

    device: int | None
    host: int | None


class Requirement(Struct, frozen=True, kw_only=True):
    """Bytes required per device and per host (per node on a CPU), and the phase with the peak of each."""

    device: int
    device_phase: str
    host: int
    host_phase: str


class Change(Struct, frozen=True, kw_only=True):
    """A setting to change: the text of ``--set``, and its cost."""

    set: str
    reason: str


class FitAdvice(Struct, frozen=True, kw_only=True):
    """The cheapest changes after which a training fits, and the memory that it requires then."""

    changes: tuple[Change, ...]
    required: Requirement


class FitReport(Struct, frozen=True, kw_only=True):
    """The memory of a training by component; ``fits`` is None if unknown."""

    workload: str
    nodes: int
    training: Mapping[str, Any]
    """Fields of ``Training``, with models by name and their total parameters."""
    items: tuple[MemoryItem, ...]
    excluded: tuple[str, ...]
    required: Requirement
    available: Capacity
    fits: bool | None
    advice: FitAdvice | None


def needs(training: Training) -> Requirement:
    """Return the peak memory of a training."""
    items = memory.lines(training)
    device, device_phase = peak(items, "device")
    in_host: tuple[Location, ...] = ("device", "host") if training.accelerator == "cpu" else ("host",)
    host, host_phase = peak(items, *in_host)
    return Requirement(device=device, device_phase=device_phase, host=host * training.slots, host_phase=host_phase)


def fits(training: Training, capacity: Capacity) -> bool | None:
    """Tell if a training fits; None if unknown, as for a model whose activations are not counted."""
    required = needs(training)
    pairs = [(required.host, capacity.host)]
    if training.accelerator != "cpu":
        pairs.append((required.device, capacity.device))
    if any(available is not None and size > available for size, available in pairs):
        return False
    unknown = training.model.counted or any(available is None and size for size, available in pairs)
    return None if unknown else True


def advise(training: Training, capacity: Capacity) -> FitAdvice | None:
    """Return the cheapest changes after which the training may fit; None if no changes suffice."""
    for _, changed in sorted(_candidates(training), key=lambda candidate: candidate[0]):
        if fits(changed, capacity) is not False:
            return FitAdvice(changes=tuple(_changes(training, changed)), required=needs(changed))
    return None


def check(training: Training, capacity: Capacity) -> str | None:
    """Explain why a run cannot fit on CPU nodes, with changes that help; None if it may fit."""
    if fits(training, capacity) is not False or capacity.host is None:
        return None
    advice = advise(training, capacity)
    hint = f"; it would with {' '.join(f'--set {change.set}' for change in advice.changes)}" if advice else ""
    required = needs(training)
    return (
        f"needs {human.memory(required.host)} per node while in {required.host_phase}, "
        f"{human.memory(capacity.host)} available "
        f"(ZeRO stage {training.stage} over {training.ranks} ranks; details: `labctl fit`){hint}"
    )


def report(workload: str, nodes: int, training: Training, capacity: Capacity) -> FitReport:
    """Estimate the memory of a training and compare it with the available memory."""
    fit = fits(training, capacity)
    summary = {name: value for name, value in asdict(training).items() if name not in ("model", "critic")}
    summary |= {
        "model": training.model.name,
        "critic": training.critic.name if training.critic else None,
    }
    summary["parameters"] = sum(model.parameters for model in training.models)
    summary["trained"] = sum(model.trained for model in training.models)
    return FitReport(
        workload=workload,
        nodes=nodes,
        training=summary,
        items=memory.lines(training),
        excluded=("activations",) if training.model.counted else (),
        required=needs(training),
        available=capacity,
        fits=fit,
        advice=advise(training, capacity) if fit is False else None,
    )


def _candidates(training: Training) -> Iterator[tuple[float, Training]]:
    """Yield every combination of changes with its cost, relative to the time of a step.

    Stage 3 sends 1.5 times as much (ZeRO, section 7), recomputation takes a third more time (Korthikanti et al.,
    table 2); offloading waits for the host; a smaller micro-batch uses the device less well; LoRA changes the result
    and so comes last.
    """
    stages = range(training.stage, 4)
    checkpointing = sorted({training.gradient_checkpointing, True})
    micros = [training.micro_batch >> halving for halving in range(training.micro_batch.bit_length())]
    offloads = [
        (training.offload_optimizer, training.offload_parameters),
        (True, training.offload_parameters),
        (True, True),
    ]
    adapters = sorted({training.lora_dim, training.lora_dim or LORA_DIM})
    for stage, recompute, (halvings, micro), (optimizer, parameters), lora in product(
        stages, checkpointing, enumerate(micros), dict.fromkeys(offloads), adapters
    ):
        if (optimizer and not stage) or (parameters and stage < 3):
            continue
        cost = 0.02 * (stage - training.stage) + 0.5 * (stage == 3 != training.stage) + 0.1 * halvings
        cost += 0.33 * (recompute != training.gradient_checkpointing) + 1.0 * (optimizer != training.offload_optimizer)
        cost += 2.0 * (parameters != training.offload_parameters) + 10.0 * (lora != training.lora_dim)
        changed = replace(
            training,
            stage=stage,
            gradient_checkpointing=recompute,
            micro_batch=micro,
            gradient_accumulation_steps=training.gradient_accumulation_steps * (training.micro_batch // micro),
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            lora_dim=lora,
        )
        yield cost, changed


def _changes(old: Training, new: Training) -> Iterator[Change]:
    """Yield the settings that turn the old training into the new one."""
    if new.stage != old.stage:
        reason = "1.5 times the communication" if new.stage == 3 else "no extra communication"
        yield Change(set=f"deepspeed.zero_optimization.stage={new.stage}", reason=reason)
    if new.gradient_checkpointing != old.gradient_checkpointing:
        yield Change(set="gradient-checkpointing=on", reason="a third more time")
    if new.micro_batch != old.micro_batch:
        yield Change(set=f"deepspeed.train_micro_batch_size_per_gpu={new.micro_batch}", reason="shorter products")
        steps = f"deepspeed.gradient_accumulation_steps={new.gradient_accumulation_steps}"
        yield Change(set=steps, reason="keeps the batch as large as it was")
    for key, attribute in {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}.items():
        if getattr(new, attribute) != getattr(old, attribute):
            setting = f"deepspeed.zero_optimization.{key}.device=cpu"
            yield Change(set=setting, reason="the host's memory, and waiting for it")
    if new.lora_dim != old.lora_dim:
        yield Change(set=f"lora-dim={new.lora_dim}", reason="trains adapters, not the weights")
