"""Steps of any backend."""

from __future__ import annotations

import pytest

from labctl.backends.plan import Step


def test_a_step_that_cannot_be_carried_out_is_a_bug() -> None:
    """do() of the base class Step raises NotImplementedError."""
    with pytest.raises(NotImplementedError, match=r"^Step$"):
        Step(cause="none").do(None)
