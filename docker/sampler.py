#!/usr/bin/env python3
"""Samples of a node about once a second, for as long as the input is open: started in each node of a run.

    sampler.py DIRECTORY BEGAN     write DIRECTORY/samples/NODE.csv; BEGAN: its second 0, in seconds since 1970

Standard library only, Python >= 3.8; NVIDIA's devices are read where pynvml is there. A cell is empty where a value
cannot be read. Where a sample takes more than a hundredth of the time of a core, the next one comes later.
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

# typing takes longer to import than most samples.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    # What is read at once, by column.
    Values = dict[str, float | None]
    Source = Callable[[], Values]

# Seconds from sample to sample, and the share of a core that they may take.
PERIOD, SHARE = 1.0, 0.01
# Seconds for the first answer of a vendor's tool, which says what devices there are; it may have to load the driver.
TOOL_LIMIT = 15
# Bytes above which a limit of memory is none: so cgroup 1 says that there is none.
UNLIMITED = 1 << 60
MIB = 1 << 20
PROC, SYS, DEV = Path("/proc"), Path("/sys"), Path("/dev")
INTEL = "0x8086"


class Total(float):
    """What only grows: the table has by how much in a second."""


def main(directory: str, began: str) -> None:
    sources = [host, *filter(None, (nvidia(), gaudi(), intel()))]
    folder = Path(directory, "samples")
    # The directory of a run that has ended meanwhile is another's.
    if over(0):
        return
    folder.mkdir(exist_ok=True)
    with (folder / f"{os.uname().nodename}.csv").open("wb", buffering=0) as out:
        for row in rows(sources, float(began)):
            out.write(",".join(map(str, row)).encode() + b"\n")


def over(seconds: float) -> bool:
    """Whether the input ends within so many seconds."""
    return bool(select.select([0], [], [], max(0, seconds))[0])


def rows(sources: Iterable[Source], began: float) -> Iterator[list[object]]:
    """The head, then a row for each sample; a sample that its time has passed by is counted in the next row."""
    zero = began - time.time() + time.monotonic()
    spent = cpu_seconds()
    due = then = time.monotonic()
    before = read(sources)
    yield ["seconds (s)", "lost samples (count)", *before]
    while True:
        spent, last = cpu_seconds(), spent
        due += max(PERIOD, (spent - last) / SHARE)
        if over(due - time.monotonic()):
            return
        now = time.monotonic()
        lost = int((now - due) / PERIOD)
        due += lost * PERIOD
        values = read(sources)
        cells = (cell(values.get(column), old, now - then) for column, old in before.items())
        yield [f"{now - zero:.3f}", lost, *cells]
        before, then = {column: values.get(column) for column in before}, now


def cpu_seconds() -> float:
    """Of this process and of the tools that it ran."""
    own, tools = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + tools.ru_utime + tools.ru_stime


def read(sources: Iterable[Source]) -> Values:
    return {column: value for source in sources for column, value in source().items()}


def cell(value: float | None, before: float | None, seconds: float) -> str:
    if isinstance(value, Total):
        # What starts anew, as a device that was reset, has no rate yet.
        value = None if before is None or value < before else (value - before) / seconds
    return "" if value is None else str(round(value, 3))


def text(path: Path) -> str:
    """The content of a file of the kernel's; empty where there is none."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def number(words: str) -> float | None:
    try:
        return float(words)
    except ValueError:
        return None


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def total(value: float | None, unit: float) -> Total | None:
    return None if value is None else Total(value / unit)


# --- host ----------------------------------------------------------------------------------------------------


def host() -> Values:
    """What the container uses of its machine."""
    groups = SYS / "fs/cgroup"
    of_cgroup = of_cgroup_2 if (groups / "cgroup.controllers").exists() else of_cgroup_1
    received, sent = network()
    return {
        **of_cgroup(groups),
        "network received (MiB/s)": total(received, MIB),
        "network sent (MiB/s)": total(sent, MIB),
    }


def of_cgroup_2(groups: Path) -> Values:
    # Where a container sees the groups of the whole machine, its own is one of them.
    own = groups / text(PROC / "self/cgroup").strip().rpartition("0::/")[2]
    group = own if (own / "memory.current").exists() else groups
    cpu, memory = fields(group / "cpu.stat"), fields(group / "memory.stat")
    # Some kernels name several disks in one line.
    lines = text(group / "io.stat").splitlines()
    disks = [dict(pair.split("=") for pair in line.split() if "=" in pair) for line in lines]
    there = (group / "io.stat").exists()
    return used(
        scaled(cpu.get("usage_usec"), 1e6),
        number(text(group / "memory.current")),
        memory.get("inactive_file"),
        number(text(group / "memory.max")),
        sum(int(disk.get("rbytes", 0)) for disk in disks) if there else None,
        sum(int(disk.get("wbytes", 0)) for disk in disks) if there else None,
    )


def of_cgroup_1(groups: Path) -> Values:
    disk = text(groups / "blkio/blkio.throttle.io_service_bytes_recursive")
    lines = [line.split() for line in disk.splitlines()]
    return used(
        scaled(number(text(groups / "cpuacct/cpuacct.usage")), 1e9),
        number(text(groups / "memory/memory.usage_in_bytes")),
        fields(groups / "memory/memory.stat").get("total_inactive_file"),
        number(text(groups / "memory/memory.limit_in_bytes")),
        sum(int(line[2]) for line in lines if line[1] == "Read") if disk else None,
        sum(int(line[2]) for line in lines if line[1] == "Write") if disk else None,
    )


