"""Health of Intel GPUs: sysfs and kernel lines of the drivers i915 and xe, and xpu-smi.

Sources: XPU-SMI's user guide, "Health" and "Discover the GPU devices"; the forms of its JSON in intel/xpumanager 1.3.7
(cli/src/core_stub) and 2.0 (ial/cmn/cmd_health.cpp).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from labctl.accelerators import hwmon
from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject
from labctl.system import pci
from labctl.system.hostdump import HostDump
from labctl.system.hostpath import HostPath
from labctl.system.procfs import read

VENDOR = "0x8086"
INTEGRATED = "0000:00:02.0"
"""PCI address of the GPU inside every Intel processor. Source: the processors' datasheets, device 2, function 0."""
MEMORY = ("tile*/physical_vram_size_bytes", "drm/card*/lmem_total_bytes")
"""Files with a GPU's memory size, of the driver xe and of i915."""
ERRORS = ("tile*/gt*/error_counter/*fatal*", "drm/card*/gt/gt*/error_counter/*fatal*")
"""Counters of fatal and nonfatal hardware errors, which Intel's data center drivers have.

Source: Intel's device plugins for Kubernetes, gpu_plugin, which read them.
"""
DUMP = "xpu-smi discovery --dump 1,2,5,9,11"
HEALTH = "xpu-smi health -l -j"

_CARDS = r"""
set --
for card in sys/class/drm/renderD[0-9]*/device; do
    [ -r "$card/vendor" ] && read -r vendor < "$card/vendor" && [ "$vendor" = 0x8086 ] || continue
    where=$(readlink -f "$card")
    where=${where#"$root"}
"""
SCRIPT = rf"""{_CARDS}
    printf 'link %s\n\t%s\n' "$card" "$where"
    link "$where/driver"
    for name in vendor device {" ".join((*MEMORY, *ERRORS))}; do set -- "$@" "$where"/$name; done
done
[ $# = 0 ] || lines "$@" sys/module/i915/version sys/module/xe/version
"""
# Sensors wake a sleeping card, which takes time.
SLOW = rf"""{_CARDS}
    set -- "$@" "$where"/{hwmon.FILES[0]} "$where"/{hwmon.FILES[1]}
done
[ $# -gt 0 ] || exit 0
lines "$@"
command -v xpu-smi > /dev/null || {{
    fact 'xpu-smi error' 'xpu-smi is not installed'
    exit 0
}}
printf 'fact xpu-smi discovery\n'
ask 20 {DUMP}
printf '%s\n' "$answer" | body
printf 'fact xpu-smi health\n'
ask 20 {HEALTH}
printf '%s\n' "$answer" | body
"""

COMPONENTS = {
    "core_temperature": "core temperature",
    "memory_temperature": "memory temperature",
    "power": "power",
    "memory": "memory health",
    "frequency": "frequency",
}
"""Reading of each component of xpu-smi's; version 2 has names such as ``power_health``."""
OK = "OK"


# --- readings ------------------------------------------------------------------------------------------------


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield what the drivers and xpu-smi report of a host's Intel GPUs; nothing of the processor's own."""
    cards = [(path.name, path / "device") for path in (dump.root / "sys/class/drm").glob("renderD[0-9]*")]
    gpus = [(name, device) for name, device in cards if is_card(device)]
    if not gpus:
        return
    yield Reading(name="Intel GPUs", value=len(gpus), kind="fact", source="ls /sys/class/drm")
    drivers = sorted({driver(dump.root, device) for _, device in gpus})
    yield Reading(name="Intel GPU driver", value=", ".join(drivers), kind="fact", source="/sys/module/*/version")
    for name, device in sorted(gpus, key=lambda gpu: int(gpu[0][7:])):
        item, kin = f"GPU {name}", f"Intel {read(device / 'device').strip()}"
        yield from of_driver(device, item, kin)
        yield from hwmon.readings(device, item, kin)
        yield from of_tool(dump.facts, pci.address_of(device), item, kin)


def is_card(device: HostPath) -> bool:
    """Tell if a device is an Intel GPU other than the processor's own, which has no memory of its own."""
    if read(device / "vendor").strip() != VENDOR:
        return False
    return pci.address_of(device) != INTEGRATED or memory(device) > 0


