"""Processors, their clocks and errors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support import host_health
from support.host_health import conditions, look, of_line, put, read

from labctl.health.model import Snapshot
from labctl.health.processor import SUBJECT

CPU = "sys/devices/system/cpu"
CLOCK = "sys/devices/system/clocksource/clocksource0"
EDAC = "sys/devices/system/edac/mc/mc0"
BLOCK = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmicrocode\t: 0xa101148\n\n"
TREE = {
    "proc/cpuinfo": BLOCK + BLOCK.replace(": 0\n", ": 1\n"),
    "proc/meminfo": "MemTotal:       24684092 kB\nHugePages_Total:       0\n",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    f"{CPU}/online": "0-1\n",
    f"{CPU}/present": "0-1\n",
    f"{CPU}/offline": "2-63\n",
    f"{CPU}/cpu0/topology/physical_package_id": "0\n",
    f"{CPU}/cpu1/topology/physical_package_id": "1\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "2\n",
    f"{CPU}/cpu1/thermal_throttle/core_throttle_count": "2\n",
    f"{CLOCK}/available_clocksource": "tsc hpet acpi_pm\n",
    f"{CLOCK}/current_clocksource": "tsc\n",
    f"{EDAC}/ce_count": "3\n",
    f"{EDAC}/ue_count": "0\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       263716112 kB\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       264222544 kB\n",
}
UNCORRECTED = "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: bc00000000010090"
CORRECTED = "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: 8c00004000010090"


def snapshot(root: Path, **changes: str) -> Snapshot:
    """Look at the tree with other texts of these files; ``__`` stands for a slash, an empty text for no file."""
    put(root, TREE)
    put(root, {path.replace("__", "/"): text for path, text in changes.items()})
    return msgspec.structs.replace(look(SUBJECT, root), boot="b", lines=(), lines_why="")


def other(root: Path, path: str, text: str) -> Snapshot:
    """Look at the tree with another text of a file."""
    put(root, TREE)
    put(root, {path: text})
    return msgspec.structs.replace(look(SUBJECT, root), boot="b", lines=(), lines_why="")


MACHINE_ID = "0123456789abcdef0123456789abcdef\n"


@pytest.mark.parametrize(
    ("text", "name"), [(MACHINE_ID, "3eb1bd439947"), ("uninitialized\n", None), ("\n", None), ("", None)]
)
def test_a_machine_has_a_name_that_does_not_tell_its_id(tmp_path: Path, text: str, name: str | None) -> None:
    """Read machine ids, one that is not set yet, and none: the beginning of the hash, or no reading."""
    put(tmp_path, {**TREE, "etc/machine-id": text})
    machine = read(SUBJECT, tmp_path).get(("", "machine"))
    assert (machine and machine.value) == name
    assert machine is None or machine.kind == "fact"


def test_readings_of_a_server(tmp_path: Path) -> None:
    """Read model, cores, sockets, nodes and counters."""
    put(tmp_path, TREE)
    values = {" ".join(key).strip(): reading.value for key, reading in read(SUBJECT, tmp_path).items()}
    assert values == {
        "processor": "AMD EPYC 9654 96-Core Processor",
        "microcode": "0xa101148",
        "kernel": "6.8.0-45-generic",
        "sockets": 2,
        "cores": 2,
        "offline cores": "",
        "NUMA nodes": 2,
        "NUMA node 0 NUMA memory": 251,
        "NUMA node 1 NUMA memory": 252,
        "governor": "performance",
        "clock source": "tsc",
        "huge pages": 0,
        "memory controller 0 uncorrectable memory errors": 0,
        "memory controller 0 corrected memory errors": 3,
        "core throttling because of heat": 4,
    }


def test_arm_is_named_by_implementer_and_part(tmp_path: Path) -> None:
    """Name an Arm processor, whose cpuinfo has no model."""
    put(tmp_path, {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"})
    assert read(SUBJECT, tmp_path)["", "processor"].value == "Arm 0x41 0xd4f"


def test_unknown_without_cpuinfo(tmp_path: Path) -> None:
    """Say why the processor is unknown, and yield nothing for what is not there."""
    readings = read(SUBJECT, tmp_path)
    assert [reading.value for reading in readings.values()] == [None]
    assert readings["", "processor"].why == "it has no model"


def test_memory_of_nodes_by_blocks(tmp_path: Path) -> None:
    """Count a NUMA node's memory in blocks where the kernel shows them."""
    put(tmp_path, {**TREE, "sys/devices/system/memory/block_size_bytes": "80000000\n"})
    for number in range(3):
        (tmp_path / f"sys/devices/system/node/node0/memory{number}").mkdir()
    assert read(SUBJECT, tmp_path)["NUMA node 0", "NUMA memory"].value == 6


def test_no_throttling_of_a_laptop(tmp_path: Path) -> None:
    """Leave heat out on a laptop."""
    put(tmp_path, {**TREE, "sys/class/dmi/id/chassis_type": "10\n"})
    assert ("", "core throttling because of heat") not in read(SUBJECT, tmp_path)


def test_a_good_node_gets_no_word(tmp_path: Path) -> None:
    """Say nothing of a node like its neighbours and like before."""
    now = snapshot(tmp_path)
    assert conditions(SUBJECT, now, now, now, now) == {}


