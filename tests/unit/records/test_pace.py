"""The pace of earlier runs of the same program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders import job, lab

from labctl.model import Job, Pace, Result
from labctl.records import pace, store
from labctl.records.lines import Line
from labctl.records.progress import Tracker

PACE = Pace(first_step=12.5, longest_step=3.25)


def record(directory: Path, ended: Job) -> None:
    """Record a run of a job that passed with PACE."""
    declared = {"launcher": ended.workload.launcher, "arguments": ended.workload.arguments}
    store.create(lab(directory=directory), ended.run_id, ())
    path = store.directory(directory, ended.run_id) / "job.json"
    path.write_text(json.dumps({"job": {"workload": declared}}))
    passed = Result(
        run_id=ended.run_id,
        workload=ended.workload.name,
        launcher=ended.workload.launcher,
        lab="lab",
        verdict="PASS",
        cause=None,
        message="",
        exit_code=0,
        world_size=ended.ranks,
        pace=PACE,
    )
    store.finish(lab(directory=directory), passed)


def test_the_latest_run_of_the_same_program_and_ranks_tells(tmp_path: Path) -> None:
    """Look before and after a run of the program is recorded: nothing, then its pace."""
    assert pace.earlier(tmp_path, job()) == Pace()
    record(tmp_path, job(run_id="20260101-100000-hello-000001"))
    assert pace.earlier(tmp_path, job()) == PACE


@pytest.mark.parametrize(
    "changes",
    [{"verdict": "ERROR"}, {"world_size": 16}, {"pace": None}, {"workload": "other"}],
    ids=["failed", "other ranks", "no steps", "other workload"],
)
def test_a_run_that_says_nothing_of_this_one_is_passed_over(tmp_path: Path, changes: dict[str, object]) -> None:
    """Record a run that failed, had other ranks, no steps or another workload: nothing is known."""
    ended = job(run_id="20260101-100000-hello-000001")
    record(tmp_path, ended)
    written = store.directory(tmp_path, ended.run_id) / "result.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), **changes}))
    assert pace.earlier(tmp_path, job()) == Pace()


def test_the_first_step_counts_from_the_first_line_and_a_checkpoint_between_steps_is_the_longest() -> None:
    """Print step 1 after 20 s, then steps of 1 s with a pause of 9 s: 20 s and 9 s."""
    tracker = Tracker(())
    assert tracker.pace is None
    times = {0: "loading", 20: "step 1/9", 21: "step 2/9", 30: "step 3/9", 31: "step 4/9"}
    tracker.read([Line(when=100.0 + second, text=text, rank=0) for second, text in times.items()])
    assert tracker.pace == Pace(first_step=20, longest_step=9)
