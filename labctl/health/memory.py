"""Memory of a node, swap, and processes that were killed for want of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median_low

from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject
from labctl.system import procfs
from labctl.system.hostdump import HostDump

GIB = 1 << 30
LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Limit of the container that a host may be. The root of a machine's own groups has none, or a very large one.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""
EVENTS = "sys/fs/cgroup/memory.events"
BLOCKS = "sys/devices/system/memory"

SCRIPT = f"""\
text proc/meminfo proc/swaps {EVENTS}
lines {" ".join(LIMITS)} {BLOCKS}/block_size_bytes
printf 'file proc/vmstat\\n'
grep -E '^(oom_kill|pswpin) ' proc/vmstat 2> /dev/null | body
fact 'memory blocks' "$(grep -sx online {BLOCKS}/memory[0-9]*/state | grep -c .)"
"""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield a node's memory, the swap in use, and the processes killed for want of memory."""
    total = procfs.memory(dump.root)
    if not total:
        yield Reading(name="memory", value=None, source="/proc/meminfo", why="/proc/meminfo has no MemTotal")
        return
    yield _memory(dump, total)
    yield from _swap(dump, total)
    yield from _kills(dump)


# --- readings ------------------------------------------------------------------------------------------------


def _memory(dump: HostDump, total: int) -> Reading:
    """Return the memory of the machine, or of the container that the host is, in whole GiB.

    How much the kernel keeps for itself varies from release to release; the blocks it counts do not.
    """
    sizes = {"lsmem": blocks_size(dump, "memory blocks") or total}
    sizes.update((f"/{path}", int(text)) for path in LIMITS if (text := dump.files.get(path, "").strip()).isdecimal())
    source = min(sizes, key=sizes.__getitem__)
    return Reading(name="memory", value=round(sizes[source] / GIB), source=source, unit="GiB", kind="fact")


def blocks_size(dump: HostDump, fact: str) -> int:
    """Return the bytes of as many blocks of memory as a fact says; 0 if unknown.

    Source: Documentation/admin-guide/mm/memory-hotplug.rst of the kernel; block_size_bytes is hexadecimal.
    """
    size = procfs.read(dump.root / BLOCKS / "block_size_bytes").strip()
    return int(dump.facts.get(fact, "0")) * int(size, 16) if size else 0


def _swap(dump: HostDump, total: int) -> Iterator[Reading]:
    """Yield the share of swap on disks in memory's size, and the pages read back from there.

    Swap in compressed memory (zram) is in ordinary use where there is one.
    """
    rows = [line.split() for line in procfs.read(dump.root / "proc/swaps").splitlines()[1:]]
    if not rows or any("/zram" in row[0] for row in rows):
        return
    used = sum(int(row[3]) * 1024 for row in rows)
    yield Reading(name="swap in use", value=round(100 * used / total), source="/proc/swaps", unit="% of the memory")
    pages = _number(procfs.read(dump.root / "proc/vmstat"), "pswpin")
    if pages is not None:
        yield Reading(name="pages swapped in", value=pages, source="/proc/vmstat", kind="counter")


def _kills(dump: HostDump) -> Iterator[Reading]:
    """Yield the number of processes killed for want of memory: in a container those of its own."""
    path = EVENTS if EVENTS in dump.files else "proc/vmstat"
    kills = _number(procfs.read(dump.root / path), "oom_kill")
    if kills is not None:
        yield Reading(name="OOM kills of the host", value=kills, source=f"/{path}", kind="counter")


def _number(text: str, name: str) -> int | None:
    """Return the number of a line ``NAME NUMBER``; None without such a line."""
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


# --- checks --------------------------------------------------------------------------------------------------


def less_memory(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge memory below that of most neighbours as bad, of a single one as a remark; the limit is in percent."""
    known = [(place, value) for place, value in evidence.neighbours if isinstance(value, (int, float))]
    if not known or not isinstance(reading.value, (int, float)):
        return None
    usual = median_low(value for _, value in known)
    tolerated = usual * (evidence.limit or 0) / 100
    if reading.value >= usual - tolerated:
        return None
    alike = tuple((place, usual if abs(value - usual) <= tolerated else value) for place, value in known)
    return rules.less_than_neighbours(reading, Evidence(neighbours=alike))


def killed(match: re.Match[str]) -> Answer:
    """Name the program that was killed for want of memory: mostly it asked for too much itself."""
    where = "of its container" if match[1].startswith("Memory") else "of the node"
    return Answer("remark", f"{match[3]} was killed: out of the memory {where}")


SUBJECT = Subject(
    name="Memory",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(
            name="memory",
            reading="memory",
            judge=less_memory,
            limit=3,
            steps=("{sudo}dmidecode --type memory", "reseat the missing module, or have it replaced"),
        ),
        Check(
            name="swap",
            reading="swap in use",
            judge=rules.remark_above,
            limit=10,
            steps=("ps -eo pid,user,rss,args --sort -rss | head", "{sudo}swapoff -a && {sudo}swapon -a"),
        ),
        # A GiB of pages of 4 KiB: a run that reads it back was slowed.
        Check(
            name="swapping",
            reading="pages swapped in",
            judge=rules.remark_grew,
            limit=1 << 18,
            steps=("ps -eo pid,user,rss,args --sort -rss | head",),
        ),
        Check(
            name="oom",
            reading="OOM kills of the host",
            # Mostly the program's own fault, and whose program it was is not counted: it accuses no host and no run.
            judge=rules.remark_grew,
            limit=0,
            steps=("{sudo}dmesg | grep -i 'killed process'", "give the program less to do, or more memory"),
        ),
    ),
    # Source: mm/oom_kill.c of the kernel.
    lines=(
        LineCheck(
            name="oom-killed",
            pattern=r"(Memory cgroup out|Out) of memory: Kill(ed)? process [0-9]+ \(([^)]*)\)",
            judge=killed,
            steps=("give the program less to do, or more memory",),
        ),
    ),
)