@pytest.mark.parametrize(
    ("path", "text", "check", "level", "words"),
    [
        (f"{CPU}/online", "0\n", "cores", "bad", "cores 1, 2 on 2 others"),
        (f"{CPU}/online", "0\n", "offline-cores", "remark", "cores 1 are offline, they were online before"),
        (f"{CPU}/cpu1/topology/physical_package_id", "0\n", "sockets", "bad", "sockets 1, 2 on 2 others"),
        (
            f"{CPU}/cpu1/cpufreq/scaling_governor",
            "powersave\n",
            "governor",
            "remark",
            "governor performance, powersave",
        ),
        (f"{CLOCK}/current_clocksource", "hpet\n", "clock-source", "remark", "clock source is hpet (tsc is available)"),
        ("proc/meminfo", "HugePages_Total:    1024\n", "huge-pages", "remark", "huge pages 1024, 0 on 2 others"),
        ("proc/sys/kernel/osrelease", "6.5.0\n", "kernel", "remark", "kernel 6.5.0, 6.8.0-45-generic on 2 others"),
        ("sys/devices/system/node/online", "0\n", "numa", "remark", "NUMA nodes 1, 2 on 2 others"),
        (f"{EDAC}/ue_count", "1\n", "memory-uncorrectable", "bad", "uncorrectable memory errors 1"),
        (f"{EDAC}/ce_count", "33\n", "memory-corrected", "remark", "corrected memory errors +30"),
        (
            f"{CPU}/cpu0/thermal_throttle/core_throttle_count",
            "9\n",
            "core-throttling",
            "remark",
            "core throttling because of heat +7",
        ),
    ],
)
def test_a_bad_node(tmp_path: Path, path: str, text: str, check: str, level: str, words: str) -> None:
    """Name what differs from two neighbours and from before."""
    good = snapshot(tmp_path)
    condition = conditions(SUBJECT, other(tmp_path, path, text), good, good, good)[check]
    assert condition.level == level
    assert condition.text.startswith(words)


def test_few_corrected_errors_are_no_word(tmp_path: Path) -> None:
    """Tolerate ten more corrected errors."""
    good = snapshot(tmp_path)
    assert conditions(SUBJECT, other(tmp_path, f"{EDAC}/ce_count", "13\n"), good) == {}


def test_powersave_alone_is_no_word(tmp_path: Path) -> None:
    """Say nothing of intel_pstate's powersave where all have it, or a single node looks."""
    for core in (0, 1):
        now = other(tmp_path, f"{CPU}/cpu{core}/cpufreq/scaling_governor", "powersave\n")
    assert conditions(SUBJECT, now, None, now, now) == {}
    assert conditions(SUBJECT, now) == {}


@pytest.mark.parametrize(
    ("available", "current"), [("tsc kvm-clock", "kvm-clock"), ("xen tsc hpet", "tsc"), ("acpi_pm", "acpi_pm")]
)
def test_other_clocks_are_no_word(tmp_path: Path, available: str, current: str) -> None:
    """Say nothing of a fast clock that is not the first, and of a slow one without a faster."""
    put(tmp_path, {**TREE, f"{CLOCK}/available_clocksource": f"{available}\n"})
    put(tmp_path, {f"{CLOCK}/current_clocksource": f"{current}\n"})
    assert conditions(SUBJECT, msgspec.structs.replace(look(SUBJECT, tmp_path), lines_why="")) == {}


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (UNCORRECTED, "bad", "machine check: uncorrected error in bank 7"),
        (CORRECTED, "remark", "machine check: corrected error in bank 7"),
        ("mce: [Hardware Error]: Machine check events logged", "remark", "machine check events logged"),
        ("[Hardware Error]: Uncorrected, software restartable error.", "bad", "uncorrected hardware error"),
        ("[Hardware Error]: Corrected error, no action required.", "", ""),
        ("{1}[Hardware Error]: event severity: fatal", "bad", "fatal hardware error reported by the firmware"),
        ("[Hardware Error]: event severity: fatal", "", ""),
        ("{2}[Hardware Error]: event severity: corrected", "", ""),
        (
            "Memory failure: 0x1234: Killing python:99 due to hardware memory corruption",
            "bad",
            "uncorrected memory error",
        ),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:123]", "bad", "lockup of core 3"),
        ("watchdog: Watchdog detected hard LOCKUP on cpu 12", "bad", "lockup of core 12"),
        (
            "rcu: INFO: rcu_sched self-detected stall on CPU",
            "remark",
            "a core did not respond to the kernel (RCU stall)",
        ),
        ("mce: CPU0: Thermal monitoring enabled (TM1)", "", ""),
        ("MCE: In-kernel MCE decoding enabled.", "", ""),
        ("rcu: RCU CPU stall warnings timeout set to 60 (rcu_cpu_stall_timeout).", "", ""),
        ("EDAC MC: Ver: 3.0.0", "", ""),
    ],
)
def test_kernel_lines(line: str, level: str, words: str) -> None:
    """Judge lines on hardware errors and lockups."""
    assert of_line(SUBJECT, line) == (level, words)


def test_damaged_output(tmp_path: Path) -> None:
    """Raise only what the frame catches."""
    put(tmp_path, TREE)
    host_health.fuzz(SUBJECT, host_health.output(SUBJECT, tmp_path), seed=1)


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []
