"""Sample Intel GPUs through sysfs, with the drivers i915 and xe."""

from __future__ import annotations

import sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

VENDOR = "0x8086"
# Patterns below a device's directory, of i915 and of xe. The first file that matches is of the card or its first tile.
FILES = {
    "temperature (°C)": ("hwmon/hwmon*/temp*_input",),
    "power (W)": ("hwmon/hwmon*/energy*_input",),
    "GT clock (MHz)": ("drm/card*/gt/gt0/rps_act_freq_mhz", "tile0/gt0/freq0/act_freq"),
    "throttled (0 or 1)": ("drm/card*/gt/gt0/throttle_reason_status", "tile0/gt0/freq0/throttle/status"),
}


def devices() -> sampler.Devices | None:
    """Return a function that reads index and values of all Intel GPUs in sysfs, or None if this node has none."""
    nodes = sorted(sampler.DEV.glob("dri/renderD*"))
    folders = [sampler.SYS / "class/drm" / node.name / "device" for node in nodes]
    cards = [files(folder) for folder in folders if sampler.text(folder / "vendor").strip() == VENDOR]
    return (lambda: enumerate(map(values, cards))) if cards else None


def files(folder: Path) -> dict[str, Path | None]:
    """Return column -> sysfs file of a GPU, or None for a column whose file its driver does not have."""
    return {name: first(folder, patterns) for name, patterns in FILES.items()}


def first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """Return the first file in the folder that matches a pattern, in the patterns' order, or None."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            return path
    return None


def values(card: dict[str, Path | None]) -> sampler.Values:
    """Return column -> value of a GPU, in °C and as total energy in J; None if the file is missing or unreadable."""
    raw = {name: sampler.number(sampler.text(path)) if path else None for name, path in card.items()}
    return {
        **raw,
        "temperature (°C)": sampler.scaled(raw["temperature (°C)"], 1e3),
        "power (W)": sampler.total(raw["power (W)"], 1e6),
    }
