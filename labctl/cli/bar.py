"""Progress of a run as the last line of a terminal; other output scrolls above it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from labctl.cli.output import PLAIN, USUAL_WIDTH, printable, width_of, write
from labctl.errors import OutputClosed, OutputFailed
from labctl.model import Progress
from labctl.system import human
from labctl.system.progress import waiting

# Resets the color first: a program may have left one set.
ERASE = f"\r{PLAIN}\033[K"
PACE = 0.2
"""Seconds between updates."""
DAY = 24 * 3600
"""Time limit of a program that has none of its own, in seconds: nobody asked for it."""
LINE_PACE = 30.0
"""Seconds between lines about progress where no line can be redrawn."""
BEYOND = 1.2
"""Share of its time limit that a run must be expected to take to be told of: an estimate is not exact."""
LONGEST, SHORTEST = 30, 8
"""Characters of the bar, at most and at least."""


class Bar:
    """Context manager that keeps the last line of a terminal up to date; ``text`` renders it for a given width."""

    def __init__(self, stream: TextIO, text: Callable[[int], str]) -> None:
        """Prepare the thread that updates the line."""
        self._stream, self._text = stream, text
        self._shown = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)

    def __enter__(self) -> Bar:
        """Start the thread that redraws the line."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating, and erase the line."""
        self._over.set()
        self._thread.join()
        with self._lock:
            if self._shown:
                write(ERASE, self._stream, end="")
            self._shown = ""

    def print(self, text: str) -> None:
        """Print text above the line in one write, and redraw the line below it."""
        with self._lock:
            write(f"{ERASE}{text}\n{self._shown}" if self._shown else f"{text}\n", self._stream, end="")

    def _keep_up(self) -> None:
        """Redraw the line at each PACE if its text changed, until the block ends or the stream cannot be written."""
        with suppress(OSError, OutputClosed, OutputFailed):
            while not self._over.wait(PACE):
                # Without the last column: some terminals wrap a line that reaches it.
                text = self._text((width_of(self._stream) or USUAL_WIDTH) - 1)
                with self._lock:
                    if text != self._shown:
                        write(f"{ERASE}{text}", self._stream, end="")
                        self._shown = text


@contextmanager
def noting(
    note: Callable[[str], None],
    progress: Callable[[], Progress],
    line: Callable[[Progress], str],
    every: float = LINE_PACE,
) -> Iterator[None]:
    """Note a run's progress every so many seconds in the block, and at its end if it has gone on since."""
    last: list[Progress] = []

    def text(_: float) -> str:
        """Return the progress as a line, and keep it as the last that was noted."""
        last[:] = [progress()]
        return line(last[0])

    with waiting(note, text, every):
        yield
    end = progress()
    if end.step is not None and [end] != last:
        note(line(end))


def progress_line(progress: Progress, age: float, limit: float) -> str:
    """Render a run's progress for a file: step, all metrics, and time left, or ``age`` and ``limit``."""
    step, time = step_text(progress) or "running", time_text(progress, age, limit)
    return "  ".join((step, *metric_texts(progress.metrics), time))


def progress_text(progress: Progress, age: float, limit: float, width: int) -> str:
    """Render a run's step, metrics that fit, and time left, or ``age`` and ``limit``, in ``width`` columns."""
    parts = [step_text(progress) or "running", time_text(progress, age, limit)]
    for text in metric_texts(progress.metrics):
        if len("  ".join((*parts, text))) <= width:
            parts.insert(-1, text)
    return with_bar(progress, parts, width)


def time_text(progress: Progress, age: float, limit: float) -> str:
    """Render the time that a run has left, or if it is unknown its ``age``, with its ``limit`` below a day."""
    if progress.seconds_left is None:
        return clock(age) + (f" (limit {human.duration(limit)})" if limit < DAY else "")
    left = f"{clock(progress.seconds_left)} left"
    if age + progress.seconds_left > BEYOND * limit:
        return f"{left}, more than --timeout ({clock(limit)}) allows"
    return left


def with_bar(progress: Progress, parts: list[str], width: int) -> str:
    """Join texts to a line cut to ``width``; insert a bar if it fits and step and number of steps are known."""
    room = min(LONGEST, width - len("  ".join((*parts, ""))))
    if progress.step is not None and progress.steps and room >= SHORTEST:
        parts.insert(1, drawn(progress.step / progress.steps, room))
    return "  ".join(parts)[: max(0, width)]


def step_text(progress: Progress) -> str:
    """Render the step, as ``step 12/100``, or ``step 12`` without a known end; empty if the step is unknown."""
    if progress.step is None:
        return ""
    if not progress.steps:
        return f"{progress.counts} {progress.step}"
    return f"{progress.counts} {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def metric_texts(metrics: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Yield each metric as ``NAME VALUE UNIT``, loss and throughput first."""
    first = [name for name in ("loss", "throughput") if name in metrics]
    for name in (*first, *(name for name in metrics if name not in first)):
        yield printable(f"{name} {human.figure(metrics[name])} {metrics[name]['unit']}".rstrip())


def drawn(share: float, width: int) -> str:
    """Draw a bar of ``width`` characters, filled up to a share between 0 and 1."""
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done + "─" * (width - done)


def clock(seconds: float) -> str:
    """Format seconds as ``1:05`` or ``2:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
