"""Time that a process loses to programs of others: it is ready to run, and another has its core."""

from __future__ import annotations

import os
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
    """Seconds so far: each thread ready and not running, held back by the quota, taken by the hypervisor."""

    ready: dict[str, float]
    throttled: float
    stolen: float

    def since(self, before: Waits) -> float:
        """Seconds lost to others since an earlier reading, of the thread that lost most; its own quota is not counted.

        A thread that the quota holds back counts as ready, too.
        """
        waited = [seconds - before.ready.get(thread, 0.0) for thread, seconds in self.ready.items()]
        busy = sum(seconds > 0 for seconds in waited)
        own = (self.throttled - before.throttled) / max(1, busy)
        return max(0.0, max(waited, default=0.0) - own) + self.stolen - before.stolen


def read() -> Waits:
    """The waits of this process so far; zeros where the kernel does not count them."""
    return Waits(ready=ready(), throttled=throttled(), stolen=stolen())


def ready() -> dict[str, float]:
    """Seconds that each thread waited for a core (kernel, sched-stats.rst: the second number, in nanoseconds)."""
    waits = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return waits


def throttled() -> float:
    """Seconds that this container's quota held it back."""
    for path, key, unit in THROTTLED:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts[key]) / unit
        except (OSError, ValueError, KeyError):
            continue
    return 0.0


def stolen() -> float:
    """Seconds that the hypervisor gave to other machines, per core (proc(5), steal)."""
    try:
        total = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
