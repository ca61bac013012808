"""Progress of long work: a line now and then, in units that people read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from msgspec import Struct, field

from labctl.system import human

PACE = 10.0
"""Seconds between two lines about work without a known size."""
At = Callable[[str], AbstractContextManager[None]]
"""Context manager that marks a name as busy while its block runs."""


class Progress(Struct):
    """Reports the progress of long work now and then; ``total`` and ``done`` in bytes."""

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
        """Add ``count`` bytes to the work that is done; report at most every ``every`` seconds."""
        self.done += count
        if self.clock() - self._marks[-1][0] >= self.every:
            share = human.share(self.done / max(1, self.total))
            self.notice(f"{self.label}: {share} of {human.size(self.total)}, {self._rate(self._marks[-1])}")
            self._marks.append((self.clock(), self.done))

    def finish(self) -> None:
        """Report 100 %, the bytes done since the start, the time and the rate."""
        began, before = self._marks[0]
        took = f"{human.size(self.done - before)} in {human.duration(self.clock() - began)}"
        self.notice(f"{self.label}: 100 %, {took}, {self._rate(self._marks[0])}")

    def _rate(self, since: tuple[float, int]) -> str:
        """Return the mean rate since a mark, as ``10 MB/s``."""
        return f"{human.size((self.done - since[1]) / max(self.clock() - since[0], 1e-3))}/s"


@contextmanager
def waiting(
    notice: Callable[[str], None], describe: Callable[[float], str], every: float | None = None
) -> Iterator[None]:
    """Report every 10 s, or ``every`` so many, while the block runs.

    ``describe`` gets the seconds so far and returns the line, or empty.
    """
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        """Report until the block is left; nothing while ``describe`` returns an empty text."""
        while not over.wait(every or PACE):
            if text := describe(time.monotonic() - began):
                notice(text)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def waiting_for(doing: str, notice: Callable[[str], None]) -> Iterator[At]:
    """Provide a context manager that marks a name as busy; report every 10 s which names are busy, and for how long."""
    began: dict[str, float] = {}

    @contextmanager
    def at(name: str) -> Iterator[None]:
        """Mark a name as busy during the block."""
        began[name] = time.monotonic()
        try:
            yield
        finally:
            del began[name]

    def describe(_: float) -> str:
        """Describe the busy names and how long the first has been busy; empty if none is."""
        now = dict(began)
        return f"{human.listed(now)}: {doing}, {human.duration(time.monotonic() - min(now.values()))}" if now else ""

    with waiting(notice, describe):
        yield at
