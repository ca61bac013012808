from __future__ import annotations

import threading

from labctl.system.cached import once


class Asked:
    """A computation that waits until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.times = 0

    @once
    def answer(self) -> int:
        assert self.let_go.wait(60)
        self.times += 1
        return 7


def test_an_answer_is_asked_for_once() -> None:
    asked = Asked()
    asked.let_go.set()
    assert (asked.answer, asked.answer, asked.times) == (7, 7, 1)


def test_one_that_hangs_keeps_no_other_waiting() -> None:
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
