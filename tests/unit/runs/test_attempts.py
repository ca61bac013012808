"""Whether an attempt got further than the one before it, and whether another is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import job, lab

from labctl.config.context import Context
from labctl.jobs.request import RunOptions
from labctl.model import Cause, Event, Job, Lab, Result, Resume
from labctl.records import outlook, store
from labctl.records.verdict import error
from labctl.runs import attempts

KILLED = "rank 1 on worker-1 exited with code 137 (SIGKILL)"
LOST = "worker-1 (rank 1): container exited"


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Return a lab at tmp_path."""
    return lab(directory=tmp_path)


def result(run_id: str, cause: Cause = "rank-crashed", message: str = KILLED, reached: str = "", **more: Any) -> Result:
    """Build the result of an attempt that failed."""
    verdict, expected = error(cause, message), outlook.of(cause, message)
    return Result(
        run_id=run_id,
        workload="hello",
        launcher="mpirun",
        lab="demo",
        verdict=verdict.status,
        cause=cause,
        message=message,
        exit_code=verdict.exit_code,
        domain=expected.domain,
        retry=expected.retry,
        evidence=expected.evidence,
        notes={store.REACHED: reached} if reached else {},
        **more,
    )


def second(of: Lab, first: Result, resume: Resume | None = None, resumed: str = "") -> Job:
    """Record the first attempt, and return the job of the second."""
    (of.directory / "runs" / first.run_id).mkdir(parents=True)
    store.finish(of, first)
    made = job(of, run_id="r2")
    workload = replace(made.workload, resume=resume)
    return replace(made, workload=workload, retried=(f"{first.run_id}: {first.cause}: x",), resumed=resumed)


def cause_of(of: Lab, attempt: Job, reached: str, cause: Cause = "rank-crashed", message: str = KILLED) -> str | None:
    """Return the cause of the second attempt after comparing it with the first."""
    verdict, _ = attempts.compared(of.directory, attempt, error(cause, message), reached)
    return verdict.cause


def saved(of: Lab, *paths: str) -> None:
    """Create empty checkpoint files below runs/."""
    for path in paths:
        place = of.directory / "runs" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def test_two_attempts_that_end_at_the_same_step_make_no_progress(of: Lab) -> None:
    """End two attempts at the same step: ERROR, cause no-progress, exit code 7, outlook "does not"."""
    attempt = second(of, result("r1", reached="step 12 of 40"))
    verdict, found = attempts.compared(of.directory, attempt, error("rank-crashed", KILLED), "step 12 of 40")
    ended = "runs r1 and r2 ended at step 12 of 40, without a newer checkpoint"
    assert (verdict.status, verdict.cause, verdict.exit_code) == ("ERROR", "no-progress", 7)
    assert verdict.message == f"{ended} (rank-crashed): {KILLED}"
    assert found == outlook.Outlook("unknown", "does not", ended)


@pytest.mark.parametrize(
    ("before", "now"), [("step 12 of 40", "step 13 of 40"), ("", "step 1"), ("step 1", ""), ("epoch 1", "step 1")]
)
def test_attempts_that_end_at_different_steps_go_on(of: Lab, before: str, now: str) -> None:
    """End two attempts at different or unknown steps: the cause stays rank-crashed."""
    assert cause_of(of, second(of, result("r1", reached=before)), now) == "rank-crashed"


def test_the_first_attempt_is_compared_with_none(of: Lab) -> None:
    """Compare a job that is no retry: the cause stays."""
    assert cause_of(of, job(of), "step 12") == "rank-crashed"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("segfault at 0x7f12 in thread 99", "no-progress"),
        ("bus fault at 0x7f11 in thread 12", "rank-crashed"),
    ],
)
def test_without_steps_the_words_tell_but_for_their_numbers(of: Lab, words: str, cause: str) -> None:
    """End two attempts without steps: no-progress if the messages differ only in numbers."""
    ended = "rank 1 on worker-1 exited with code 1: fatal: "
    attempt = second(of, result("r1", message=f"{ended}segfault at 0x7f11 in thread 12"))
    assert cause_of(of, attempt, "", message=f"{ended}{words}") == cause


