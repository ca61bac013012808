"""Readings of labctl's NVIDIA module and sampler on this machine, against nvidia-smi and NVML; kept as fixtures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labctl import accelerators
from labctl.accelerators import nvidia, vendor_tools
from labctl.accelerators.nvidia.readings import GPUS

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("vendor", "device", "class", "numa_node", "local_cpulist")
"""Files of a device below /sys that labctl reads."""


def measure(fixtures: Path, row: Callable[..., None]) -> None:
    """Pass labctl's readings and NVML's to ``row``, one by one; copy the files read to ``fixtures``."""
    import pynvml as nvml

    here = Path("/")
    devices = nvidia.find(here)
    _keep(fixtures, [device.pci for device in devices])
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    compare(row, "devices", len(devices), len(handles))
    compare(row, "driver", nvidia.driver(here), nvml.nvmlSystemGetDriverVersion())
    described = vendor_tools.describe("nvidia", devices)
    for device, handle in zip(described, handles, strict=False):
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        compare(row, "pci", device.pci, bus.lower()[-12:])
        compare(row, "uuid", device.uuid, nvml.nvmlDeviceGetUUID(handle))
        compare(row, "name", device.name, nvml.nvmlDeviceGetName(handle))
        compare(row, "memory (MiB)", (device.memory or 0) >> 20, nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20)
        compare(row, "health", device.health, "")
    _compare_sampler(fixtures, row, nvml, handles)


def compare(row: Callable[..., None], what: str, labctl: object, machine: object) -> None:
    """Pass labctl's and the machine's value to ``row``, with code 1 if they differ."""
    row(what=what, labctl=labctl, machine=machine, code=0 if labctl == machine else 1)


def _compare_sampler(fixtures: Path, row: Callable[..., None], nvml: Any, handles: list[Any]) -> None:
    """Write sampler.json, pass its and NVML's values to ``row``; compare only that idle cards are not throttled."""
    sys.path.append(str(ROOT / "docker"))
    import nvidia_sampler
    from sampler import columns

    devices = nvidia_sampler.devices()
    assert devices, "the sampler finds no NVML"
    # A card that another process has just left still runs at its high clocks.
    time.sleep(3)
    sampled = columns(devices)
    (fixtures / "sampler.json").write_text(json.dumps(sampled, indent=1, ensure_ascii=False), encoding="utf-8")
    for number, handle in enumerate(handles):
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        raw = {
            "temperature (°C)": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power (W)": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "SM clock (MHz)": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "throttle reasons (bit mask)": reasons,
        }
        for name, value in raw.items():
            row(what=name, labctl=sampled[f"device {number} {name}"], machine=value, code=0)
        compare(row, "idle is not throttled", sampled[f"device {number} throttle reasons (bit mask)"], 0)


def _keep(fixtures: Path, addresses: list[str]) -> None:
    """Copy the files that `nvidia.find` reads; write the names of device files and the output of nvidia-smi."""
    gpus = Path("/") / GPUS
    files = [Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"), *gpus.glob("*/information")]
    files += [Path(f"/sys/bus/pci/devices/{address}/{name}") for address in addresses for name in KEPT]
    for file in filter(Path.is_file, files):
        copy = fixtures / str(file).lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")
    fixtures.mkdir(parents=True, exist_ok=True)
    (fixtures / "dev.txt").write_text("\n".join(sorted(path.name for path in Path("/dev").glob("nvidia*"))) + "\n")
    tool = accelerators.get("nvidia").tool
    assert tool
    for name, argv in (("query", tool.argv), ("list", ("nvidia-smi", "-L")), ("whole", ("nvidia-smi",))):
        done = subprocess.run(argv, capture_output=True, text=True, check=False) if shutil.which(argv[0]) else None
        (fixtures / f"nvidia-smi-{name}.txt").write_text(done.stdout + done.stderr if done else "not found\n")
