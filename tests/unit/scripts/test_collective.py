"""The collectives workload without torch: sizes, bandwidths and memory, compared with nccl-tests and arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.scripts.conftest import ImportScripts

FOLDER = Path(__file__).resolve().parents[3] / "workloads/allreduce"
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def sizes(import_scripts: ImportScripts) -> ModuleType:
    """Return the module sizes of workload allreduce."""
    module: ModuleType = import_scripts("allreduce", "sizes").sizes
    return module


def room(sizes: ModuleType, machine: str = "a", container: str = "a0", **free: int) -> Any:
    """Return a rank's Room with 10 GiB free; ``free`` replaces fields."""
    given = {"free_on_machine": 10 * GIB, "free_in_container": 10 * GIB, "free_on_device": 0, **free}
    return sizes.Room(machine=machine, container=container, **given)


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("4B", 4), ("64K", 65536), ("1m", MIB), ("2GiB", 2 * GIB)])
def test_sizes_are_read_in_powers_of_1024(sizes: ModuleType, text: str, size: int) -> None:
    """Parse sizes with units: bytes in powers of 1024."""
    assert sizes.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "1T", "-8", "8.5", "3", "0"])
def test_what_is_no_size_is_refused(sizes: ModuleType, text: str) -> None:
    """Parse invalid sizes: ValueError."""
    with pytest.raises(ValueError, match="is not a size"):
        sizes.parse_bytes(text)


def test_the_default_sizes_are_the_powers_of_two_from_8_bytes_to_1_gib(sizes: ModuleType) -> None:
    """Make the default series: 28 powers of two from 8 bytes to 1 GiB."""
    assert sizes.series(8, GIB, 2, "all_reduce", 4) == [8 << power for power in range(28)]


def test_the_largest_size_is_always_the_last(sizes: ModuleType) -> None:
    """Make a series whose factor misses the largest size: it is the last all the same."""
    assert sizes.series(8, 100, 4, "broadcast", 2) == [8, 32, 100]


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_every_rank_has_a_whole_part_and_no_size_comes_twice(sizes: ModuleType, operation: str) -> None:
    """Make a series for three ranks: multiples of all ranks' items, no size twice."""
    series = sizes.series(8, 1000, 2, operation, 3)
    assert series == [12, 24, 60, 120, 252, 504, 996]
    assert all(size % (3 * sizes.ITEM) == 0 for size in series)


def test_large_sizes_are_called_less_often_but_never_less_than_three_times(sizes: ModuleType) -> None:
    """Ask for iterations: fewer for large sizes, at least 3 measured unless 1 is asked for."""
    assert sizes.iterations(8, 20, GIB) == (5, 20)
    assert sizes.iterations(128 * MIB, 20, GIB) == (2, 8)
    assert sizes.iterations(4 * GIB, 20, GIB) == (1, 3)
    assert sizes.iterations(8, 1, GIB) == (1, 1)


# Columns of nccl-tests' own output and its doc/PERFORMANCE.md: 1 GB in 10 ms on 8 ranks.
@pytest.mark.parametrize(
    ("operation", "busbw"),
    [("all_reduce", 175.0), ("all_gather", 87.5), ("reduce_scatter", 87.5), ("all_to_all", 87.5), ("broadcast", 100.0)],
)
def test_bandwidths_are_those_of_nccl_tests(sizes: ModuleType, operation: str, busbw: float) -> None:
    """Compute bandwidths of 1 GB in 10 ms on 8 ranks: those of nccl-tests."""
    assert sizes.bandwidths(operation, 8, 1_000_000_000, 0.01) == (pytest.approx(100), pytest.approx(busbw))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_one_rank_alone_uses_no_bus(sizes: ModuleType, operation: str) -> None:
    """Compute the bus factor of one rank: 0."""
    assert sizes.bus_factor(operation, 1) == 0


def test_the_count_column_is_of_a_part_where_every_rank_has_one(sizes: ModuleType) -> None:
    """Count items: of the whole size, of a rank's part where each has one."""
    assert sizes.count("all_reduce", 4, 64) == 16
    assert sizes.count("all_gather", 4, 64) == 4


def test_ranks_of_one_machine_share_its_memory(sizes: ModuleType) -> None:
    """Check memory of two ranks: an obstacle only if they share a machine."""
    apart = [room(sizes, "a", "a0"), room(sizes, "b", "b0")]
    together = [room(sizes, "a", "a0"), room(sizes, "a", "a1")]
    assert sizes.obstacle(apart, 5 * GIB) == ""
    assert sizes.obstacle(together, 5 * GIB) == ("2 x 5.00 GiB on one machine of which 80% of 10.00 GiB may be filled")


def test_a_containers_own_limit_counts(sizes: ModuleType) -> None:
    """Check memory of two ranks in one container: its limit decides."""
    narrow = [room(sizes, free_in_container=3 * GIB), room(sizes, free_in_container=3 * GIB)]
    assert "2 x 2.00 GiB on one container" in sizes.obstacle(narrow, 2 * GIB)
    assert sizes.obstacle(narrow[:1], 2 * GIB) == ""


def test_where_there_is_a_device_its_memory_decides(sizes: ModuleType) -> None:
    """Check memory with devices: the device's free memory decides."""
    devices = [room(sizes, free_on_device=40 * GIB) for _ in range(8)]
    assert sizes.obstacle(devices, 30 * GIB) == ""
    assert "on one device" in sizes.obstacle(devices, 33 * GIB)


def test_buffers_and_the_backends_copies_are_counted(sizes: ModuleType) -> None:
    """Compute the memory of an operation: buffers and the backend's copies."""
    assert sizes.need("all_reduce", 2, GIB, 0.5) == 1.5 * GIB
    assert sizes.need("all_gather", 4, GIB, 1.0) == 2.25 * GIB
    assert sizes.need("all_to_all", 4, GIB, 0.0) == 2 * GIB


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_free_memory_is_read_from_either_control_groups(
    sizes: ModuleType, tmp_path: Path, limit: str, used: str
) -> None:
    """Read free memory: the machine's without a limit, else the control group's, of both versions."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:     64 kB\n")
    assert sizes.free_in_container(tmp_path) == sizes.free_on_machine(tmp_path) == 64 << 10
    groups = tmp_path / "sys/fs/cgroup"
    (groups / limit).parent.mkdir(parents=True)
    (groups / limit).write_text("50000\n")
    (groups / used).write_text("20000\n")
    assert sizes.free_in_container(tmp_path) == 30_000
    (groups / limit).write_text("max\n")
    assert sizes.free_in_container(tmp_path) == 64 << 10
