"""Pace of earlier runs of a workload, by which a silence of the next one is judged."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from labctl.model import Job, Pace
from labctl.records import store

MOST = 20
"""Latest runs of the lab that are searched."""


def earlier(lab: Path, job: Job) -> Pace:
    """Return the pace of the latest run that passed with this job's program and ranks; an unknown one without such."""
    for run_id in islice(store.ids(lab), MOST):
        result = store.read_result(lab, run_id)
        if not result or not result.pace or result.verdict != "PASS" or result.workload != job.workload.name:
            continue
        declared = store.workload(store.directory(lab, run_id))
        same_program = (declared.launcher, declared.arguments) == (job.workload.launcher, job.workload.arguments)
        if same_program and result.world_size == job.ranks:
            return result.pace
    return Pace()
