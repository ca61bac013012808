"""The node-bandwidth workloads without torch: sizes, repetitions, judged figures, output lines, and file reads."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.builders import read_values

from labctl.launchers import known
from labctl.workloads.loader import load
from unit.scripts.conftest import WORKLOADS, ImportScripts

MIB = 1 << 20
MOUNTS = """\
22 1 254:0 / / rw,relatime - overlay overlay rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:40 / /data rw - nfs4 server:/export rw
25 24 0:41 / /data/in\\040memory rw shared:1 - tmpfs tmpfs rw
"""


@pytest.fixture(scope="module")
def scripts(import_scripts: ImportScripts) -> SimpleNamespace:
    """Return the modules of workload node-bandwidth."""
    return import_scripts("node-bandwidth", "figures", "memory", "disk", "script_exit")


@pytest.fixture
def figures(scripts: SimpleNamespace) -> ModuleType:
    """Return the module figures."""
    module: ModuleType = scripts.figures
    return module


@pytest.fixture
def memory(scripts: SimpleNamespace) -> ModuleType:
    """Return the module memory."""
    module: ModuleType = scripts.memory
    return module


@pytest.fixture
def disk(scripts: SimpleNamespace) -> ModuleType:
    """Return the module disk."""
    module: ModuleType = scripts.disk
    return module


# --- figures ---


def figure(figures: ModuleType, node: str, best: float, metric: str = "memory", name: str = "memory triad") -> Any:
    """Return a Figure of this node; the median is one below the best."""
    return figures.Figure(metric, name, node, best, best - 1, "2 threads")


def test_each_node_has_a_line_and_the_slowest_is_the_metric(figures: ModuleType) -> None:
    """Format two nodes: a line each, and the slowest as metric."""
    measured = [figure(figures, "worker-0", 14.5), figure(figures, "worker-1", 12.34)]
    assert figures.lines(measured) == [
        "memory triad of worker-0: 14.500 GB/s, median 13.500, 2 threads",
        "memory triad of worker-1: 12.340 GB/s, median 11.340, 2 threads",
        "memory: 12.340 GB/s on worker-1, the slowest of 2",
    ]


def test_a_node_is_as_slow_as_its_slowest_device(figures: ModuleType) -> None:
    """Format three devices of a node: the slowest counts."""
    measured = [
        figure(figures, "worker-0", best, "host-to-device", "host-to-device copy") for best in (25.0, 12.0, 26.0)
    ]
    assert figures.lines(measured) == [
        "host-to-device copy of worker-0: 12.000 GB/s, median 11.000, 2 threads, the slowest of 3 ranks",
        "host-to-device: 12.000 GB/s on worker-0, the slowest of 1",
    ]


@pytest.mark.parametrize("name", ["memory-bandwidth", "disk-read", "copy-bandwidth"])
def test_each_metric_is_read_from_its_own_line(figures: ModuleType, name: str) -> None:
    """Format each declared metric: read back from its own line."""
    metrics = load(WORKLOADS, name, known()).metrics
    values = {metric.name: 3.0 + number for number, metric in enumerate(metrics)}
    measured = [figure(figures, "worker-0", best, metric, f"{metric} kernel") for metric, best in values.items()]
    lines = [f"worker-0: {line}" for line in figures.lines(measured)]
    assert read_values(metrics, lines) == {metric: [best] for metric, best in values.items()}


def test_a_rate_is_of_the_best_time_in_units_of_10_to_the_9(figures: ModuleType) -> None:
    """Compute a rank's figures: best and median rate in 10^9 bytes per second."""
    parts = (("disk", "disk read", 4_000_000_000), ("other", "other", 1_000_000_000))
    times = [(2.0, 1.0), (1.0, 0.5), (4.0, 1.0)]
    first, second = figures.of_rank(SimpleNamespace(parts=parts, detail="x"), times, "worker-0")
    assert (first.best, first.median, second.best, second.median) == (4.0, 2.0, 2.0, 1.0)


def test_the_first_round_is_not_counted(figures: ModuleType) -> None:
    """Repeat three rounds: the first of four is dropped."""
    rounds: Iterator[tuple[float, ...]] = iter([(9.0,), (1.0,), (2.0,), (3.0,)])
    assert figures.repeat(lambda: next(rounds), 3, 5, clock=lambda: 0.0) == [(1.0,), (2.0,), (3.0,)]


@pytest.mark.parametrize(("seconds", "rounds"), [(1, 2), (35, 5), (1000, 10)])
def test_rounds_end_when_time_is_up_but_there_are_two(figures: ModuleType, seconds: float, rounds: int) -> None:
    """Repeat for a time: rounds stop when it is up, at least 2 and at most 10."""
    now = iter(range(0, 1000, 10))
    assert len(figures.repeat(lambda: (1.0,), 10, seconds, clock=lambda: next(now))) == rounds


def test_sizes_are_read_and_others_refused(figures: ModuleType) -> None:
    """Parse sizes: bytes; ValueError for others."""
    assert [figures.parse_bytes(text) for text in ("4096", "64M", "1g", "16MiB")] == [4096, 64 * MIB, 1 << 30, 16 * MIB]
    for text in ("", "12", "64X", "-1M", "1.5G"):
        with pytest.raises(ValueError, match="is not a size"):
            figures.parse_bytes(text)


# --- memory ---


def test_bytes_are_counted_as_in_stream(memory: ModuleType) -> None:
    """Count bytes of STREAM's kernels: 16 or 24 for each item."""
    assert {name: 8 * arrays for name, arrays in memory.KERNELS.items()} == {
        "copy": 16,
        "scale": 16,
        "add": 24,
        "triad": 24,
    }


def test_the_values_after_a_round_are_those_of_streams_kernels(memory: ModuleType) -> None:
    """Compute expected values after one and two rounds of STREAM."""
    # c = a, b = 3 c, c = a + b, a = b + 3 c
    assert memory.expected(1) == (15.0, 3.0, 4.0)
    assert memory.expected(2) == (225.0, 45.0, 60.0)


def test_arrays_are_four_times_the_caches_and_fit_in_a_share_of_free_memory(memory: ModuleType) -> None:
    """Choose the array size: four times the caches or as asked, within a share of free memory."""
    assert memory.array_size(None, 32 * MIB, 16 << 30) == 128 * MIB
    assert memory.array_size(None, 1 * MIB, 16 << 30) == 8_000_000
    assert memory.array_size(None, 32 * MIB, 600 * MIB) == 100 * MIB
    assert memory.array_size(16 * MIB, 32 * MIB, 16 << 30) == 16 * MIB
    assert memory.array_size(1 << 40, 32 * MIB, 600 * MIB) == 100 * MIB


def cache(root: Path, core: int, index: int, level: int, size: str, shared: str) -> None:
    """Write a cache of a core to sysfs below root."""
    directory = root / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
    directory.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (directory / name).write_text(f"{text}\n")


def test_each_last_level_cache_counts_once(memory: ModuleType, tmp_path: Path) -> None:
    """Sum last-level caches: a shared one counts once."""
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        cache(tmp_path, core, 0, 1, "32K", str(core))
        cache(tmp_path, core, 3, 3, "16384K", shared)
    assert memory.last_level_caches([0, 1], tmp_path) == 16 * MIB
    assert memory.last_level_caches(range(4), tmp_path) == 32 * MIB


def test_an_unknown_cache_is_taken_for_64_mib(memory: ModuleType, tmp_path: Path) -> None:
    """Read caches without sysfs: 64 MiB."""
    assert memory.last_level_caches([0], tmp_path) == 64 * MIB


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_the_containers_memory_limit_counts(memory: ModuleType, tmp_path: Path, limit: str, used: str) -> None:
    """Read free memory: the control group's limit less its use, else the machine's."""
    groups = tmp_path / "sys/fs/cgroup"
    (groups / limit).parent.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:     64 kB\n")
    assert memory.free_memory(tmp_path) == 64 << 10
    (groups / used).write_text("20000\n")
    (groups / limit).write_text("50000\n")
    assert memory.free_memory(tmp_path) == 30_000
    (groups / limit).write_text("max\n")
    assert memory.free_memory(tmp_path) == 64 << 10


# --- disk ---


@pytest.mark.parametrize(
    ("path", "kind"), [("/data/x", "nfs4"), ("/data", "nfs4"), ("/else/x", "overlay"), ("/data/in memory/x", "tmpfs")]
)
def test_the_file_system_is_that_of_the_nearest_mount(disk: ModuleType, path: str, kind: str) -> None:
    """Find a path's file system: that of the nearest mount."""
    assert disk.file_system(Path(path), MOUNTS) == kind


def test_of_two_mounts_on_one_directory_the_later_counts(disk: ModuleType) -> None:
    """Mount two file systems at one place: the later one counts."""
    assert disk.file_system(Path("/data"), f"{MOUNTS}26 22 0:42 / /data rw - ext4 /dev/sdb rw\n") == "ext4"


def test_a_directory_in_memory_is_no_disk(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in a tmpfs: InputError."""
    monkeypatch.setattr(scripts.disk, "file_system", lambda *_: "tmpfs")
    with pytest.raises(scripts.script_exit.InputError, match=r"is in memory \(tmpfs\)"):
        scripts.disk.SequentialRead(tmp_path, None)


@pytest.fixture
def on_disk(disk: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the test's folder as ext4, and set blocks to 64 KiB."""
    monkeypatch.setattr(disk, "file_system", lambda *_: "ext4")
    monkeypatch.setattr(disk, "BLOCK", 1 << 16)


@pytest.mark.usefixtures("on_disk")
def test_a_file_of_its_own_is_read_whole_and_leaves_no_name(disk: ModuleType, tmp_path: Path) -> None:
    """Read a file of its own: its size, a time above 0, correct bytes, no file left."""
    read = disk.SequentialRead(tmp_path, 10 << 16)
    assert read.parts == (("disk", "disk read", 10 << 16),)
    assert read.round()[0] > 0
    assert read.wrong() == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("on_disk")
def test_other_bytes_than_were_written_are_wrong(disk: ModuleType, tmp_path: Path) -> None:
    """Change a byte that was read: wrong() names the block."""
    read = disk.SequentialRead(tmp_path, 2 << 16)
    read.round()
    read._buffers[1][5] ^= 1
    assert read.wrong().startswith("block 1 read in ")


@pytest.mark.usefixtures("on_disk")
def test_a_file_that_is_there_is_read_in_whole_blocks_and_kept(disk: ModuleType, tmp_path: Path) -> None:
    """Read an existing file: whole blocks, and it stays."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"x" * (3 * (1 << 16) + 5))
    read = disk.SequentialRead(path, None)
    read.round()
    assert read.parts[0][2] == 3 << 16
    assert read.wrong() == ""
    assert path.stat().st_size == 3 * (1 << 16) + 5


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize(("name", "reason"), [("nothing", "No such file"), ("short", "less than")])
def test_what_cannot_be_read_is_refused(scripts: SimpleNamespace, tmp_path: Path, name: str, reason: str) -> None:
    """Read a missing or too short file: InputError."""
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(scripts.script_exit.InputError, match=reason):
        scripts.disk.SequentialRead(tmp_path / name, None)


@pytest.mark.usefixtures("on_disk")
def test_where_o_direct_is_refused_pages_are_dropped_instead(
    disk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse O_DIRECT: the pages are dropped by posix_fadvise."""
    plain, dropped = fcntl.fcntl, []

    def refuse(file: Any, command: int, flags: int = 0) -> int:
        """Raise EINVAL for O_DIRECT; else call fcntl."""
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(file, command, flags)

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    monkeypatch.setattr(disk.os, "posix_fadvise", lambda *arguments: dropped.append(arguments[1:]))
    read = disk.SequentialRead(tmp_path, 1 << 16)
    read.round()
    assert read.detail.startswith("POSIX_FADV_DONTNEED on ext4")
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)]
    assert read.wrong() == ""
