"""Memory that a training requires, and whether devices and hosts have it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from labctl.fit import memory
from labctl.fit.memory import Location, peak
from labctl.fit.training import Training

Unknown = Literal["activations", "device", "host"]


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


def needs(training: Training) -> Requirement:
    """Return the peak memory of a training on a device and on a host, each with its phase."""
    items = memory.lines(training)
    device, device_phase = peak(items, "device")
    in_host: tuple[Location, ...] = ("device", "host") if training.accelerator == "cpu" else ("host",)
    host, host_phase = peak(items, *in_host)
    return Requirement(device=device, device_phase=device_phase, host=host * training.slots, host_phase=host_phase)


def fits(training: Training, capacity: Capacity) -> bool | None:
    """Return False if a training needs more than is available, None if that depends on what is unknown, else True."""
    required = needs(training)
    pairs = [(required.host, capacity.host)]
    if training.accelerator != "cpu":
        pairs.append((required.device, capacity.device))
    if any(available is not None and size > available for size, available in pairs):
        return False
    return None if unknown(training, capacity) else True


def unknown(training: Training, capacity: Capacity) -> tuple[Unknown, ...]:
    """Name the unknown quantities that decide whether a training fits.

    A host of unknown memory is assumed to have as much as its devices together, so that a smaller need decides nothing.
    """
    required, on_cpu = needs(training), training.accelerator == "cpu"
    assumed = 0 if on_cpu else (capacity.device or required.device) * training.slots
    decisive: dict[Unknown, bool] = {
        "activations": training.model.counted > 0,
        "device": capacity.device is None and not on_cpu,
        "host": capacity.host is None and required.host > assumed,
    }
    return tuple(name for name, decides in decisive.items() if decides)
