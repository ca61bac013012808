"""Processes that wait in the kernel and cannot be ended."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from labctl.health.model import Answer, Check, Evidence, Reading, Subject
from labctl.system import procfs
from labctl.system.hostdump import HostDump

NAME = "uninterruptible processes"
SOURCE = "/proc/*/stat, /proc/*/sched"
EXPECTED = ("__refrigerator", "kernel_clone", "_do_fork", "do_fork")
"""Functions in which a process waits for a person or a program: one that is frozen with its container, in cgroups of
version 1, and one whose child has not executed its program yet, after vfork(2)."""
LONGEST = 60.0
"""Seconds; the kernel itself writes a line after 120 (hung_task_timeout_secs of Documentation/admin-guide/sysctl)."""
UNTIMED = "how long the processes in state D have waited is unknown: it needs /proc/PID/sched and taskset(1)"
_STAT = re.compile(r"(\d+) \((.*)\) (\S)(?: \S+){35} (\d+)")

# A process's last time on a core is in that core's clock, which leaves out interrupts and stolen time. Cores differ by
# up to hours, so the time now is read on the same core. That core may be stuck: nothing waits for it over a second.
SCRIPT = r"""there proc/1/stat
stuck=$(grep -hs ') D ' proc/[0-9]*/stat)
if [ -n "$stuck" ]; then
    printf 'fact uninterruptible\n'
    printf '%s\n' "$stuck" | body
    pids=$(printf '%s\n' "$stuck" | head -n 200 | cut -d ' ' -f 1)
    set --
    for pid in $pids; do set -- "$@" "proc/$pid/sched"; done
    printf 'fact last on a core\n'
    grep -Hs '^se\.exec_start' "$@" | body
    set --
    for pid in $pids; do set -- "$@" "proc/$pid/wchan" "proc/$pid/cgroup"; done
    printf 'fact waits in\n'
    grep -EHs '^[A-Za-z_][A-Za-z0-9_.]*$|:freezer:' "$@" | body
    groups=$(grep -hs ':freezer:' "$@" | sed 's|.*:freezer:|sys/fs/cgroup/freezer|; s|$|/freezer.state|' | sort -u)
    # shellcheck disable=SC2086 # a word for each group
    [ -z "$groups" ] || lines $groups
    cores=$(printf '%s\n' "$stuck" | sed 's/.*) //' | cut -d ' ' -f 37 | sort -u | head -n 50)
    printf 'fact clocks of cores\n'
    (
        for core in $cores; do
            taskset -c "$core" grep -h -e '^[0-9]' -e '^se\.exec_start' proc/self/stat proc/self/sched
        done &
    ) 2> /dev/null | timeout 1 cat | body
fi
"""


class Waiting(Struct, frozen=True, kw_only=True):
    """A process in state D, the function that it waits in, and for how many seconds; None if unknown."""

    pid: int
    name: str
    function: str
    seconds: float | None


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the processes that have waited for over a minute, as ``4711 python 125 s nfs_wait; ...``."""
    found = tuple(waiting(dump))
    unknown = any(process.seconds is None for process in found)
    stuck = [process for process in found if (process.seconds or 0) > LONGEST]
    if not stuck and (unknown or "proc/1/stat" not in dump.files):
        why = UNTIMED if unknown else "other users' processes are hidden (hidepid of /proc)"
        yield Reading(name=NAME, value=None, source=SOURCE, why=why)
        return
    shown = (f"{process.pid} {process.name} {process.seconds:.0f} s {process.function}".rstrip() for process in stuck)
    yield Reading(name=NAME, value="; ".join(shown), source=SOURCE)


def waiting(dump: HostDump) -> Iterator[Waiting]:
    """Yield the processes in state D, without those that wait for a person or a program.

    Source: proc_pid_stat(5); /proc/PID/sched of kernel/sched/debug.c, in milliseconds of the core's clock.
    """
    last = dict(re.findall(r"^proc/(\d+)/sched:\S+ *: *(\S+)$", dump.facts.get("last on a core", ""), re.MULTILINE))
    where = dump.facts.get("waits in", "")
    functions = dict(re.findall(r"^proc/(\d+)/wchan:(\S+)$", where, re.MULTILINE))
    groups = dict(re.findall(r"^proc/(\d+)/cgroup:\d+:freezer:(\S+)$", where, re.MULTILINE))
    clocks = _clocks(dump.facts.get("clocks of cores", ""))
    for line in dump.facts.get("uninterruptible", "").splitlines():
        match = _STAT.match(line)
        if not match or match[3] != "D":
            continue
        pid, function = match[1], functions.get(match[1], "")
        frozen = procfs.read(dump.root / f"sys/fs/cgroup/freezer{groups.get(pid, '')}/freezer.state").strip()
        if function in EXPECTED or frozen == "FROZEN":
            continue
        if last and pid not in last:
            # It ended, or went on, while it was looked at.
            continue
        now, then = clocks.get(match[4]), float(last.get(pid, 0))
        seconds = (now - then) / 1000 if now and then else None
        yield Waiting(pid=int(pid), name=match[2], function=function, seconds=seconds)


def _clocks(text: str) -> dict[str, float]:
    """Return the clock of each core in milliseconds, from the status and the schedule of a process that ran there."""
    clocks: dict[str, float] = {}
    core = ""
    for line in text.splitlines():
        match = _STAT.match(line)
        if match:
            core = match[4]
        elif core:
            clocks[core] = float(line.rpartition(":")[2])
    return clocks


def stuck(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge processes that have waited for over a minute as bad."""
    if not reading.value:
        return None
    return Answer("bad", f"processes wait in the kernel and cannot be ended: {reading.value}")


SUBJECT = Subject(
    name="Processes",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(
            name="uninterruptible",
            reading=NAME,
            judge=stuck,
            steps=(
                "look for a file server or disk that does not answer: {sudo}cat /proc/PID/stack",
                "restart the node if the processes stay",
            ),
        ),
    ),
)
