#!/usr/bin/env python3
"""Samples of a node about once a second, for as long as the input is open: started in each node of a run.

    sampler.py DIRECTORY BEGAN     write DIRECTORY/samples/NODE.csv; BEGAN: its second 0, in seconds since 1970

Standard library only, Python >= 3.8. A cell is empty where a value cannot be read. Where a sample takes more than a
hundredth of the time of a core, the next one comes later.

Devices are read by the files ``NAME_sampler.py`` beside this one, one for each accelerator: ``devices()`` returns a
function that reads the index and the values of each device, or None if the node has none of these devices.
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
import select
import sys
import time
from pathlib import Path

# typing takes longer to import than most samples.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    # What is read at once, by column.
    Values = dict[str, float | None]
    Source = Callable[[], Values]
    # The index of each device, and what is read of it.
    Devices = Callable[[], Iterable[tuple[object, Values]]]

# Seconds from sample to sample, and the share of a core that they may take.
PERIOD, SHARE = 1.0, 0.01
# Bytes above which a limit of memory is none: so cgroup 1 says that there is none.
UNLIMITED = 1 << 60
MIB = 1 << 20
PROC, SYS, DEV = Path("/proc"), Path("/sys"), Path("/dev")


class Total(float):
    """What only grows: the table has by how much in a second."""


def main(directory: str, began: str) -> None:
    sources = [host, *accelerators()]
    folder = Path(directory, "samples")
    # The directory of a run that has ended meanwhile is another's.
    if over(0):
        return
    folder.mkdir(exist_ok=True)
    with (folder / f"{os.uname().nodename}.csv").open("wb", buffering=0) as out:
        for row in rows(sources, float(began)):
            out.write(",".join(map(str, row)).encode() + b"\n")


def accelerators() -> Iterator[Source]:
    """The devices of each accelerator that this node has some of."""
    folder = Path(__file__).parent
    sys.path.append(str(folder))
    # Their files import this module, which runs under another name.
    sys.modules["sampler"] = sys.modules[__name__]
    for path in sorted(folder.glob("*_sampler.py")):
        devices: Devices | None = importlib.import_module(path.stem).devices()
        if devices:
            yield functools.partial(columns, devices)


def columns(devices: Devices) -> Values:
    values: Values = {}
    for index, readings in devices():
        values.update({f"device {index} {name}": value for name, value in readings.items()})
    return values


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


if __name__ == "__main__":
    main(*sys.argv[1:])
