"""Build the job of `labctl replay`: a recorded run again, with its recorded options and files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import ConfigError, HostError
from labctl.jobs.job import WORK
from labctl.model import Copy, File, Job
from labctl.records import store
from labctl.system.decode import decode


class Origin(Struct, frozen=True):
    """Parts of a run's ``versions.json`` that a replay needs."""

    image: str
    images: dict[str, str | None]
    devices: dict[str, list[dict[str, str]]]
    code: list[dict[str, Any]]
    cache: dict[str, dict[str, str | None]]


class ReplayedRun(Struct, frozen=True, kw_only=True):
    """A recorded run; ``files``, ``code`` and ``shared`` are digests, ``settings`` as shown in its record."""

    path: Path
    job: Job
    files: dict[str, str]
    code: dict[str, str]
    shared: dict[str, str]
    settings: dict[str, str]
    origin: Origin


def read(lab: Path, run_id: str) -> ReplayedRun:
    """Read an ended run's record to repeat it. ConfigError if it is running, HostError if its record lacks parts."""
    if store.state(lab, run_id) == "running":
        raise ConfigError(f"run {run_id} is still running", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    path = store.directory(lab, run_id)
    recorded = store.job(path)
    origin = store.decode(path / "versions.json", Origin)
    if not origin or not recorded.files or recorded.request is None:
        raise HostError(
            f"run {run_id} cannot be replayed: an earlier labctl recorded it, which kept less",
            hint=f"labctl run {recorded.workload}, with the options that it had",
        )
    return ReplayedRun(
        path=path,
        job=replace(store.load_job(lab, run_id), request=recorded.request, code=()),
        files=recorded.files,
        code=recorded.code,
        shared=recorded.shared,
        settings=store.settings(path),
        origin=origin,
    )


def job(run: ReplayedRun, now: datetime) -> Job:
    """Build a recorded run's job with a new id, its files and code from the record; it belongs to no batch."""
    run_id = store.new_id(run.job.workload.name, now)
    files = tuple(
        File(path=name, content=(run.path / name).read_text(encoding="utf-8"), mode=_mode(run.path / name))
        for name in run.files
    )
    code = tuple(Copy(path=name, root=run.path / WORK, name=name.removeprefix(f"{WORK}/")) for name in run.code)
    again = renamed(replace(run.job, files=files, request={}), {run.job.run_id: run_id})
    # A replay does not belong to the batch of the recorded run.
    request = {key: value for key, value in run.job.request.items() if key != "batch"}
    return replace(again, code=code, request=request, retried=(), replays=run.job.run_id)


def renamed(job: Job, names: Mapping[str, str]) -> Job:
    """Return a job with each name, such as a run id, replaced by another in all of its texts and files."""
    text = msgspec.json.encode(job, enc_hook=str).decode()
    for before, now in names.items():
        text = text.replace(before, now)
    return decode(text, Job)


def _mode(path: Path) -> int:
    """Return the permission bits of a file."""
    return path.stat().st_mode & 0o777
