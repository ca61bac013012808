"""Memory of a node, swap, and processes killed for want of memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support import host_health
from support.host_health import conditions, look, of_line, put, read

from labctl.health.memory import EVENTS, LIMITS, SUBJECT
from labctl.health.model import Snapshot

MEMINFO = "proc/meminfo"
SWAPS = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
TREE = {
    MEMINFO: "MemTotal:       527938656 kB\nMemFree:        500000000 kB\n",
    "proc/vmstat": "nr_free_pages 1\npswpin 7\npswpout 9\noom_kill 2\n",
    "proc/swaps": f"{SWAPS}/dev/nvme0n1p3                          partition\t8388604\t\t1024\t\t-2\n",
}


def other(root: Path, changes: dict[str, str] | None = None) -> Snapshot:
    """Look at the tree with other texts of these files."""
    put(root, {**TREE, **(changes or {})})
    return msgspec.structs.replace(look(SUBJECT, root), boot="b", lines=(), lines_why="")


def test_readings_of_a_server(tmp_path: Path) -> None:
    """Read memory, swap and kills."""
    put(tmp_path, TREE)
    values = {name: reading.value for (_, name), reading in read(SUBJECT, tmp_path).items()}
    assert values == {"memory": 503, "swap in use": 0, "pages swapped in": 7, "OOM kills of the host": 2}


def test_memory_by_blocks(tmp_path: Path) -> None:
    """Count the blocks that are online: what the kernel keeps for itself does not matter."""
    put(tmp_path, {**TREE, "sys/devices/system/memory/block_size_bytes": "80000000\n"})
    put(tmp_path, {f"sys/devices/system/memory/memory{number}/state": "online\n" for number in range(4)})
    put(tmp_path, {"sys/devices/system/memory/memory9/state": "offline\n"})
    assert read(SUBJECT, tmp_path)["", "memory"].value == 8


@pytest.mark.parametrize("path", LIMITS)
def test_memory_of_a_container(tmp_path: Path, path: str) -> None:
    """Return the container's limit if it is less than the machine's memory."""
    put(tmp_path, {**TREE, path: f"{64 << 30}\n"})
    assert read(SUBJECT, tmp_path)["", "memory"].value == 64


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    """Return the machine's memory if its groups have no limit."""
    put(tmp_path, {**TREE, LIMITS[0]: f"{limit}\n"})
    assert read(SUBJECT, tmp_path)["", "memory"].value == 503


def test_kills_of_a_container(tmp_path: Path) -> None:
    """Count a container's own kills, not those of the machine."""
    put(tmp_path, {**TREE, EVENTS: "low 0\nhigh 0\nmax 5\noom 0\noom_kill 0\noom_group_kill 0\n"})
    assert read(SUBJECT, tmp_path)["", "OOM kills of the host"].value == 0


def test_swap_in_compressed_memory_is_no_reading(tmp_path: Path) -> None:
    """Leave swap out where it is in memory."""
    put(tmp_path, {**TREE, "proc/swaps": f"{SWAPS}/dev/zram0 partition 8388604 8000000 100\n"})
    assert {name for _, name in read(SUBJECT, tmp_path)} == {"memory", "OOM kills of the host"}


def test_unknown_without_meminfo(tmp_path: Path) -> None:
    """Answer unknown if the memory cannot be read."""
    condition = conditions(SUBJECT, msgspec.structs.replace(look(SUBJECT, tmp_path), lines_why=""))["memory"]
    assert (condition.level, condition.text) == ("unknown", "/proc/meminfo has no MemTotal")


def test_a_good_node_gets_no_word(tmp_path: Path) -> None:
    """Tolerate what another kernel keeps for itself."""
    good = other(tmp_path)
    less = other(tmp_path, {MEMINFO: "MemTotal: 520000000 kB\n"})
    assert conditions(SUBJECT, less, None, good, good) == {}
    assert conditions(SUBJECT, good, good, less, good) == {}


@pytest.mark.parametrize(
    ("path", "text", "check", "level", "words"),
    [
        (MEMINFO, "MemTotal: 494000000 kB\n", "memory", "bad", "memory 471 GiB, 503 on 2 others"),
        ("proc/swaps", f"{SWAPS}/swap file 83886040 79190798 -2\n", "swap", "remark", "swap in use 15 % of the memory"),
        ("proc/vmstat", "pswpin 300007\noom_kill 2\n", "swapping", "remark", "pages swapped in +300000"),
        ("proc/vmstat", "pswpin 7\noom_kill 3\n", "oom", "remark", "OOM kills of the host +1"),
    ],
)
def test_a_bad_node(tmp_path: Path, path: str, text: str, check: str, level: str, words: str) -> None:
    """Name what differs from two neighbours and from before."""
    good = other(tmp_path)
    condition = conditions(SUBJECT, other(tmp_path, {path: text}), good, good, good)[check]
    assert condition.level == level
    assert condition.text.startswith(words)


def test_less_than_neighbours_that_differ_a_little(tmp_path: Path) -> None:
    """Count neighbours as alike that differ less than the tolerance."""
    good, alike = other(tmp_path), other(tmp_path, {MEMINFO: "MemTotal: 527000000 kB\n"})
    bad = other(tmp_path, {MEMINFO: "MemTotal: 494000000 kB\n"})
    assert conditions(SUBJECT, bad, None, good, alike)["memory"].level == "bad"
    assert conditions(SUBJECT, bad, None, good)["memory"].level == "remark"


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (
            "Out of memory: Killed process 123 (python) total-vm:10kB, anon-rss:9kB",
            "remark",
            "python was killed: out of the memory of the node",
        ),
        (
            "Memory cgroup out of memory: Killed process 9 (pt main) total-vm:1kB (x)",
            "remark",
            "pt main was killed: out of the memory of its container",
        ),
        ("Memory: 24684092K/25165824K available", "", ""),
    ],
)
def test_kernel_lines(line: str, level: str, words: str) -> None:
    """Name the program that was killed."""
    assert of_line(SUBJECT, line) == (level, words)


def test_damaged_output(tmp_path: Path) -> None:
    """Raise only what the frame catches."""
    put(tmp_path, TREE)
    host_health.fuzz(SUBJECT, host_health.output(SUBJECT, tmp_path), seed=2)


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []
