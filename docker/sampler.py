#!/usr/bin/env python3
"""Sample a node about once a second until stdin closes; runs on each node of a run.

    sampler.py DIRECTORY BEGAN NODE     write DIRECTORY/samples/NODE.csv; BEGAN: its second 0, in seconds since 1970

Standard library only, Python >= 3.8. A cell is empty if its value cannot be read. If a sample takes more than a
hundredth of a core's time, the next sample is delayed.

Each accelerator has a file ``NAME_sampler.py`` beside this one, which reads its devices: ``devices()`` returns a
function that reads the index and the values of each device, or None if the node has none of these devices.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import resource
import select
import sys
import time
from pathlib import Path

# typing takes longer to import than most samples.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    # Column -> value of a sample.
    Values = dict[str, float | None]
    Source = Callable[[], Values]
    # Index and values of each device.
    Devices = Callable[[], Iterable[tuple[object, Values]]]

# Seconds between samples, and the share of a core that sampling may take.
PERIOD, SHARE = 1.0, 0.01
# Bytes from which a memory limit means none: cgroup 1 has a huge number for no limit.
UNLIMITED = 1 << 60
MIB = 1 << 20
PROC, SYS, DEV = Path("/proc"), Path("/sys"), Path("/dev")


class Total(float):
    """A counter that only grows; its column has the increase per second."""


def main(directory: str, began: str, node: str) -> None:
    """Write samples until stdin closes."""
    sys.path.append(str(Path(__file__).parent))
    sources: list[Source] = [host, Ranks(), *accelerators()]
    folder = Path(directory, "samples")
    # A run that has ended may have lost its directory.
    if stdin_closes(0):
        return
    folder.mkdir(exist_ok=True)
    with (folder / f"{node}.csv").open("wb", buffering=0) as out:
        for row in rows(sources, float(began)):
            out.write(",".join(map(str, row)).encode() + b"\n")


def accelerators() -> Iterator[Source]:
    """Yield a source for each kind of accelerator on this node."""
    folder = Path(__file__).parent
    # The samplers import this module, which runs as __main__.
    sys.modules["sampler"] = sys.modules[__name__]
    for path in sorted(folder.glob("*_sampler.py")):
        devices: Devices | None = importlib.import_module(path.stem).devices()
        if devices:
            yield functools.partial(columns, devices)


def columns(devices: Devices) -> Values:
    """Return the values of all devices, in columns `device INDEX NAME`."""
    values: Values = {}
    for index, readings in devices():
        values.update({f"device {index} {name}": value for name, value in readings.items()})
    return values


def stdin_closes(seconds: float) -> bool:
    """Wait until stdin closes or the seconds pass; return True if it closes."""
    return bool(select.select([0], [], [], max(0, seconds))[0])


def rows(sources: Iterable[Source], began: float) -> Iterator[list[object]]:
    """Yield the header, then a row per sample until stdin closes; a row counts the samples missed before it."""
    zero = began - time.time() + time.monotonic()
    spent = cpu_seconds()
    due = then = time.monotonic()
    before = read(sources)
    yield ["seconds (s)", "lost samples (count)", *before]
    while True:
        spent, last = cpu_seconds(), spent
        due += max(PERIOD, (spent - last) / SHARE)
        if stdin_closes(due - time.monotonic()):
            return
        now = time.monotonic()
        lost = int((now - due) / PERIOD)
        due += lost * PERIOD
        values = read(sources)
        cells = (cell(values.get(column), old, now - then) for column, old in before.items())
        yield [f"{now - zero:.3f}", lost, *cells]
        before, then = {column: values.get(column) for column in before}, now


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the tools that it ran."""
    sampler, tools = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sampler.ru_utime + sampler.ru_stime + tools.ru_utime + tools.ru_stime


def read(sources: Iterable[Source]) -> Values:
    """Return column -> value of all sources."""
    values: Values = {}
    for source in sources:
        values.update(source())
    return values


def cell(value: float | None, before: float | None, seconds: float) -> str:
    """Return a value as text, empty for None; of a counter, its increase per second, empty after a reset."""
    if isinstance(value, Total):
        # A counter that was reset, as with its device, has no rate yet.
        value = None if before is None or value < before else (value - before) / seconds
    return "" if value is None else str(round(value, 3))