def used(
    cpu: float | None,
    memory: float | None,
    cache: float | None,
    limit: float | None,
    read: float | None,
    written: float | None,
) -> Values:
    """``cache``: bytes of files that the kernel gives up first, which `docker stats` does not count either."""
    return {
        "CPU (cores)": total(cpu, 1),
        "memory (MiB)": None if memory is None else (memory - (cache or 0)) / MIB,
        **({"memory limit (MiB)": limit / MIB} if limit is not None and limit < UNLIMITED else {}),
        "disk read (MiB/s)": total(read, MIB),
        "disk written (MiB/s)": total(written, MIB),
    }


def fields(path: Path) -> dict[str, float]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in text(path).splitlines())
    return {name: float(value) for name, value in pairs}


def network() -> tuple[float | None, float | None]:
    """Bytes received and sent; on the network of a host those of its adapters, whatever bridges hand them on."""
    lines = (line.partition(":") for line in text(PROC / "net/dev").splitlines()[2:])
    counts = {name.strip(): numbers.split() for name, _, numbers in lines if name.strip() != "lo"}
    adapters = {name for name in counts if (SYS / "class/net" / name / "device").exists()} or set(counts)
    if not adapters:
        return None, None
    return sum(int(counts[name][0]) for name in adapters), sum(int(counts[name][8]) for name in adapters)


# --- devices -------------------------------------------------------------------------------------------------


def nvidia() -> Source | None:
    """NVIDIA's devices by their management library."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(one) for one in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    readings: dict[str, Callable[[Any], float]] = {
        "utilisation (%)": lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
        # As nvidia-smi has it: the first version counts what the driver keeps for itself as used.
        "memory (MiB)": lambda device: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used / MIB,
        "temperature (°C)": lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "power (W)": lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
        "SM clock (MHz)": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "uncorrected ECC errors (count)": lambda device: nvml.nvmlDeviceGetTotalEccErrors(
            device, uncorrected, since_boot
        ),
        # One that is idle has lower clocks, too.
        "throttle reasons (bit mask)": lambda device: (
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & ~nvml.nvmlClocksThrottleReasonGpuIdle
        ),
    }

    def known(reading: Callable[[Any], float], device: object) -> float | None:
        try:
            return reading(device)
        except nvml.NVMLError:
            return None

    return lambda: {
        f"device {at} {name}": known(reading, device)
        for at, device in enumerate(devices)
        for name, reading in readings.items()
    }


# Source: docs.habana.ai, "System Management Interface Tool (hl-smi)".
GAUDI = {
    "utilisation (%)": "utilization.aip",
    "memory (MiB)": "memory.used",
    "temperature (°C)": "temperature.aip",
    "power (W)": "power.draw",
    "SoC clock (MHz)": "clocks.current.soc",
    "uncorrected ECC errors (count)": "ecc.errors.uncorrected.volatile.total",
    "power violations (as hl-smi has them)": "stats.violation.power",
    "thermal violations (as hl-smi has them)": "stats.violation.thermal",
}


def gaudi() -> Source | None:
    """Gaudi's devices by its tool, which says what devices there are; after that no sample waits for it.

    It may take longer than a second, and one that its driver holds outlives SIGKILL: there is one at a time.
    """
    tool = ["hl-smi", "-Q", ",".join(["index", *GAUDI.values()]), "-f", "csv,noheader,nounits"]
    if not shutil.which(tool[0]):
        return None

    def ask() -> subprocess.Popen[str]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(tool, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True)

    asked = ask()
    try:
        asked.wait(TOOL_LIMIT)
    except subprocess.TimeoutExpired:
        return None

    def source() -> Values:
        nonlocal asked
        if asked.poll() is None:
            return {}
        said, asked = asked.communicate()[0], ask()
        devices = ([word.strip() for word in line.split(",")] for line in said.splitlines())
        return {
            f"device {index} {name}": number(word)
            for index, *words in devices
            if len(words) == len(GAUDI)
            # `strict` came with Python 3.10.
            for name, word in zip(GAUDI, words)  # noqa: B905
        }

    return source


def intel() -> Source | None:
    """Intel's GPUs by what the drivers i915 and xe have in sysfs."""
    nodes = sorted(DEV.glob("dri/renderD*"))
    devices = [SYS / "class/drm" / node.name / "device" for node in nodes]
    devices = [device for device in devices if text(device / "vendor").strip() == INTEL]
    # The first of each is that of the whole card, or of its first tile.
    found = {
        f"device {at} {name}": (next(itertools.chain(*(sorted(device.glob(one)) for one in patterns)), None), make)
        for at, device in enumerate(devices)
        for name, (patterns, make) in SYSFS.items()
    }
    if not devices:
        return None
    return lambda: {name: make(number(text(path))) if path else None for name, (path, make) in found.items()}


SYSFS: dict[str, tuple[tuple[str, ...], Callable[[float | None], float | None]]] = {
    "temperature (°C)": (("hwmon/hwmon*/temp*_input",), lambda value: scaled(value, 1e3)),
    "power (W)": (("hwmon/hwmon*/energy*_input",), lambda value: total(value, 1e6)),
    "GT clock (MHz)": (("drm/card*/gt/gt0/rps_act_freq_mhz", "tile0/gt0/freq0/act_freq"), lambda value: value),
    "throttled (0 or 1)": (
        ("drm/card*/gt/gt0/throttle_reason_status", "tile0/gt0/freq0/throttle/status"),
        lambda value: value,
    ),
}


if __name__ == "__main__":
    main(*sys.argv[1:])
