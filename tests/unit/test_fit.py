from __future__ import annotations

import pytest

from labctl.fit import check, needed
from labctl.model import Memory

GIB = 2**30


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    # The paper's figure 1: 7.5 billion parameters on 64 GPUs, in mixed precision with Adam.
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_figures_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    memory = Memory(parameters=7_500_000_000, trainable=7_500_000_000, zero_stage=stage, bytes_per_weight=2)
    assert needed(memory, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("trainable", "stage", "bytes_per_weight", "world_size", "expected"),
    [
        (100, 0, 2, 1, 100 * 16),
        (100, 0, 4, 1, 100 * 16),
        (100, 3, 4, 1, 100 * 16),
        (100, 2, 4, 4, 400 + 100 + 200),
        (100, 1, 4, 4, 400 + 400 + 200),
        (10, 0, 2, 1, 200 + 20 + 120),
        (10, 3, 2, 3, 67 + 7 + 40),
        (0, 0, 2, 1, 200),
    ],
)
def test_bytes_per_rank(trainable: int, stage: int, bytes_per_weight: int, world_size: int, expected: int) -> None:
    memory = Memory(parameters=100, trainable=trainable, zero_stage=stage, bytes_per_weight=bytes_per_weight)
    assert needed(memory, world_size) == expected


def test_what_does_not_fit_is_told_with_needed_and_available() -> None:
    memory = Memory(parameters=GIB, trainable=GIB, zero_stage=0, bytes_per_weight=2)
    message = check(memory, 2, 4, 31 * GIB)
    assert message is not None
    assert "at least 32.0 GiB per node, 31.0 GiB available" in message
    assert "2 ranks of 16.0 GiB" in message
    assert "activations" in message


@pytest.mark.parametrize("available", [32 * GIB, 64 * GIB])
def test_what_may_fit_gives_no_message(available: int) -> None:
    memory = Memory(parameters=GIB, trainable=GIB, zero_stage=0, bytes_per_weight=2)
    assert check(memory, 2, 4, available) is None
