"""Batches on a simulated clock; `python tests/batch_scale.py` measures larger ones."""

from __future__ import annotations

import tracemalloc

import pytest
from batch_scale import MIXES, Jobs, durations_of, random_pairs, run, simulate

from labctl.batches.batch import FOLLOWED
from labctl.batches.schedule import AHEAD, JobQueue

# Seconds that a job takes in the mean.
SECONDS = 600


def test_labctls_own_time_is_less_than_a_twentieth_of_what_a_batch_takes() -> None:
    """Simulate 400 jobs on 200 nodes: overhead and labctl's own time are each below 5 %."""
    jobs = random_pairs(200, 400)
    outcome = simulate(200, jobs, durations_of(jobs, SECONDS), every=8)
    assert outcome.overhead < 0.05
    assert sum(outcome.costs.values()) < 0.05 * outcome.ideal


@pytest.mark.parametrize("mix", MIXES)
def test_jobs_take_no_more_than_a_twentieth_longer_than_the_busiest_node_is_in_use(mix: str) -> None:
    """Simulate 4000 jobs of each mix: at most 5 % above the busiest node's time, overtaking within the window."""
    make, most = MIXES[mix]
    nodes = max(4, most // 4)
    jobs = make(nodes, 4000)
    outcome = run(jobs, durations_of(jobs, SECONDS))
    assert outcome.overhead < 0.05
    assert outcome.overtaken <= AHEAD * nodes


def test_a_job_on_all_of_four_nodes_is_overtaken_by_no_more_than_the_window() -> None:
    """Simulate wide jobs among single ones: overtaken, but by no more than AHEAD * 4 jobs."""
    jobs: Jobs = [("a", "b", "c", "d") if number % 101 == 0 else ("abcd"[number % 4],) for number in range(1, 4000)]
    outcome = run(jobs, durations_of(jobs, SECONDS))
    assert 0 < outcome.overtaken <= AHEAD * 4


def test_the_queue_of_ten_thousand_jobs_takes_less_than_a_kilobyte_for_each() -> None:
    """Measure a queue of 10,000 jobs: memory peaks below 1000 bytes for each."""
    jobs = random_pairs(1000, 10_000)
    tracemalloc.start()
    try:
        queue = JobQueue(jobs, FOLLOWED)
        for _ in range(20):
            for index in queue.start():
                queue.end(index)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1000 * len(jobs)
