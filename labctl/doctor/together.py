"""Tasks side by side, each with its time: one that does not answer holds up neither the others nor the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
WIDTH = 16
"""Tasks at once: most wait for a program, and a laptop has few cores."""


def together(works: Sequence[tuple[Callable[[], Iterable[T]], float]]) -> list[tuple[T, ...] | None]:
    """What each yields, in their order; None for one that does not end within its seconds."""
    gate = threading.Semaphore(WIDTH)
    tasks: list[Task[T]] = []
    for work, limit in works:
        while not gate.acquire(timeout=1):
            for task in tasks:
                task.give_up()
        tasks.append(Task(work, limit, gate))
    return [task.answers() for task in tasks]


class Task(Generic[T]):
    """Something that yields answers, in a thread that the process does not wait for when it ends."""

    def __init__(self, work: Callable[[], Iterable[T]], limit: float, gate: threading.Semaphore) -> None:
        self._work, self._gate = work, gate
        self._deadline = time.monotonic() + limit
        self._answers: tuple[T, ...] | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self._left = threading.Lock()
        threading.Thread(target=self._go, daemon=True).start()

    def _go(self) -> None:
        try:
            self._answers = tuple(self._work())
        except BaseException as failure:  # noqa: BLE001 - raised anew where the answers are asked for
            self._failure = failure
        self._done.set()
        self._leave()

    def _leave(self) -> None:
        """Make room for another, once."""
        if self._left.acquire(blocking=False):
            self._gate.release()

    def give_up(self) -> None:
        """Make room although it has not ended, once its time is up."""
        if time.monotonic() >= self._deadline:
            self._leave()

    def answers(self) -> tuple[T, ...] | None:
        """What it yielded; None when its time is up before it has ended. Raises what it raised."""
        if not self._done.wait(max(0.0, self._deadline - time.monotonic())):
            return None
        if self._failure:
            raise self._failure
        return self._answers
