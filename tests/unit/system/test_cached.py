from __future__ import annotations

import threading

from labctl.system.cached import once


class Asked:
    """A computation that waits until it is released."""

    def __init__(self) -> None:
        """Start unreleased, with no call counted."""
        self.let_go = threading.Event()
        self.times = 0

    @once
    def answer(self) -> int:
        """Wait for the release, count the call and return 7."""
        assert self.let_go.wait(60)
        self.times += 1
        return 7


def test_an_answer_is_asked_for_once() -> None:
    """Read the answer twice: computed once."""
    asked = Asked()
    asked.let_go.set()
    assert (asked.answer, asked.answer, asked.times) == (7, 7, 1)


def test_one_that_hangs_keeps_no_other_waiting() -> None:
    """Read the answer of two objects, one of which hangs: the other is computed."""
    hanging, well = Asked(), Asked()
    waiting = threading.Thread(target=lambda: hanging.answer)
    waiting.start()
    well.let_go.set()
    quick = threading.Thread(target=lambda: well.answer, daemon=True)
    quick.start()
    quick.join(5)
    assert (well.times, hanging.times) == (1, 0)
    hanging.let_go.set()
    waiting.join()
