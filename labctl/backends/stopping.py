"""End a run that is followed: on Ctrl-C, or for a loss of its nodes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from labctl.jobs.job import GRACE
from labctl.model import Cause, Job, Lab


class RunStopper:
    """Ends a run for the first reason given, and keeps that reason."""

    def __init__(self, lab: Lab, job: Job) -> None:
        """Start without a reason."""
        self.lab, self.job = lab, job
        # Reentrant: a signal handler may interrupt the main thread while it holds the lock.
        self._lock = threading.RLock()
        self.over = threading.Event()
        self.cause: Cause | None = None
        self.message = ""
        self.asked = threading.Event()
        """Set by Ctrl-C."""
        self.gone: dict[str, str] = {}
        """Nodes that the run lost and goes on without, and the reason."""

    def note(self, cause: Cause, message: str) -> bool:
        """Keep the first cause and message, return True; return False for a later one or after the end."""
        with self._lock:
            if self.cause is not None or self.over.is_set():
                return False
            self.cause, self.message = cause, message
            return True

    def because(self, cause: Cause, message: str) -> None:
        """Note the cause and, if it is the first, end the run in a thread with GRACE seconds."""
        with self._lock:
            if self.note(cause, message):
                threading.Thread(target=self.end, args=(GRACE,), daemon=True).start()

    def end(self, grace: float) -> None:
        """End the run: TERM, and KILL after ``grace`` seconds."""
        raise NotImplementedError

    def close(self) -> None:
        """Ignore further reasons: the run has ended."""
        self.over.set()


@contextlib.contextmanager
def interrupts(stop: RunStopper, notice: Callable[[str], object]) -> Iterator[None]:
    """Stop the run on INT and TERM in the block, with a notice; a second one kills it; HUP ends this process alone."""

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        """Note ``interrupted`` and end the run; if it was interrupted before, kill it."""
        again = stop.asked.is_set()
        stop.asked.set()
        text = f"stopping the run ({GRACE} s), then collecting what ranks wait for; Ctrl-C again kills it"
        if again:
            text = "killing the run"
            threading.Thread(target=stop.end, args=(0,), daemon=True).start()
        # A handler must not print: it may interrupt a print.
        threading.Thread(target=notice, args=(text,), daemon=True).start()
        stop.because("interrupted", f"stopped by {signal.Signals(number).name}")

    # HUP ends this process at once, as KILL does: the agent ends the run unless it is followed again in time.
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
