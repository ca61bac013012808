"""Cores of a host that programs of others use: read while the lab runs nothing."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from labctl.system import human
from labctl.system.process import CompletedProcess

SCRIPT = """\
# processor time
read_times() { set -- $(head -n 1 /proc/stat); echo $(($2 + $3 + $4 + $7 + $8)) $5 $6 ${9:-0}; }
read_times; sleep 0.5; read_times; grep -c ^processor /proc/cpuinfo
"""
"""Prints busy, idle, waiting and stolen ticks (proc(5)) twice in half a second, and the number of cores."""
LIMIT = 30.0
"""Seconds that a host may take to answer."""
BUSY = 0.25
"""A host is busy if others use this share of its cores."""


class Load(Struct, frozen=True, kw_only=True):
    """Cores of a host, and how many of them others use; the hypervisor's share counts as used."""

    cores: int
    used: float

    @property
    def share(self) -> float:
        """Return the used share of the cores."""
        return self.used / self.cores

    def text(self) -> str:
        """Render as ``1.9 of 2 cores in use by other programs``."""
        return f"{human.number(round(self.used, 1))} of {human.count(self.cores, 'core')} in use by other programs"


def by_host(done: Mapping[str, CompletedProcess]) -> dict[str, Load]:
    """Return the load of each host on which ``SCRIPT`` ran; those with malformed output are left out."""
    loads = {host: read(result.out) for host, result in done.items()}
    return {host: load for host, load in loads.items() if load}


def read(output: str) -> Load | None:
    """Parse the output of ``SCRIPT``; None if it is malformed, or no time passed between its readings."""
    try:
        before, after, (cores,) = ([int(word) for word in line.split()] for line in output.splitlines())
        busy, idle, waiting, stolen = (new - old for old, new in zip(before, after, strict=True))
    except ValueError:
        return None
    total = busy + idle + waiting + stolen
    return Load(cores=cores, used=cores * (busy + stolen) / total) if total > 0 and cores > 0 else None
