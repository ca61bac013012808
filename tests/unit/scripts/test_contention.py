"""The time that a rank loses to other programs, from readings of the kernel's counts."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest

from unit.scripts.conftest import ImportScripts


@pytest.fixture(scope="module")
def contention(import_scripts: ImportScripts) -> ModuleType:
    """Return the module contention of workload matmul."""
    module: ModuleType = import_scripts("matmul", "contention").contention
    return module


def waits(contention: ModuleType, *ready: float, **changes: float) -> Any:
    """Return Waits of threads that waited these seconds; ``changes`` replace counts."""
    counts = {"throttled": 0.0, "own": 0.0, "busy": 0.0, "stolen": 0.0, **changes}
    return contention.Waits(ready={str(number): seconds for number, seconds in enumerate(ready)}, **counts)


@pytest.mark.parametrize(
    ("ready", "changes", "lost"),
    [
        pytest.param((0.4, 0.1), {"busy": 1.6, "own": 1.0}, 0.4, id="others-had-its-core"),
        pytest.param((0.4,), {"busy": 1.0, "own": 0.8}, 0.2, id="others-used-less-than-it-waited"),
        pytest.param((0.5,), {"throttled": 0.5, "busy": 1.5, "own": 0.5}, 0.0, id="its-own-quota"),
        pytest.param((0.5, 0.5), {"throttled": 1.0, "busy": 2.0, "own": 1.0}, 0.0, id="its-own-quota-on-two-cores"),
        pytest.param((0.5,), {"busy": 0.5, "own": 0.5}, 0.0, id="a-quota-of-its-host"),
        pytest.param((), {"stolen": 0.3, "busy": 1.0, "own": 1.0}, 0.3, id="the-hypervisor"),
        pytest.param((0.0,), {"busy": 9.0}, 0.0, id="others-were-not-in-its-way"),
    ],
)
def test_time_is_lost_to_others_but_not_to_a_quota(
    contention: ModuleType, ready: tuple[float, ...], changes: dict[str, float], lost: float
) -> None:
    """Compute lost time: what others or the hypervisor took, not what a quota took."""
    before = waits(contention, *(0.0 for _ in ready))
    assert waits(contention, *ready, **changes).since(before) == pytest.approx(lost)


def test_a_quota_holds_back_each_thread_that_wants_to_run(contention: ModuleType) -> None:
    """Compute held time: the throttled time for each thread that wanted to run."""
    before = waits(contention, 0.0, 0.0, 0.0)
    assert waits(contention, 0.5, 0.5, 0.0, throttled=1.0).held_since(before) == pytest.approx(0.5)


def test_the_counts_of_this_process_grow(contention: ModuleType) -> None:
    """Read the counts around 0.05 s of work: own time grew by it, lost time is in bounds."""
    before = contention.read()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = contention.read()
    assert after.own - before.own >= 0.05
    assert after.busy >= before.busy
    assert 0 <= after.since(before) < 60
