"""How far a transfer of bytes is: a line now and then, in the units that people read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Tells now and then how much of something long is done; ``total`` and ``done`` in bytes."""

    label: str
    total: int
    done: int
    notice: Callable[[str], None]
    every: float = 5.0
    """Seconds between two lines."""
    clock: Callable[[], float] = time.monotonic
    _marks: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._marks.append((self.clock(), self.done))

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self.done += count
        if self.clock() - self._marks[-1][0] >= self.every:
            self.notice(f"{self.label}: {self._share()} % of {amount(self.total)}, {self._rate(self._marks[-1])}")
            self._marks.append((self.clock(), self.done))

    def finish(self) -> None:
        """The last line."""
        began, before = self._marks[0]
        seconds = self.clock() - began
        self.notice(
            f"{self.label}: 100 %, {amount(self.done - before)} in {seconds:.0f} s, {self._rate(self._marks[0])}"
        )

    def _share(self) -> int:
        return 100 * self.done // max(1, self.total)

    def _rate(self, since: tuple[float, int]) -> str:
        return f"{amount(round((self.done - since[1]) / max(self.clock() - since[0], 1e-3)))}/s"


def amount(size: int) -> str:
    """Bytes in the decimal units that the hub shows."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.{0 if size >= 100 * unit else 1}f} {name}"
    return f"{size} B"