def test_a_node_that_is_lost_again_says_nothing_of_where_the_program_was(of: Lab) -> None:
    """Lose a node twice: node-lost without steps, no-progress at the same step."""
    attempt = second(of, result("r1", "node-lost", LOST))
    assert cause_of(of, attempt, "", "node-lost", LOST) == "node-lost"
    attempt = second(of, result("r3", "node-lost", LOST, "step 3"))
    assert cause_of(of, attempt, "step 3", "node-lost", LOST) == "no-progress"


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("interrupted", "stopped"),
        ("timeout", "timed out"),
        ("rank-crashed", "rank 1 on a exited with code 1: KeyError: 1"),
    ],
)
def test_what_is_not_tried_again_keeps_its_own_cause(of: Lab, cause: Cause, message: str) -> None:
    """End twice with a cause that is not retried: it stays."""
    assert cause_of(of, second(of, result("r1", reached="step 3")), "step 3", cause, message) == cause


@pytest.mark.parametrize(
    ("pattern", "resumed", "own", "cause"),
    [
        ("ckpt/*.pt", "", (), "no-progress"),
        ("ckpt/*.pt", "", ("r2/ckpt/1.pt",), "rank-crashed"),
        ("ckpt/*.pt", "r1/ckpt/9.pt", (), "no-progress"),
        ("ckpt/*.pt", "r1/ckpt/9.pt", ("r2/ckpt/9.pt",), "no-progress"),
        ("ckpt/*.pt", "r1/ckpt/9.pt", ("r2/ckpt/9.pt", "r2/ckpt/10.pt"), "rank-crashed"),
        # Of a file that is written again, the name does not tell.
        ("ckpt/last.pt", "r1/ckpt/last.pt", ("r2/ckpt/last.pt",), "rank-crashed"),
    ],
)
def test_a_newer_checkpoint_is_progress(of: Lab, pattern: str, resumed: str, own: tuple[str, ...], cause: str) -> None:
    """Save a checkpoint in the second attempt: newer than the resumed one, it is progress."""
    attempt = second(of, result("r1", reached="step 3"), Resume("--resume", pattern), resumed)
    saved(of, *own)
    assert cause_of(of, attempt, "step 3") == cause


def test_checkpoints_that_nothing_resumes_are_no_progress(of: Lab) -> None:
    """Save checkpoints of a workload that does not resume: no-progress."""
    attempt = second(of, result("r1", reached="step 3"))
    saved(of, "r2/ckpt/9.pt")
    assert cause_of(of, attempt, "step 3") == "no-progress"


@pytest.mark.parametrize(
    ("ended", "retries", "due"),
    [
        (result("r1", "node-lost", LOST), 1, True),
        (result("r1"), 1, True),
        (result("r1"), 0, False),
        (result("r1", "stalled", "no step and no line for 600 s"), 1, True),
        (result("r1", "timeout", "timed out"), 1, False),
        (result("r1", "interrupted", "stopped"), 1, False),
        (result("r1", "no-progress", "runs r0 and r1 ended at step 1"), 1, False),
        (replace(result("r1"), verdict="FAIL", cause="criteria", retry="unknown"), 1, False),
        (replace(result("r1"), verdict="PASS", cause=None, retry=None), 1, False),
    ],
)
def test_another_attempt_is_due_where_it_may_help(ended: Result, retries: int, *, due: bool) -> None:
    """Ask if another attempt is due: only with retries left and a cause that may go away."""
    assert attempts.is_due(ended, RunOptions(retries=retries)) is due


def told(ended: Result, options: RunOptions) -> list[str]:
    """Return the notices about a run that is not started again."""
    events: list[Event] = []
    context = Context(directory=Path(), environ={}, emit=events.append, flags={})
    attempts.tell_why_not(context, ended, options)
    return [event.text for event in events]


def test_why_a_run_is_not_started_again_is_said_where_retries_are_left() -> None:
    """Tell why a run is not retried: one notice if retries are left, none without or after a retry."""
    ended = result("r1", message="rank 1 on a exited with code 1: ModuleNotFoundError: No module named 'x'")
    said = "run r1 is not started again: trying again does not help: ModuleNotFoundError: No module named 'x'"
    assert told(ended, RunOptions(retries=2)) == [said]
    assert told(ended, RunOptions()) == []
    assert told(ended, RunOptions(retries=1, retried=("r0: x",))) == []
    missed = replace(ended, verdict="FAIL", cause="criteria")
    assert told(missed, RunOptions(retries=1))[0].startswith("run r1 is not started again: it ran to its end")