def text(path: Path) -> str:
    """Return the content of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def number(content: str) -> float | None:
    """Return the number in a text, or None if it is not a number."""
    try:
        return float(content)
    except ValueError:
        return None


def scaled(value: float | None, unit: float) -> float | None:
    """Return the value divided by the unit, or None if it is None."""
    return None if value is None else value / unit


def total(value: float | None, unit: float) -> Total | None:
    """Return the value divided by the unit, as a counter; None if it is None."""
    return None if value is None else Total(value / unit)


# --- host ----------------------------------------------------------------------------------------------------


def host() -> Values:
    """Return CPU, memory, disk and network usage of this container."""
    groups = SYS / "fs/cgroup"
    read_cgroup = read_cgroup_2 if (groups / "cgroup.controllers").exists() else read_cgroup_1
    received, sent = network()
    return {
        **read_cgroup(groups),
        "network received (MiB/s)": total(received, MIB),
        "network sent (MiB/s)": total(sent, MIB),
    }


def read_cgroup_2(groups: Path) -> Values:
    """Return CPU, memory and disk usage of this container by cgroup 2; None for what cannot be read."""
    # A container without a cgroup namespace sees the groups of the whole machine, and has one of them.
    subgroup = groups / text(PROC / "self/cgroup").strip().rpartition("0::/")[2]
    group = subgroup if (subgroup / "memory.current").exists() else groups
    cpu, memory = fields(group / "cpu.stat"), fields(group / "memory.stat")
    # Some kernels put several disks in one line.
    disks = list(map(key_values, text(group / "io.stat").splitlines()))
    read, written = None, None
    if (group / "io.stat").exists():
        read = sum(int(disk.get("rbytes", 0)) for disk in disks)
        written = sum(int(disk.get("wbytes", 0)) for disk in disks)
    return usage(
        scaled(cpu.get("usage_usec"), 1e6),
        number(text(group / "memory.current")),
        memory.get("inactive_file"),
        number(text(group / "memory.max")),
        read,
        written,
    )


def key_values(line: str) -> dict[str, str]:
    """Return the pairs ``key=value`` in a line; skip other words."""
    return dict(pair.split("=") for pair in line.split() if "=" in pair)


def read_cgroup_1(groups: Path) -> Values:
    """Return CPU, memory and disk usage of this container by cgroup 1; None for what cannot be read."""
    disk = text(groups / "blkio/blkio.throttle.io_service_bytes_recursive")
    lines = [line.split() for line in disk.splitlines()]
    read, written = None, None
    if disk:
        read = sum(int(line[2]) for line in lines if line[1] == "Read")
        written = sum(int(line[2]) for line in lines if line[1] == "Write")
    return usage(
        scaled(number(text(groups / "cpuacct/cpuacct.usage")), 1e9),
        number(text(groups / "memory/memory.usage_in_bytes")),
        fields(groups / "memory/memory.stat").get("total_inactive_file"),
        number(text(groups / "memory/memory.limit_in_bytes")),
        read,
        written,
    )


def usage(
    cpu: float | None,
    memory: float | None,
    cache: float | None,
    limit: float | None,
    read: float | None,
    written: float | None,
) -> Values:
    """Return the columns of a container's usage; the one of the memory limit only if there is a limit.

    ``cache``: bytes of the page cache that the kernel reclaims first, which `docker stats` subtracts too.
    """
    return {
        "CPU (cores)": total(cpu, 1),
        "memory (MiB)": None if memory is None else (memory - (cache or 0)) / MIB,
        **({"memory limit (MiB)": limit / MIB} if limit is not None and limit < UNLIMITED else {}),
        "disk read (MiB/s)": total(read, MIB),
        "disk written (MiB/s)": total(written, MIB),
    }


def fields(path: Path) -> dict[str, float]:
    """Return name -> number of a file with such a pair in each line."""
    pairs = (line.split() for line in text(path).splitlines())
    return {name: float(value) for name, value in pairs}


def network() -> tuple[float | None, float | None]:
    """Return bytes received and sent by adapters, or by all interfaces but lo if none is one; else None."""
    lines = (line.partition(":") for line in text(PROC / "net/dev").splitlines()[2:])
    counts = {name.strip(): numbers.split() for name, _, numbers in lines if name.strip() != "lo"}
    adapters = {name for name in counts if (SYS / "class/net" / name / "device").exists()} or set(counts)
    if not adapters:
        return None, None
    received = sum(int(counts[name][0]) for name in adapters)
    sent = sum(int(counts[name][8]) for name in adapters)
    return received, sent


# --- ranks ---------------------------------------------------------------------------------------------------

# Seconds that a rank may take to answer: other samples wait for it.
RANK_LIMIT = 0.3
SOCKETS = re.compile(r" @(labctl/\S+/(\d+))$", re.MULTILINE)


class Ranks:
    """The share of time in which the node's ranks are in collectives, of the rank that waits least.

    Others wait for that one while it computes. Ranks of torch tell; workloads/common/flight_recorder.py.
    """

    def __init__(self) -> None:
        """Start without an answer of a rank."""
        self._before: dict[str, tuple[float, float]] = {}
        """Socket of a rank -> time of its last answer, and the seconds that it told."""

    def __call__(self) -> Values:
        """Ask each rank; the share is None until all of them have answered twice in a row."""
        prefix = "labctl/{}/{}/".format(os.environ.get("LABCTL_RUN_ID", ""), os.uname().nodename)
        sockets = {name: int(pid) for name, pid in SOCKETS.findall(text(PROC / "net/unix")) if name.startswith(prefix)}
        told = {name: (time.monotonic(), seconds_waited(name, pid)) for name, pid in sockets.items()}
        before, self._before = self._before, {name: (at, now) for name, (at, now) in told.items() if now is not None}
        shares = []
        for name, (at, now) in self._before.items():
            if name in before:
                began, seconds = before[name]
                shares.append((now - seconds) / (at - began))
        is_whole = shares and len(shares) == len(sockets)
        return {"in collectives (share)": min(1.0, *shares) if is_whole else None}


def seconds_waited(name: str, pid: int) -> float | None:
    """Return the seconds in which a rank was in collectives; None if it does not tell."""
    import stacks

    try:
        return float(json.loads(stacks.ask(b"\0" + name.encode(), pid, b"waited", RANK_LIMIT))["waited"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
