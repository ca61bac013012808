"""Steps of any backend."""

from __future__ import annotations

import pytest

from labctl.backends.plan import Step, shorten


def test_a_step_that_cannot_be_carried_out_is_a_bug() -> None:
    with pytest.raises(NotImplementedError, match=r"^Step$"):
        Step(cause="none").do(None)


def test_long_steps_are_cut_for_the_screen() -> None:
    assert shorten("x" * 110) == "x" * 110
    assert shorten("x" * 111) == "x" * 107 + "..."
