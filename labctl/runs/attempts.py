"""Attempts of a run: whether one got further than the one before, and whether another is due."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.config.context import Context
from labctl.jobs import checkpoints
from labctl.jobs.request import RunOptions
from labctl.model import Job, Result, Resume, Verdict
from labctl.records import outlook, store
from labctl.records.outlook import Outlook
from labctl.records.verdict import error

# What may differ between two attempts that end in the same way: addresses, process ids, times, the run's own id.
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def is_due(ended: Result, options: RunOptions) -> bool:
    """Tell if a run is to be started again: retries are left, and it may help."""
    return len(options.retried) < options.retries and not why_not(ended)


def why_not(ended: Result) -> str:
    """Return why a run is not started again; empty if that may help, or if it is not known that it does not."""
    if ended.verdict == "PASS":
        return "it passed"
    if ended.verdict == "FAIL":
        return "it ran to its end and is judged once; `labctl run --repeat N` tells how far its figures spread"
    if ended.cause == "interrupted":
        return "it was stopped"
    return f"trying again does not help: {ended.evidence}" if ended.retry == "does not" else ""


def tell_why_not(context: Context, ended: Result, options: RunOptions) -> None:
    """Say why a run that did not pass is not started again, if retries are left."""
    if ended.verdict != "PASS" and ended.cause != "no-progress" and len(options.retried) < options.retries:
        context.notice(f"run {ended.run_id} is not started again: {why_not(ended)}")


def compared(lab: Path, job: Job, verdict: Verdict, reached: str) -> tuple[Verdict, Outlook]:
    """Return verdict and outlook of an attempt: `no-progress` if it ended where the attempt before it did.

    ``reached`` is its last step; empty if it printed none. Only an end after which it would be tried again is compared.
    """
    of_its_own = outlook.of(verdict.cause, verdict.message)
    earlier = _earlier(lab, job)
    ends_here = verdict.status != "ERROR" or verdict.cause == "interrupted" or of_its_own.retry == "does not"
    if earlier is None or ends_here:
        return verdict, of_its_own
    place = _same_place(earlier, of_its_own, reached)
    if not place or _has_newer_checkpoint(lab, job):
        return verdict, of_its_own
    ended = f"{earlier.run_id} and {job.run_id} ended {place}, without a newer checkpoint"
    stopped = error("no-progress", f"runs {ended} ({verdict.cause}): {verdict.message}")
    return stopped, Outlook(of_its_own.domain, "does not", f"runs {ended}")


def _earlier(lab: Path, job: Job) -> Result | None:
    """Return the result of the attempt before; None for the first."""
    return store.read_result(lab, job.retried[-1].partition(": ")[0]) if job.retried else None


def _same_place(earlier: Result, ended: Outlook, reached: str) -> str:
    """Return the place where both attempts ended, in words; empty if one got further or nothing tells.

    Without steps the words of both tell, but not those of a lost node: how far the program was, they do not say.
    """
    before = earlier.notes.get(store.REACHED, "")
    if reached != before:
        return ""
    if reached:
        return f"at {reached}"
    if ended.domain == "infrastructure" or NUMBER.sub("", ended.evidence) != NUMBER.sub("", earlier.evidence):
        return ""
    return "before any step, with the same words"


def _has_newer_checkpoint(lab: Path, job: Job) -> bool:
    """Tell if an attempt saved a whole checkpoint that is newer than the one that it resumed."""
    declared = job.workload.resume
    if declared is None:
        return False
    own, _ = checkpoints.last_of(lab, job.run_id, declared)
    resumed = job.resumed.partition("/")[2]
    return own is not None and (not resumed or _is_newer(own.path, resumed, declared))


def _is_newer(path: str, resumed: str, declared: Resume) -> bool:
    """Tell if a checkpoint's path has a greater number than that of another; one of a fixed name is always newer."""
    is_fixed = not re.search(r"[*?[]", declared.checkpoint)
    return is_fixed or checkpoints.by_number(path) > checkpoints.by_number(resumed)
