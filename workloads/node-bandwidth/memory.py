"""STREAM's four kernels on this node's memory, with torch's threads on all of its cores.

After J. McCalpin's stream.c and its rules (https://www.cs.virginia.edu/stream/ref.html): float64 arrays, each at least
four times the last-level caches together; the bytes counted are those that the kernel names, 2 arrays for copy and
scale, 3 for add and triad. Caches that read what they are about to write move a third to a half more than that.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

ITEM = 8
"""Bytes of a float64."""
KERNELS = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
"""Arrays that each reads or writes, as stream.c counts bytes."""
SCALAR = 3.0
TOLERANCE = 1e-13
"""Relative error of a value, as in stream.c's check for float64."""
SMALLEST = 1_000_000 * ITEM
"""STREAM's smallest array."""
UNKNOWN_CACHE = 64 << 20
"""Bytes of cache where /sys does not say: as much as most machines have."""
SHARE = 0.5
"""Share of the free memory that the three arrays may fill."""


class Stream:
    """Three arrays of so many bytes each. A round is copy, scale, add and triad, in STREAM's order."""

    def __init__(self, size: int, caches: int) -> None:
        """Allocate three float64 arrays of ``size`` bytes each, with torch on all usable cores."""
        import torch

        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(cores)
        values = size // ITEM
        # Filled by the threads that will work on them, so that each part lies near its core.
        self._a, self._b, self._c = (torch.full((values,), start, dtype=torch.float64) for start in (1.0, 2.0, 0.0))
        self._rounds = 0
        self.parts = tuple(
            ("memory" if name == "triad" else f"memory-{name}", f"memory {name}", arrays * values * ITEM)
            for name, arrays in KERNELS.items()
        )
        small = f", below four times the cache of {caches / (1 << 20):.0f} MiB" if size < 4 * caches else ""
        self.detail = f"{cores} thread{'s' * (cores != 1)}, arrays of {size / (1 << 20):.0f} MiB{small}"

    def round(self) -> tuple[float, ...]:
        """Run copy, scale, add and triad; return the seconds of each."""
        import torch

        a, b, c = self._a, self._b, self._c
        self._rounds += 1
        at = [time.perf_counter()]
        c.copy_(a)
        at.append(time.perf_counter())
        torch.mul(c, SCALAR, out=b)
        at.append(time.perf_counter())
        torch.add(a, b, out=c)
        at.append(time.perf_counter())
        torch.add(b, c, alpha=SCALAR, out=a)
        at.append(time.perf_counter())
        return tuple(end - begin for begin, end in pairwise(at))

    def wrong(self) -> str:
        """Return an error text if any value of an array differs from the expected one; empty if none does."""
        for name, array, value in zip("abc", (self._a, self._b, self._c), expected(self._rounds), strict=True):
            least, most = (float(end) for end in array.aminmax())
            if not max(value - least, most - value) <= TOLERANCE * value:
                return f"array {name} has values from {least:.17g} to {most:.17g}, not {value:.17g}"
        return ""


def expected(rounds: int) -> tuple[float, float, float]:
    """Return the value of each array after so many rounds."""
    a, b, c = 1.0, 2.0, 0.0
    for _ in range(rounds):
        c = a
        b = SCALAR * c
        c = a + b
        a = b + SCALAR * c
    return a, b, c


def array_size(asked: int | None, caches: int, free: int) -> int:
    """Return an array's bytes: as asked, else four times the caches, at most a third of SHARE of the free memory."""
    return min(asked or max(4 * caches, SMALLEST), int(SHARE * free) // 3) // ITEM * ITEM


def last_level_caches(cores: Iterable[int], root: Path = Path("/")) -> int:
    """Return the bytes of these cores' last-level caches, each counted once; UNKNOWN_CACHE if unknown."""
    sizes: dict[str, int] = {}
    for core in cores:
        levels: dict[int, tuple[str, int]] = {}
        for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            with suppress(OSError, ValueError):
                level = int((index / "level").read_text())
                size = int((index / "size").read_text().strip().removesuffix("K")) << 10
                levels[level] = ((index / "shared_cpu_list").read_text().strip(), size)
        if levels:
            shared, size = levels[max(levels)]
            sizes[shared] = size
    return sum(sizes.values()) or UNKNOWN_CACHE


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that are available on the machine and within the container's cgroup limit."""
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    available = int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)[1]) << 10
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # Without a limit version 2 says `max`.
        with suppress(OSError, ValueError):
            return min(available, int((groups / limit).read_text()) - int((groups / used).read_text()))
    return available
