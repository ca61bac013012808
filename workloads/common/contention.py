"""Time that a process loses to programs of others: it is ready to run, and another has its core."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

THROTTLED = (
    (Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec", 1e6),
    (Path("/sys/fs/cgroup/cpu/cpu.stat"), "throttled_time", 1e9),
    (Path("/sys/fs/cgroup/cpu,cpuacct/cpu.stat"), "throttled_time", 1e9),
)
"""Time that the container's own quota held it back, summed over cores: cgroup v2 and v1 (kernel, sched-bwc.rst)."""


@dataclass(frozen=True)
class Waits:
    """Seconds so far: each thread ready and not running, held back by the quota; of all cores busy, and stolen."""

    ready: dict[str, float]
    throttled: float
    own: float
    """Processor time of this process."""
    busy: float
    stolen: float

    def held_since(self, before: Waits) -> float:
        """Return the seconds since ``before`` that the quota held back each thread that wanted to run, on average."""
        return (self.throttled - before.throttled) / max(1, len(self.waited_since(before)))

    def waited_since(self, before: Waits) -> list[float]:
        """Return the seconds since ``before`` that each thread waited for a core; only threads that did."""
        waited = (seconds - before.ready.get(thread, 0.0) for thread, seconds in self.ready.items())
        return [seconds for seconds in waited if seconds > 0]

    def since(self, before: Waits) -> float:
        """Return the seconds lost to other programs since ``before``, of the thread that lost most, and stolen time.

        A thread that a quota holds back counts as ready, too: what this container's quota took is taken off, and of
        other waits only as much counts as others used of the cores. The hypervisor's share counts.
        """
        others = (self.busy - before.busy) - (self.own - before.own)
        waiting = max(0.0, max(self.waited_since(before), default=0.0) - self.held_since(before))
        return min(waiting, max(0.0, others)) + self.stolen - before.stolen


def read() -> Waits:
    """Return this process's waits so far; zeros for what the kernel does not count."""
    busy, stolen = cores()
    return Waits(ready=ready(), throttled=throttled(), own=time.process_time(), busy=busy, stolen=stolen)


def ready() -> dict[str, float]:
    """Return the seconds that each thread of this process has waited for a core, by thread id."""
    waits = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return waits


def throttled() -> float:
    """Return the seconds that the container's CPU quota has held it back; 0 if not counted."""
    for path, key, unit in THROTTLED:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts[key]) / unit
        except (OSError, ValueError, KeyError):
            continue
    return 0.0


def cores() -> tuple[float, float]:
    """Return the seconds that all cores of the host were busy, in sum, and the stolen seconds per core; or zeros."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    except (OSError, ValueError):
        return 0.0, 0.0
    second = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / second, steal / second / (os.cpu_count() or 1)
