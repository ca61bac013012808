"""Estimates a training's memory by component and compares it with what devices and hosts have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from labctl.fit import memory
from labctl.fit.advice import EVERY, Change, FitAdvice, Least, Options, advise, least
from labctl.fit.capacity import Capacity, Requirement, Unknown, fits, needs, unknown
from labctl.fit.memory import MemoryItem
from labctl.fit.training import Training, of
from labctl.system import human

__all__ = [
    "Capacity",
    "Change",
    "FitAdvice",
    "FitReport",
    "Least",
    "Options",
    "Requirement",
    "Training",
    "advise",
    "check",
    "fits",
    "least",
    "needs",
    "of",
    "report",
]


class FitReport(Struct, frozen=True, kw_only=True):
    """The memory of a training by component; ``fits`` is None if it depends on what is ``unknown``."""

    workload: str
    nodes: int
    training: Mapping[str, Any]
    """Fields of ``Training``, with models by name and their total parameters."""
    items: tuple[MemoryItem, ...]
    excluded: tuple[str, ...]
    required: Requirement
    available: Capacity
    fits: bool | None
    unknown: tuple[Unknown, ...]
    advice: FitAdvice | None
    """Settings after which it fits; None if it may fit as it is, or no settings suffice."""
    least: Least | None
    """Hardware on which it fits, if no settings suffice that train the same weights."""


def check(training: Training, capacity: Capacity, options: Options = EVERY) -> str | None:
    """Explain why a run cannot fit on CPU nodes, with changes that help; None if it may, or their memory is unknown."""
    if fits(training, capacity) is not False or capacity.host is None:
        return None
    advice = advise(training, capacity, options)
    required = needs(training)
    return (
        f"needs {human.memory(required.host)} per node while in {required.host_phase}, "
        f"{human.memory(capacity.host)} available "
        f"(ZeRO stage {training.stage} over {training.ranks} ranks; details: `labctl fit`){_hint(advice)}"
    )


def _hint(advice: FitAdvice | None) -> str:
    """Return "; it would with" and the changes of the advice as ``--set`` or words; empty without advice."""
    if advice is None:
        return ""
    changes = (f"--set {change.set}" if change.set else change.words for change in advice.changes)
    return f"; it would with {' '.join(changes)}"


def report(workload: str, nodes: int, training: Training, capacity: Capacity, options: Options = EVERY) -> FitReport:
    """Estimate a training's memory and compare it with the capacity; if it cannot fit, look for changes that help."""
    fit = fits(training, capacity)
    advice = advise(training, capacity, options) if fit is False else None
    trains_the_same = advice is not None and not advice.adapters
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
        unknown=unknown(training, capacity) if fit is None else (),
        advice=advice,
        least=least(training, capacity) if fit is False and not trains_the_same else None,
    )
