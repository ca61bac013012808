"""Load of hosts: cores that programs of others use, tasks that wait for one, and clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from labctl.errors import Failures
from labctl.model import HERE
from labctl.system import human
from labctl.system.process import CompletedProcess

SCRIPT = """\
# processor time
read_times() {
    read -r _ user nice system idle waiting irq softirq stolen _ < /proc/stat
    echo "times $((user + nice + system + irq + softirq)) $idle $waiting ${stolen:-0}"
    read -r average _ _ tasks _ < /proc/loadavg && echo "tasks ${tasks%/*} $average"
}
read_times
sleep "${1:-0.5}" 2> /dev/null || sleep 1
read_times
echo "cores $(grep -c ^processor /proc/cpuinfo)"
for kind in cpu memory; do
    { sed -n "s/^some avg10=\\([0-9.]*\\).*/$kind \\1/p" /proc/pressure/$kind; } 2> /dev/null
done
sed -n 's/^cpu MHz.*: */MHz /p' /proc/cpuinfo
sed 's/^/kHz /' /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq 2> /dev/null
true
"""
"""Reads a host for half a second, or as many as its argument; prints lines of a name and numbers.

``times``: ticks busy, idle, waiting and stolen; ``tasks``: running, and the load average of a minute: both twice
(proc(5)). ``cpu`` and ``memory``: pressure in per cent, if the kernel counts it (accounting/psi.rst). ``MHz``, ``kHz``:
a core's clock. Needs a shell, sleep, grep and sed; of busybox, too.
"""
LIMIT = 30.0
"""Seconds that a host may take to answer."""
BUSY = 0.25
"""A host is busy if others use this share of its cores."""

RunOnHosts = Callable[[str, tuple[str, ...], float], tuple[Mapping[str, CompletedProcess], Failures]]
"""Runs a script with arguments on all hosts for at most some seconds, as ``Backend.on_hosts``."""


class Load(Struct, frozen=True, kw_only=True):
    """Cores of a host, and how many of them others use; the hypervisor's share counts as used. None is unknown."""

    cores: int
    used: float
    runnable: int | None = None
    """Tasks that ran or waited for a core, without the one that counts them."""
    load_average: float | None = None
    """Mean of a minute."""
    cpu_pressure: float | None = None
    """Share of the last ten seconds in which a task waited for a core."""
    memory_pressure: float | None = None
    """Share of the last ten seconds in which a task waited for memory."""
    clock: float | None = None
    """Mean of the cores, in MHz."""

    @property
    def share(self) -> float:
        """Return the used share of the cores."""
        return self.used / self.cores

    @property
    def is_busy(self) -> bool:
        """Return True if others use at least a quarter of the host's cores."""
        return self.share >= BUSY

    def text(self) -> str:
        """Render as ``1.9 of 2 cores in use by other programs, 6 runnable tasks``."""
        used = f"{human.number(round(self.used, 1))} of {human.count(self.cores, 'core')} in use by other programs"
        return f"{used}, {human.count(self.runnable, 'runnable task')}" if self.runnable else used


class Measured(Load, frozen=True, kw_only=True):
    """Load of a host before or after a measurement, while the lab runs nothing."""

    step: str
    """Step of a validation, or round of a search."""
    when: Literal["before", "after"]
    host: str


class Watch:
    """Reads the hosts before and after measurements, while the lab runs nothing; each busy host is noted once."""

    def __init__(self, on_hosts: RunOnHosts, notice: Callable[[str], object]) -> None:
        """Read nothing yet; ``notice`` gets a line for each busy host."""
        self._on_hosts, self._notice = on_hosts, notice
        self.measured: list[Measured] = []

    def read(self, step: str, when: Literal["before", "after"]) -> dict[str, Load]:
        """Read and keep the load of all hosts; return it by host; report each busy host once."""
        loads = of_hosts(self._on_hosts)
        known = self.busy
        for host, load in loads.items():
            if load.is_busy and host not in known:
                self._notice(busy_text(host, load.text()))
        self.measured += [Measured(step=step, when=when, host=host, **asdict(load)) for host, load in loads.items()]
        return loads

    @property
    def busy(self) -> dict[str, Load]:
        """Return, by host, the highest load of each host that was ever busy."""
        by_share = sorted((load for load in self.measured if load.is_busy), key=lambda load: load.share)
        return {load.host: load for load in by_share}


def busy_text(host: str, how: str) -> str:
    """Render as ``red0 is busy: 1.9 of 2 cores in use by other programs, 6 runnable tasks``."""
    return f"{'this machine' if host == HERE else host} is busy: {how}"


def of_hosts(on_hosts: RunOnHosts, seconds: float = 0.5) -> dict[str, Load]:
    """Read all hosts at the same time for some seconds; return the load, by host, of those that answer."""
    done, _ = on_hosts(SCRIPT, (f"{seconds:g}",), LIMIT)
    loads = {host: read(result.out) for host, result in done.items()}
    return {host: load for host, load in loads.items() if load}


def read(output: str) -> Load | None:
    """Parse the output of ``SCRIPT``; None if it is malformed, or no time passed between its readings."""
    try:
        numbers = [(words[0], tuple(map(float, words[1:]))) for line in output.splitlines() if (words := line.split())]
        before, after = _named(numbers, "times")
        busy, idle, waiting, stolen = (new - old for old, new in zip(before, after, strict=True))
        ((cores,),) = _named(numbers, "cores")
        total = busy + idle + waiting + stolen
        if not (total > 0 and cores >= 1):
            return None
        tasks = _named(numbers, "tasks")
        return Load(
            cores=int(cores),
            used=round(cores * (busy + stolen) / total, 3),
            # The shell that reads it runs, too.
            runnable=round(sum(running - 1 for running, _ in tasks) / len(tasks)) if tasks else None,
            load_average=tasks[-1][1] if tasks else None,
            cpu_pressure=_mean(_named(numbers, "cpu"), 0.01),
            memory_pressure=_mean(_named(numbers, "memory"), 0.01),
            clock=_mean(_named(numbers, "MHz")) or _mean(_named(numbers, "kHz"), 0.001),
        )
    except (ValueError, OverflowError):
        return None


def _named(numbers: Iterable[tuple[str, tuple[float, ...]]], name: str) -> list[tuple[float, ...]]:
    """Return the numbers of each line with this name."""
    return [values for line, values in numbers if line == name]


def _mean(lines: list[tuple[float, ...]], scale: float = 1.0) -> float | None:
    """Return the mean of lines with a number each, times ``scale``; None without lines."""
    return round(scale * sum(value for (value,) in lines) / len(lines), 4) if lines else None
