"""The timeline of a made-up batch."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.batches.record import Batch, BatchJob
from labctl.ui.timeline import NARROW, ROW, WIDE, lay_out, table


def job(name: str, *nodes: str, **changes: Any) -> BatchJob:
    """Return a job that passed in seconds 0 to 10."""
    usual = {"state": "done", "verdict": "PASS", "began": 1000.0, "ended": 1010.0, "run_id": f"run-{name}"}
    usual |= {"job": name, "set": "s", "hostfile": name, "names": nodes, "nodes": nodes, "log": f"{name}.log"}
    return BatchJob(**{**usual, **changes})


def batch(*jobs: BatchJob) -> Batch:
    """Return a batch of jobs."""
    return Batch(workload="opt", lab="demo", metric="throughput", unit="samples/s", timeout=9, began=1000, jobs=jobs)


def test_nodes_are_rows_and_a_job_on_neighbours_is_one_block() -> None:
    shown = lay_out([batch(job("a", "worker-2", "worker-10", "worker-1"), job("b", "worker-3"))], 1010)
    assert shown.nodes == ("worker-1", "worker-2", "worker-3", "worker-10")
    assert [(block.run, block.top // ROW, round(block.height / ROW)) for block in shown.blocks] == [
        ("run-a", 0, 2),
        ("run-a", 3, 1),
        ("run-b", 2, 1),
    ]


def test_blocks_follow_each_other_in_time() -> None:
    shown = lay_out([batch(job("a", "n0"), job("b", "n0", began=1010.0, ended=1030.0))], 1030)
    first, second = shown.blocks
    assert first.left == 0
    assert first.left + first.width < second.left + 1
    assert second.width == pytest.approx(2 * first.width, abs=3)
    assert second.left + second.width <= shown.width


def test_a_job_under_way_lasts_until_now_and_one_that_waits_is_counted() -> None:
    waiting = job("c", "n0", state="waiting", verdict="", began=None, ended=None, run_id="")
    running = job("b", "n0", state="running", verdict="", ended=None)
    shown = lay_out([batch(running, waiting)], 1060)
    (block,) = shown.blocks
    assert (block.text, block.kind, shown.waiting, shown.seconds) == ("b running", "running", 1, 60)
    assert block.title == "b on n0: running, 60 s"


def test_a_job_that_failed_says_why_in_words() -> None:
    failed = job("b", "n0", verdict="ERROR", cause="stalled", message="no output for 60 s")
    (block,) = lay_out([batch(failed)], 1010).blocks
    assert (block.text, block.kind) == ("b ERROR (stalled)", "error")
    assert block.title == "b on n0: ERROR (stalled), 10 s: no output for 60 s"


def test_a_block_has_the_part_of_its_jobs_name_that_tells_it_from_others() -> None:
    blocks = lay_out([batch(job("2xN_batch0007", "n0", repeat=2))], 1010).blocks
    assert [block.text for block in blocks] == ["batch0007 (2) PASS"]


def test_a_batch_that_did_not_begin_has_rows_and_no_blocks() -> None:
    waiting = job("c", "n0", state="waiting", verdict="", began=None, ended=None)
    shown = lay_out([batch(waiting)], 1000)
    assert (shown.nodes, shown.blocks, shown.width) == (("n0",), (), NARROW)


def test_five_hundred_jobs_on_64_nodes_have_room_for_name_and_verdict_each() -> None:
    jobs = []
    for number in range(500):
        nodes = [f"n{node}" for node in range(64) if node % 8 == number % 8]
        began = 1000.0 + 10 * (number // 8)
        jobs.append(job(str(number), *nodes, began=began, ended=began + 10))
    shown = lay_out([batch(*jobs)], 2000)
    assert len(shown.nodes) == 64
    assert min(block.width for block in shown.blocks) > 100
    assert shown.width <= WIDE + NARROW
    assert len(shown.ticks) <= shown.width / 100 + 1


def test_a_long_job_beside_short_ones_leaves_the_timeline_within_its_limit() -> None:
    jobs = [job(str(number), "n0", began=1000.0 + number, ended=1001.0 + number) for number in range(9)]
    shown = lay_out([batch(*jobs, job("long", "n1", ended=90_000.0))], 90_000)
    assert shown.width <= WIDE + NARROW
    assert min(block.width for block in shown.blocks) >= 4


def test_the_table_says_the_same_in_words() -> None:
    rounds = [batch(job("a", "n0", value=10.0), job("b", "n1", value=5.0)), batch(job("c", "n1", value=5.0))]
    rows = table(rounds, 1010, rounds=True)
    assert [(row.job, row.round, row.nodes, row.word, row.value, row.share_of_median) for row in rows] == [
        ("a", 1, ("n0",), "PASS", "10 samples/s", "133 %"),
        ("b", 1, ("n1",), "PASS", "5 samples/s", "66.7 %"),
        ("c", 2, ("n1",), "PASS", "5 samples/s", ""),
    ]