def memory(device: HostPath) -> int:
    """Return a GPU's memory of all tiles in bytes; 0 if its driver does not report it."""
    texts = (read(path).strip() for pattern in MEMORY for path in device.glob(pattern))
    return sum(int(text, 0) for text in texts if re.fullmatch(r"\d+|0x[0-9a-f]+", text))


def driver(root: HostPath, device: HostPath) -> str:
    """Return the driver's name, and its version if it has one of its own."""
    name = pci.driver(device)
    return f"{name} {read(root / f'sys/module/{name}/version').strip()}".strip()


def of_driver(device: HostPath, item: str, kin: str) -> Iterator[Reading]:
    """Yield address, model, memory and hardware errors of a GPU."""
    address, model = pci.address_of(device), read(device / "device").strip()
    yield Reading(name="PCI address", value=address, item=item, kind="fact", kin=kin, source=f"readlink {device}")
    yield Reading(name="model", value=model, item=item, kind="fact", kin=kin, source=f"{device}/device")
    if size := memory(device):
        mib = size >> 20
        yield Reading(name="device memory", value=mib, unit="MiB", item=item, kind="fact", kin=kin, source=str(device))
    texts = [read(path).strip() for pattern in ERRORS for path in device.glob(pattern)]
    counts = [int(text) for text in texts if text.isdecimal()]
    if counts:
        source = f"{device}/{ERRORS[0]}"
        yield Reading(name="hardware errors", value=sum(counts), item=item, kind="counter", kin=kin, source=source)


def of_tool(facts: Mapping[str, str], address: str, item: str, kin: str) -> Iterator[Reading]:
    """Yield what xpu-smi says of a GPU; unknown if it is missing or says nothing, nothing if it was not asked."""
    why = facts.get("xpu-smi error", "")
    if not why and "xpu-smi health" not in facts:
        return
    row = next((row for row in rows(facts.get("xpu-smi discovery", "")) if _address(row) == address), {})
    for column, value in row.items():
        name = {"Device Name": "product", "Serial Number": "serial"}.get(column, "")
        name = "device firmware" if column.endswith("Firmware Version") else name
        if name and value.casefold() not in ("", "unknown", "n/a"):
            yield Reading(name=name, value=value, item=item, kind="fact", kin=kin, source=DUMP)
    components = devices(facts.get("xpu-smi health", "")).get(row.get("Device ID", ""), {})
    for component, name in COMPONENTS.items():
        said = components.get(component) or components.get(f"{component}_health") or {}
        yield status(said, name, item, kin, why or "xpu-smi does not report it")


def status(said: Mapping[str, Any], name: str, item: str, kin: str, why: str) -> Reading:
    """Return the state of a component: ``OK``, or ``Warning: `` with the tool's description; None if unknown."""
    word, description = str(said.get("status", "Unknown")), str(said.get("description", ""))
    value = f"{word}: {description}" if description and word.casefold() != "ok" else word
    known = word.casefold() != "unknown"
    return Reading(
        name=f"{name} status",
        value=value if known else None,
        item=item,
        kin=kin,
        source=HEALTH,
        why=description or why,
    )


