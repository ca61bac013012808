"""Sizes, iterations, bandwidths and memory of a measurement, without torch.

Sizes and bandwidths are those of nccl-tests, so that figures can be compared with its own (doc/PERFORMANCE.md there).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ITEM = 4
"""Bytes of a float32."""
PER_RANK = ("all_gather", "reduce_scatter", "all_to_all")
"""Operations whose buffer has a part for every rank."""
OPERATIONS = ("all_reduce", "broadcast", *PER_RANK)
SHARE = 0.8
"""Share of the free memory that may be filled."""
UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_bytes(text: str) -> int:
    """Parse ``8``, ``64M`` or ``1G`` (powers of 1024) into bytes. ValueError otherwise, or below 4 bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) << UNITS[match[2].upper()] < ITEM:
        raise ValueError(f"`{text}` is not a size of at least {ITEM} bytes, such as 8, 64M or 1G")
    return int(match[1]) << UNITS[match[2].upper()]


def series(smallest: int, largest: int, factor: int, operation: str, world: int) -> list[int]:
    """Return the sizes in bytes from ``smallest``, times ``factor`` each, to ``largest``, which is always the last.

    Rounded to whole values, and where every rank has a part to whole parts: at least one value per rank.
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    step = ITEM * world if operation in PER_RANK else ITEM
    return list(dict.fromkeys(max(1, size // step) * step for size in [*sizes, largest]))


def iterations(size: int, most: int, budget: int) -> tuple[int, int]:
    """Return the numbers of warm-up and timed calls: ``most`` timed, fewer if they exceed the byte budget."""
    timed = max(min(3, most), min(most, budget // size))
    return max(1, timed // 4), timed


def bus_factor(operation: str, world: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it."""
    if operation == "all_reduce":
        return 2 * (world - 1) / world
    return (world - 1) / world if operation in PER_RANK else 1.0


def bandwidths(operation: str, world: int, size: int, seconds: float) -> tuple[float, float]:
    """Return algorithm bandwidth and bus bandwidth in GB/s (10^9)."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * bus_factor(operation, world)


def count(operation: str, world: int, size: int) -> int:
    """Return the column ``count``: float32 values of the buffer, or of a rank's part if each rank has one."""
    return size // ITEM // (world if operation in PER_RANK else 1)


# --- memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Bytes that one rank found free: on its machine, in its container, and on its device (0: it has none)."""

    machine: str
    container: str
    free_on_machine: int
    free_in_container: int
    free_on_device: int


def need(operation: str, world: int, size: int, scratch: float) -> int:
    """Return the bytes that one rank takes: the script's buffers and the backend's ``scratch`` share of the size."""
    buffers = {"all_reduce": 1.0, "broadcast": 1.0, "all_to_all": 2.0}.get(operation, 1 + 1 / world)
    return int(size * (buffers + scratch))


def obstacle(rooms: Sequence[Room], each: int) -> str:
    """Return the reason why ``each`` bytes per rank do not fit, or "": ranks of a machine share its memory."""
    for room in rooms:
        if room.free_on_device:
            places = [("device", 1, room.free_on_device)]
        else:
            places = [
                ("machine", sum(other.machine == room.machine for other in rooms), room.free_on_machine),
                ("container", sum(other.container == room.container for other in rooms), room.free_in_container),
            ]
        for place, ranks, free in places:
            if ranks * each > SHARE * free:
                return f"{ranks} x {gib(each)} on one {place} of which {SHARE:.0%} of {gib(free)} may be filled"
    return ""


def gib(size: int) -> str:
    """Format bytes as ``1.50 GiB``."""
    return f"{size / (1 << 30):.2f} GiB"


def free_on_machine(root: Path = Path("/")) -> int:
    """Return MemAvailable of /proc/meminfo in bytes; 0 if it is missing."""
    text = (root / "proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def free_in_container(root: Path = Path("/")) -> int:
    """Return the bytes left below the cgroup's limit, at most the machine's free memory; that without a limit."""
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        (groups / "memory.max", groups / "memory.current"),
        (groups / "memory/memory.limit_in_bytes", groups / "memory/memory.usage_in_bytes"),
    ):
        try:
            return min(int(limit.read_text()) - int(used.read_text()), free_on_machine(root))
        except (OSError, ValueError):
            continue
    return free_on_machine(root)
