"""How far a run is, as the last line of a terminal: what is printed meanwhile scrolls above it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from labctl.cli.output import PLAIN, figure, printable, write
from labctl.errors import OutputClosed
from labctl.model import Progress

# Also of a line that a program ended in a color of its own.
ERASE = f"\r{PLAIN}\033[K"
# Seconds between two looks at how far the run is.
PACE = 0.2
# Characters of the bar itself, at most and at least.
LONGEST, SHORTEST = 30, 8


class Bar:
    """The last line of a terminal, for the time of a block; ``text`` makes it for so many columns."""

    def __init__(self, stream: TextIO, text: Callable[[int], str]) -> None:
        self._stream, self._text = stream, text
        self._shown = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)

    def __enter__(self) -> Bar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with self._lock:
            if self._shown:
                write(ERASE, self._stream, end="")
            self._shown = ""

    def print(self, text: str) -> None:
        """Print above it, all in one write: in between nothing is seen."""
        with self._lock:
            write(f"{ERASE}{text}\n{self._shown}" if self._shown else f"{text}\n", self._stream, end="")

    def _keep_up(self) -> None:
        with suppress(OSError, OutputClosed):
            while not self._over.wait(PACE):
                # The last column is left free: some terminals wrap a line that reaches it.
                text = self._text(columns(self._stream) - 1)
                with self._lock:
                    if text != self._shown:
                        write(f"{ERASE}{text}", self._stream, end="")
                        self._shown = text


def columns(stream: TextIO) -> int:
    """The width of a terminal now, 80 where it does not say."""
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def progress_text(progress: Progress, age: float, limit: float, width: int) -> str:
    """How far a run is, in one line of at most so many columns: where it is narrow, with fewer metrics and no bar."""
    time = f"{clock(age)} of {clock(limit)}"
    if progress.seconds_left is not None:
        time = f"{clock(progress.seconds_left)} left"
    parts = [step_text(progress) or "running", time]
    for text in metric_texts(progress.metrics):
        if len("  ".join((*parts, text))) <= width:
            parts.insert(-1, text)
    return with_bar(progress, parts, width)


def with_bar(progress: Progress, parts: list[str], width: int) -> str:
    """These in one line of at most so many columns, and a bar behind the first, where there is room for one."""
    room = min(LONGEST, width - len("  ".join((*parts, ""))))
    if progress.step is not None and progress.steps and room >= SHORTEST:
        parts.insert(1, drawn(progress.step / progress.steps, room))
    return "  ".join(parts)[: max(0, width)]


def step_text(progress: Progress) -> str:
    """As ``step 12/100``; empty where the run has not said."""
    if progress.step is None:
        return ""
    if not progress.steps:
        return f"{progress.counts} {progress.step}"
    return f"{progress.counts} {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def metric_texts(metrics: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Each metric with its last value, loss and throughput first."""
    first = [name for name in ("loss", "throughput") if name in metrics]
    for name in (*first, *(name for name in metrics if name not in first)):
        yield printable(f"{name} {figure(metrics[name])} {metrics[name]['unit']}".rstrip())


def drawn(share: float, width: int) -> str:
    """A bar of so many characters."""
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done + "─" * (width - done)


def clock(seconds: float) -> str:
    """As ``1:05`` or ``2:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
