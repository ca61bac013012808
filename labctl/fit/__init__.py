"""Estimates a training's memory by component and compares it with what devices and hosts have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from labctl.fit import memory
from labctl.fit.advice import Advice, Change, nearest
from labctl.fit.memory import Location, MemoryItem, peak
from labctl.fit.training import Training, of

__all__ = [
    "Capacity", "FitReport", "Requirement", "Training", "advise", "check", "fits", "gib", "needs", "of", "report",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bytes available, None if unknown. On a CPU there are no devices, and a host is a node."""

    device: int | None
    host: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Bytes required per device and per host (per node on a CPU), and the phase with the peak of each."""

    device: int
    device_phase: str
    host: int
    host_phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAdvice:
    """The cheapest changes after which a training fits, and what it requires then."""

    changes: tuple[Change, ...]
    required: Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The memory of a training by component, and whether it fits: None if that is unknown."""

    workload: str
    nodes: int
    training: Mapping[str, Any]
    """The fields of ``Training``, with models by name and their parameters in all."""
    items: tuple[MemoryItem, ...]
    excluded: tuple[str, ...]
    required: Requirement
    available: Capacity
    fits: bool | None
    advice: FitAdvice | None


def needs(training: Training) -> Requirement:
    """The peak memory of a training."""
    items = memory.lines(training)
    device, device_phase = peak(items, "device")
    in_host: tuple[Location, ...] = ("device", "host") if training.accelerator == "cpu" else ("host",)
    host, host_phase = peak(items, *in_host)
    return Requirement(device=device, device_phase=device_phase, host=host * training.slots, host_phase=host_phase)


def fits(training: Training, capacity: Capacity) -> bool | None:
    """Whether a training fits; None if unknown, as for a model whose activations are not counted."""
    required = needs(training)
    pairs = [(required.host, capacity.host)]
    if training.accelerator != "cpu":
        pairs.append((required.device, capacity.device))
    if any(available is not None and size > available for size, available in pairs):
        return False
    unknown = training.model.counted or any(available is None and size for size, available in pairs)
    return None if unknown else True


def advise(training: Training, capacity: Capacity) -> Advice | None:
    """The cheapest changes after which the training is not known to exceed the capacity."""
    return nearest(training, lambda changed: fits(changed, capacity) is not False)


def check(training: Training, capacity: Capacity) -> str | None:
    """Why a run cannot fit on CPU nodes, with what to change; None if it may fit."""
    if fits(training, capacity) is not False or capacity.host is None:
        return None
    advice = advise(training, capacity)
    hint = f"; it would with {' '.join(f'--set {change.set}' for change in advice.changes)}" if advice else ""
    required = needs(training)
    return (
        f"needs {gib(required.host)} per node while in {required.host_phase}, {gib(capacity.host)} available "
        f"(ZeRO stage {training.stage} over {training.ranks} ranks; details: `labctl fit`){hint}"
    )


def report(workload: str, nodes: int, training: Training, capacity: Capacity) -> FitReport:
    """Estimate the memory of a training on so many nodes and compare it with what is available."""
    fit = fits(training, capacity)
    advice = advise(training, capacity) if fit is False else None
    summary = {name: value for name, value in asdict(training).items() if name not in ("model", "critic")}
    return FitReport(
        workload=workload,
        nodes=nodes,
        training={
            **summary,
            "model": training.model.name,
            "critic": training.critic.name if training.critic else None,
            "parameters": sum(model.parameters for model in training.models),
            "trained": sum(model.trained for model in training.models),
        },
        items=memory.lines(training),
        excluded=("activations",) if training.model.counted else (),
        required=needs(training),
        available=capacity,
        fits=fit,
        advice=FitAdvice(changes=advice.changes, required=needs(advice.training)) if advice else None,
    )


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
