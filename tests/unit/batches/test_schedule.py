from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.batches.schedule import AHEAD, JobQueue

NODES = tuple("abcd")
Jobs = tuple[tuple[str, ...], ...]


def jobs(*arguments: str) -> Jobs:
    """Build a job per argument, with a node for each of its letters."""
    return tuple(tuple(word) for word in arguments)


def test_jobs_on_disjoint_nodes_start_at_once_and_the_others_once_their_nodes_are_free() -> None:
    """Start a queue: jobs on disjoint nodes at once, the one that shares nodes when both are free."""
    queue = JobQueue(jobs("ab", "c", "bc", "d"))
    assert queue.start() == [0, 1, 3]
    assert queue.start() == []
    queue.end(0)
    assert queue.start() == []
    queue.end(1)
    assert queue.start() == [2]


def test_jobs_on_the_same_node_run_one_after_the_other_in_their_order() -> None:
    """Queue three jobs on one node: they run in order, one at a time."""
    queue, order = JobQueue(jobs("a", "a", "a")), list[int]()
    while queue:
        (index,) = queue.start()
        order.append(index)
        queue.end(index)
    assert order == [0, 1, 2]


def test_no_more_jobs_run_at_once_than_were_allowed() -> None:
    """Queue three jobs with parallel=2: the third starts when one ends."""
    queue = JobQueue(jobs("a", "b", "c"), parallel=2)
    assert queue.start() == [0, 1]
    queue.end(1)
    assert queue.start() == [2]


def test_without_jobs_there_is_nothing_to_wait_for() -> None:
    """Make a queue without jobs: it is false."""
    assert not JobQueue(())


def test_a_wide_job_is_overtaken_by_those_of_the_window_and_no_others() -> None:
    """Queue a job of two nodes among many single ones: at most the window's jobs start before it.

    Without held nodes, single jobs that end at different times would block it forever.
    """
    queue = JobQueue((("a",), ("a", "b"), *((NODES[number % 2],) for number in range(1, 1000))))
    started = queue.start()
    assert started == [0, 2]
    while 1 not in started:
        # Of the two that run, the one that began first ends.
        queue.end(min(queue.running))
        started += queue.start()
    assert len(started) - 2 <= AHEAD * 2
    assert started.index(1) > 2


def test_a_job_that_waits_does_not_leave_other_nodes_idle() -> None:
    """Queue jobs of which two must wait: later jobs on free nodes start at once."""
    queue = JobQueue(jobs("a", "ab", "b", "c", "cd", "d"))
    assert queue.start() == [0, 2, 3, 5]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Jobs, int, list[int]]:
    """Draw jobs, a limit of concurrent ones (0: none), and the job that ends at each step."""
    chosen = draw(st.lists(st.sets(st.sampled_from(NODES), min_size=1), min_size=1, max_size=200))
    return tuple(map(tuple, chosen)), draw(st.integers(0, 4)), draw(st.lists(st.integers(0, 3), min_size=1))


def steps(queue: JobQueue, ends: list[int]) -> Iterator[list[int]]:
    """Yield the jobs that start at first and after each end of a job, until none is left."""
    number = 0
    while queue:
        yield queue.start()
        running = sorted(queue.running)
        queue.end(running[ends[number % len(ends)] % len(running)])
        number += 1


@given(batches())
def test_every_job_runs_once_and_no_node_is_in_two_at_once(batch: tuple[Jobs, int, list[int]]) -> None:
    """Run drawn batches: each job once, no node twice at a time, never more than the limit."""
    nodes, parallel, ends = batch
    queue, begun = JobQueue(nodes, parallel), list[int]()
    for started in steps(queue, ends):
        begun += started
        in_use = [name for index in queue.running for name in nodes[index]]
        assert len(set(in_use)) == len(in_use)
        assert len(queue.running) <= (parallel or len(nodes))
    assert sorted(begun) == list(range(len(nodes)))


@given(batches())
def test_no_job_is_left_behind_by_more_than_the_window(batch: tuple[Jobs, int, list[int]]) -> None:
    """Run drawn batches: no job starts further ahead of the first waiting one than the window."""
    nodes, parallel, ends = batch
    queue, begun = JobQueue(nodes, parallel), set[int]()
    window = AHEAD * len({name for names in nodes for name in names})
    for started in steps(queue, ends):
        first = next(index for index in range(len(nodes) + 1) if index not in begun)
        begun.update(started)
        assert all(index <= first + window for index in started)


@given(batches())
def test_a_job_whose_nodes_are_free_starts_if_it_may(batch: tuple[Jobs, int, list[int]]) -> None:
    """Run drawn batches: no job within the window waits while its nodes and a place are free."""
    nodes, parallel, ends = batch
    queue, begun = JobQueue(nodes, parallel), set[int]()
    for started in steps(queue, ends):
        first = next(index for index in range(len(nodes) + 1) if index not in begun)
        begun.update(started)
        if parallel and len(queue.running) == parallel:
            continue
        in_use = {name for index in queue.running for name in nodes[index]}
        reached = range(min(len(nodes), first + AHEAD * len({name for names in nodes for name in names}) + 1))
        assert [index for index in reached if index not in begun and in_use.isdisjoint(nodes[index])] == []


@pytest.mark.parametrize("parallel", [0, 1])
def test_a_queue_is_done_once_its_last_job_has_ended(parallel: int) -> None:
    """Run a queue to its end: true until the last job has ended, then false."""
    queue = JobQueue(jobs("a", "b"), parallel)
    started = queue.start()
    while len(started) < 2:
        queue.end(started[-1])
        started += queue.start()
    for index in sorted(queue.running):
        assert queue
        queue.end(index)
    assert not queue
