"""Will a training run fit in memory? Each part by its formula, against what the devices and hosts have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from labctl.fit import memory
from labctl.fit.advice import Advice, nearest
from labctl.fit.memory import Place, peak
from labctl.fit.training import Training, of

__all__ = ["Capacity", "Requirement", "Training", "advise", "check", "document", "fits", "gib", "needs", "of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bytes that there are; None where nobody knows. On a CPU there are no devices, and a host is a node."""

    device: int | None
    host: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Bytes that are needed per device and per host (per node on a CPU), and the phase that needs most of each."""

    device: int
    device_phase: str
    host: int
    host_phase: str


def needs(training: Training) -> Requirement:
    """What the lines come to in the phase that takes most."""
    lines = memory.lines(training)
    device, device_phase = peak(lines, "device")
    in_host: tuple[Place, ...] = ("device", "host") if training.accelerator == "cpu" else ("host",)
    host, host_phase = peak(lines, *in_host)
    return Requirement(device=device, device_phase=device_phase, host=host * training.slots, host_phase=host_phase)


def fits(training: Training, capacity: Capacity) -> bool | None:
    """Whether it fits; None where that cannot be told, as of a model whose activations are not counted."""
    needed = needs(training)
    pairs = [(needed.host, capacity.host)]
    if training.accelerator != "cpu":
        pairs.append((needed.device, capacity.device))
    if any(there is not None and wanted > there for wanted, there in pairs):
        return False
    unknown = training.model.counted or any(there is None and wanted for wanted, there in pairs)
    return None if unknown else True


def advise(training: Training, capacity: Capacity) -> Advice | None:
    """The cheapest change after which nothing that is known stands against it."""
    return nearest(training, lambda changed: fits(changed, capacity) is not False)


def check(training: Training, capacity: Capacity) -> str | None:
    """Why the run cannot fit on CPU nodes, with what to change; None where it may."""
    if fits(training, capacity) is not False or capacity.host is None:
        return None
    found = advise(training, capacity)
    change = " ".join(f"--set {one.set}" for one in found.changes) if found else ""
    hint = f"; it would with {change}" if change else ""
    needed = needs(training)
    return (
        f"needs {gib(needed.host)} per node while in {needed.host_phase}, {gib(capacity.host)} available "
        f"(ZeRO stage {training.stage} over {training.ranks} ranks; `labctl fit` shows the parts){hint}"
    )


def document(training: Training, capacity: Capacity) -> dict[str, Any]:
    """All that is known of it, for people and scripts; sizes in bytes."""
    lines, needed, verdict = memory.lines(training), needs(training), fits(training, capacity)
    found = advise(training, capacity) if verdict is False else None
    after = needs(found.training) if found else None
    return {
        "training": {
            **{key: value for key, value in asdict(training).items() if key not in ("model", "critic")},
            "model": training.model.name,
            "critic": training.critic.name if training.critic else None,
            "parameters": sum(model.parameters for model in training.models),
            "trained": sum(model.trained for model in training.models),
        },
        "lines": [asdict(line) for line in lines],
        "not_counted": ["activations"] if training.model.counted else [],
        "needs": asdict(needed),
        "available": asdict(capacity),
        "fits": verdict,
        "advice": found and {"changes": [asdict(change) for change in found.changes], "needs": after and asdict(after)},
    }


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
