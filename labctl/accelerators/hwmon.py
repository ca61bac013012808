"""Temperatures of a device's sensors, with the thresholds that its driver reports.

Source: Documentation/hwmon/sysfs-interface.rst of the kernel: temp<N>_input and temp<N>_crit in thousandths of a
degree Celsius.
"""

from __future__ import annotations

from collections.abc import Iterator

from labctl.health.model import Answer, Evidence, Reading
from labctl.system.hostpath import HostPath
from labctl.system.procfs import read

FILES = ("hwmon/hwmon*/temp*_input", "hwmon/hwmon*/temp*_crit")
"""Patterns of files below a device's folder in sysfs."""
_HIGHEST = 300.0
"""Temperature in °C above which a value is a misreading: Gaudis have been seen to report 505712272."""


def readings(device: HostPath, item: str, kin: str) -> Iterator[Reading]:
    """Yield the highest temperature of a device, and the least distance of a sensor to its critical temperature."""
    source = f"{device}/{FILES[0]}"
    sensors = tuple(_sensors(device))
    if not sensors:
        return
    highest = max(value for value, _ in sensors)
    yield Reading(name="device temperature", value=highest, unit="°C", item=item, kin=kin, source=source)
    margins = [critical - value for value, critical in sensors if critical]
    if margins:
        yield Reading(
            name="margin to critical temperature", value=min(margins), unit="°C", item=item, kin=kin, source=source
        )


def judge_margin(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a sensor at its own critical temperature, or above, as bad."""
    if not isinstance(reading.value, (int, float)) or reading.value > 0:
        return None
    above = f"{-reading.value:g} °C above" if reading.value else "at"
    return Answer("bad", f"temperature of a sensor is {above} its critical threshold")


def _sensors(device: HostPath) -> Iterator[tuple[float, float | None]]:
    """Yield temperature and critical temperature of each sensor that reports one; None without a threshold."""
    for folder in sorted(device.glob("hwmon/hwmon*")):
        for path in sorted(folder.glob("temp*_input")):
            value = _celsius(path)
            if value is not None:
                yield value, _celsius(folder / path.name.replace("_input", "_crit"))


def _celsius(path: HostPath) -> float | None:
    """Return a temperature; None if the file cannot be read, or its value cannot be true."""
    text = read(path).strip()
    value = int(text) / 1000 if text.isdecimal() else None
    return value if value is not None and 0 < value < _HIGHEST else None