def rows(text: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of `xpu-smi discovery --dump` by its header's names."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("Device ID,")), len(lines))
    for row in csv.DictReader(lines[start:]):
        yield {name: value.strip() for name, value in row.items() if name and isinstance(value, str)}


def devices(text: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the components of each device id in the JSON of `xpu-smi health -l -j`; empty if it is none."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return {str(device["device_id"]): device for device in said.get("device_list", ())}


def _address(row: Mapping[str, str]) -> str:
    return pci.address(row.get("PCI BDF Address", ""))


# --- checks --------------------------------------------------------------------------------------------------


USUAL = ("power excursion", "frequency range", "sub block")
"""Parts of descriptions of throttling that a busy card, or a person's setting, causes."""


def judge_status(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a component as the tool does; not a frequency that only the power limit or a setting holds down."""
    word, _, description = str(reading.value).partition(": ")
    if word.casefold() == "ok" or any(part in description for part in USUAL):
        return None
    name = reading.name.removesuffix(" status")
    return Answer("bad" if word.casefold() == "critical" else "remark", f"{name} is {reading.value}")


PREFIX = r"(i915|xe) ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): "
WEDGED = (
    r"declared device [^ ]+ as wedged|device wedged, needs recovery|declaring it wedged|Failed to reset chip"
    r"|cancelling all in-flight rendering|Failed to initialise HW following reset|Survivability [Mm]ode"
)
"""Source: intel_reset.c and i915_gem.c of i915; xe_device.c and xe_survivability_mode.c of xe; drm_drv.c."""


def judge_wedged(match: re.Match[str]) -> Answer | None:
    """Judge a card that its driver has given up as bad."""
    if match[2] == INTEGRATED:
        return None
    return Answer("bad", f"has been given up by its driver: {match[3]}", match[2])


def judge_hardware(match: re.Match[str]) -> Answer | None:
    """Judge a hardware error that was not corrected as bad."""
    if match[2] == INTEGRATED:
        return None
    return Answer("bad", f"reports a hardware error: {match[4]}", match[2])


def judge_hang(match: re.Match[str]) -> Answer | None:
    """Judge a hang as a remark, since mostly the program's own code hung; the line names the program."""
    if match[2] == INTEGRATED:
        return None
    program = re.search(r" in (process )?([^ ]+) \[", match[3])
    user = f" while {program[2]} used it" if program else ""
    return Answer("remark", f"hung and was reset{user}", match[2])


REBIND = (
    "end the run that uses {item}",
    "restart the node",
    "if it comes back: update the card's firmware, or have it serviced",
)
COOLING = ("check fans, air flow and the room's temperature", "xpu-smi stats  # temperature of each card")
SERVICE = ("end the run that uses {item}", "xpu-smi health -l", "restart the node", "have the card serviced")

SUBJECT = Subject(
    name="Intel GPU",
    script=SCRIPT,
    slow=SLOW,
    readings=readings,
    checks=(
        Check(name="intel-count", reading="Intel GPUs", judge=rules.less_than_neighbours, steps=("lspci -d 8086:",)),
        Check(name="intel-driver", reading="Intel GPU driver", judge=rules.unlike_neighbours),
        Check(name="intel-firmware", reading="device firmware", judge=rules.unlike_neighbours),
        Check(name="intel-memory", reading="device memory", judge=rules.less_than_neighbours, steps=SERVICE),
        Check(name="intel-hardware-errors", reading="hardware errors", judge=rules.above, limit=0, steps=SERVICE),
        Check(
            name="intel-temperature", reading="margin to critical temperature", judge=hwmon.judge_margin, steps=COOLING
        ),
        *(
            Check(
                name=f"intel-{name.replace(' ', '-')}",
                reading=f"{name} status",
                judge=judge_status,
                steps=COOLING if "temperature" in name else SERVICE,
            )
            for name in COMPONENTS.values()
        ),
    ),
    lines=(
        LineCheck(name="intel-wedged", pattern=f"{PREFIX}.*({WEDGED})", judge=judge_wedged, steps=REBIND),
        LineCheck(
            name="intel-hardware-lines",
            pattern=PREFIX + r".*\[Hardware Error\]: (.* )?((NON)?FATAL)",
            judge=judge_hardware,
            steps=REBIND,
        ),
        LineCheck(
            name="intel-hang",
            pattern=PREFIX + r".*((GPU HANG|Timedout job): .*)",
            judge=judge_hang,
            steps=("look at the program first: dmesg | grep -E 'i915|xe 0000'",),
        ),
    ),
)
