"""Turns of the matmul workload: who measures when, and what labctl reads of it."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from labctl.batches import turns as reading
from labctl.batches.evidence import Reading
from unit.scripts.conftest import ImportScripts


@pytest.fixture(scope="module")
def turns(import_scripts: ImportScripts) -> ModuleType:
    """Return the module turns of workload matmul."""
    module: ModuleType = import_scripts("matmul", "turns").turns
    return module


def test_nodes_of_one_host_are_never_measured_at_the_same_time(turns: ModuleType) -> None:
    """Order turns of nodes on two hosts, 20 seeds: nodes of one host never at once, in random order."""
    seats = [turns.Seat(name=name, host=host) for name, host in [("a", "x"), ("a", "x"), ("b", "x"), ("c", "y")]]
    firsts = set()
    for seed in range(20):
        steps = turns.order(seats, random.Random(seed))  # noqa: S311
        assert sorted(name for step in steps for name in step) == ["a", "b", "c"]
        assert not any({"a", "b"} <= step for step in steps)
        assert "c" in steps[0]
        firsts.add(min(steps[0] - {"c"}))
    assert firsts == {"a", "b"}


def test_a_node_is_as_fast_as_its_slowest_rank_and_labctl_reads_what_is_printed(turns: ModuleType) -> None:
    """Format turns: the slowest rank counts for a node, and labctl reads the lines back."""
    seats = [turns.Seat(name=name, host="x") for name in ("n0", "n0", "n1")]
    readings = [
        [(0.5, 0.1, 0.0), (0.6, 0.0, 0.0)],
        [(0.4, 0.2, 0.5), (0.7, 0.0, 0.0)],
        [(0.8, 0.0, 0.0), (0.9, 0.25, 0.0)],
    ]
    taken = [turn for number in range(2) for turn in turns.turns_of(number, seats, readings)]
    lines = [f"worker-0: {line}" for line in turns.lines(taken)]
    assert lines[0] == "worker-0: turn 0 of node 0 (n0): 0.4 TFLOP/s, lost 0.200 to others, 0.500 to its own quota"
    assert reading.read(["other text", *lines], ("worker-3", "worker-1")) == (
        {"worker-3": Reading(0.4, 0.2, corrected=True, held=0.5), "worker-1": Reading(0.8, 0.0, corrected=True)},
        {"worker-3": Reading(0.6, 0.0, corrected=True), "worker-1": Reading(0.9, 0.25, corrected=True)},
    )


def test_speed_is_that_of_the_time_in_which_it_could_run(turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with lost and held time: speed of the remaining time, and both shares."""

    class Waits:
        def since(self, _: object) -> float:
            """Return 0.5 s lost to others."""
            return 0.5

        def held_since(self, _: object) -> float:
            """Return 0.2 s held by a quota."""
            return 0.2

    clock = iter((10.0, 12.0))
    monkeypatch.setattr(turns.contention, "read", Waits)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    assert turns.measure(1.0, lambda _: 3.0) == (3.0 / 1.5, 0.25, 0.1)
