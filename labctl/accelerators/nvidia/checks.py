"""Health of NVIDIA GPUs: checks of their readings and of the kernel's lines.

Sources: NVML API Reference Guide; GPU Memory Error Management; Dynamic Page Retirement.
"""

from __future__ import annotations

import re

from labctl.accelerators.nvidia.readings import GIB, LATE, SCRIPT, SLOW, Process, processes, readings
from labctl.accelerators.nvidia.xid import LINES, RESTART
from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, Level, Reading, Subject, shown
from labctl.system import human

_RESET = (
    "end what runs on {item}",
    "{sudo}nvidia-smi --gpu-reset --id={id}",
    "{sudo}reboot",
    "if it comes again: have the card replaced",
)
_REPLACE = ("end what runs on {item}", "have the card replaced: NVIDIA's RMA guidelines")
_BUSY = ("{sudo}ps -o pid,user,lstart,cmd -p PID", "ask its user, or end it")
_LINK = ("{sudo}systemctl status nvidia-fabricmanager", "nvidia-smi nvlink -s -i {id}", *_RESET[:3])


def _judge_silent(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a tool that cannot talk to the driver."""
    return Answer("bad", f"nvidia-smi fails: {reading.value}")


def _judge_listed(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a card that the driver does not know."""
    return None if reading.value == "yes" else Answer("bad", "is on the PCI bus but nvidia-smi does not list it")


def _judge_state(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a GPU that the driver cannot reach."""
    return None if reading.value == "reachable" else Answer("bad", f"the driver cannot reach it: {reading.value}")


def _judge_recovery(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a GPU for which the driver asks for an action."""
    if str(reading.value) in ("None", ""):
        return None
    return Answer("bad", f"the driver asks for an action: {reading.value}")


def _judge_retired(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge retired pages. Source: Dynamic Page Retirement, RMA Policy: 60 of the 64 that a card can retire."""
    if evidence.limit is None or not isinstance(reading.value, int) or reading.value < evidence.limit:
        return None
    return Answer("bad", f"retired pages {reading.value}, NVIDIA replaces the card from {shown(evidence.limit)} on")


def _judge_slowdown(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge the reasons for low clocks: heat that the hardware saw, or a power supply that failed, are bad.

    A slowdown of the hardware that gives no reason may be a change of clocks. Source: NVML, nvmlClocksEventReasons.
    """
    words = str(reading.value)
    if words == "none":
        return None
    level: Level = "bad" if "HW thermal" in words or "HW power brake" in words else "remark"
    return Answer(level, f"clocks are lowered by {words}")


def _judge_limit(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a power limit below the card's default."""
    now, default = map(int, re.findall(r"(\d+) W", str(reading.value)))
    return Answer("remark", f"power limit {now} W, by default {default} W") if now < default else None


def _judge_margin(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge an idle card that is nearly as hot as makes it slow."""
    if not isinstance(reading.value, (int, float)) or evidence.limit is None or reading.value > evidence.limit:
        return None
    return Answer("remark", f"temperature is {shown(reading.value)} °C below that of its slowdown, while it is idle")


def _judge_links(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a card with fewer NVLinks than most of its model.

    Without any it may be one that no bridge joins to another, unless every other of at least three has some.
    """
    if reading.value:
        return rules.less_than_neighbours(reading, evidence)
    others = [value for _, value in evidence.neighbours]
    if len(others) < 3 or not all(others):
        return None
    return Answer("remark", f"has no active NVLink; the {len(others)} others have")


def _judge_processes(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge what computes on a card outside of containers: over 1 GiB is bad, less a remark.

    To a container the card was given: a lab's run, or a job of a colleague, whose turn it is.
    """
    found = [process for process in processes(str(reading.value)) if not process.container]
    if not found:
        return None
    large = any((process.memory or 0) > GIB for process in found)
    users = "; ".join(map(_told, found[:3])) + (f"; {len(found) - 3} more" if len(found) > 3 else "")
    return Answer("bad" if large else "remark", f"is used by {users}")


def _told(process: Process) -> str:
    """Render a process for a person: ``pid 4711 (python, ann), 31 GiB``."""
    memory = "" if process.memory is None else f", {human.memory(process.memory)}"
    return f"pid {process.pid} ({process.name}, {process.user}){memory}"


def _judge_leftover(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge memory that no process has."""
    if not isinstance(reading.value, int) or evidence.limit is None or reading.value <= evidence.limit:
        return None
    return Answer("remark", f"{human.memory(reading.value << 20)} of memory is in use by no process")


def _judge_toolkit(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a version of the toolkit with which CUDA failed in containers, nvidia-smi did not.

    Source: NVIDIA/nvidia-container-toolkit#1967 and #1934, of single hosts.
    """
    if reading.value != "1.19.1":
        return None
    return Answer(
        "remark", "container toolkit 1.19.1: on some hosts CUDA fails in containers with it, nvidia-smi works"
    )


SUBJECT = Subject(
    name="NVIDIA",
    script=SCRIPT,
    late=LATE,
    slow=SLOW,
    readings=readings,
    checks=(
        Check(
            name="nvidia-smi",
            reading="nvidia-smi",
            judge=_judge_silent,
            steps=("{sudo}modprobe nvidia", "after an update of the driver: {sudo}reboot"),
        ),
        Check(name="gpu-count", reading="GPUs", judge=rules.less_than_neighbours, steps=RESTART),
        Check(name="gpu-listed", reading="listed", judge=_judge_listed, steps=RESTART),
        Check(name="gpu-state", reading="state", judge=_judge_state, steps=RESTART),
        Check(name="gpu-recovery", reading="recovery action", judge=_judge_recovery, steps=_RESET),
        Check(name="gpu-ecc", reading="uncorrectable ECC errors", judge=rules.above, limit=0, steps=_RESET),
        Check(name="gpu-ecc-life", reading="uncorrectable ECC errors of its life", judge=rules.remark_above, limit=0),
        Check(name="gpu-ecc-corrected", reading="corrected ECC errors", judge=rules.remark_grew, limit=0),
        Check(name="gpu-sram", reading="SRAM error threshold exceeded", judge=rules.one_of(("no",)), steps=_REPLACE),
        Check(name="gpu-remap", reading="row remapping pending", judge=rules.one_of(("no",)), steps=_RESET),
        Check(name="gpu-remap-failed", reading="row remapping failed", judge=rules.one_of(("no",)), steps=_REPLACE),
        Check(name="gpu-banks", reading="memory banks without a spare row", judge=rules.remark_above, limit=0),
        Check(name="gpu-pages", reading="retired pages", judge=_judge_retired, limit=60, steps=_REPLACE),
        Check(name="gpu-pages-pending", reading="page retirement pending", judge=rules.one_of(("no",)), steps=_RESET),
        Check(name="gpu-nvlink", reading="active NVLinks", judge=_judge_links, steps=_LINK),
        Check(name="gpu-nvlink-recovery", reading="NVLink recovery errors", judge=rules.grew, limit=0, steps=_LINK),
        Check(name="gpu-nvlink-replay", reading="NVLink replay errors", judge=rules.remark_grew, limit=0),
        Check(name="gpu-nvlink-crc", reading="NVLink CRC errors", judge=rules.remark_grew, limit=0),
        Check(
            name="gpu-fabric",
            reading="fabric",
            judge=rules.one_of(("Completed",)),
            steps=(
                "{sudo}systemctl restart nvidia-fabricmanager",
                "install it in the driver's own version",
                *_RESET[:3],
            ),
        ),
        Check(
            name="gpu-slowdown",
            reading="slowdown",
            judge=_judge_slowdown,
            steps=("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {id}", "check fans, airflow and power supplies"),
        ),
        Check(
            name="gpu-power-limit",
            reading="power limit",
            judge=_judge_limit,
            steps=("{sudo}nvidia-smi -i {id} -pl WATTS",),
        ),
        Check(name="gpu-temperature", reading="temperature margin", judge=_judge_margin, limit=5),
        Check(name="gpu-processes", reading="processes", judge=_judge_processes, steps=_BUSY),
        Check(
            name="gpu-leftover",
            reading="memory without a process",
            judge=_judge_leftover,
            limit=1024,
            steps=("{sudo}fuser -v /dev/nvidia{id}", *_RESET[1:3]),
        ),
        Check(name="gpu-compute-mode", reading="compute mode", judge=rules.unlike_neighbours),
        Check(name="gpu-mig", reading="MIG mode", judge=rules.unlike_neighbours),
        Check(name="gpu-vbios", reading="VBIOS", judge=rules.unlike_neighbours),
        Check(name="nvidia-driver", reading="NVIDIA driver", judge=rules.unlike_neighbours),
        Check(name="nvidia-toolkit", reading="toolkit", judge=_judge_toolkit),
    ),
    lines=LINES,
)
