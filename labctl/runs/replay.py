"""``labctl replay``: a recorded run is repeated with what it was launched with, or what has changed is listed."""

from __future__ import annotations

from labctl.backends import Backend
from labctl.errors import HostError
from labctl.jobs.replay import ReplayedRun


def require_same(backend: Backend, run: ReplayedRun) -> None:
    """Raise HostError listing all that a recorded run used and that has changed or is missing, if any."""
    hint = f"put that back, or run it as things are now: labctl run {run.job.workload.name}"
    missing = tuple(backend.not_replayable(run))
    if len(missing) == 1:
        raise HostError(f"run {run.job.run_id} cannot be replayed: {missing[0]}", hint=hint)
    if missing:
        lines = "".join(f"\n  {line}" for line in missing)
        raise HostError(f"run {run.job.run_id} cannot be replayed:{lines}", hint=hint)
