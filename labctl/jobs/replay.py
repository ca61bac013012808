"""``labctl replay``: a recorded run once more, with what it was launched with then, or what of it cannot be had."""

from __future__ import annotations

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


class Origin(Struct, frozen=True):
    """What ``versions.json`` of a run has that a replay needs again."""

    image: str
    images: dict[str, str | None]
    devices: dict[str, list[dict[str, str]]]
    code: list[dict[str, Any]]
    cache: dict[str, dict[str, str | None]]


class ReplayedRun(Struct, frozen=True, kw_only=True):
    """A run as its record has it; ``files``, ``code`` and ``shared`` are digests, ``settings`` are as shown then."""

    path: Path
    job: Job
    files: dict[str, str]
    code: dict[str, str]
    shared: dict[str, str]
    settings: dict[str, str]
    origin: Origin


def read(lab: Path, run_id: str) -> ReplayedRun:
    """The record of a run that has ended. ConfigError while it runs, HostError for a record without what is needed."""
    if store.state(lab, run_id) == "running":
        raise ConfigError(f"run {run_id} is still running", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    path = store.directory(lab, run_id)
    known = store.job(path)
    origin = store.decode(path / "versions.json", Origin)
    if not origin or not known.files or known.request is None:
        raise HostError(
            f"run {run_id} cannot be replayed: its record is of an earlier labctl, which kept less",
            hint=f"labctl run {known.workload}, with what it was given then",
        )
    rows = store.decode(path / "settings.json", list[dict[str, str]]) or []
    return ReplayedRun(
        path=path,
        job=replace(store.load_job(lab, run_id), request=known.request, code=()),
        files=known.files,
        code=known.code,
        shared=known.shared,
        settings={row["key"]: row["value"] for row in rows},
        origin=origin,
    )


def job(run: ReplayedRun, now: datetime) -> Job:
    """The run once more: the recorded job with a new id in place of its own, its files and its code from the record."""
    run_id = store.new_id(run.job.workload.name, now)

    def renamed(text: str) -> str:
        return text.replace(run.job.run_id, run_id)

    files = tuple(
        File(path=name, content=renamed((run.path / name).read_text(encoding="utf-8")), mode=_mode(run.path / name))
        for name in run.files
    )
    code = tuple(Copy(path=name, root=run.path / WORK, name=name.removeprefix(f"{WORK}/")) for name in run.code)
    before = replace(run.job, request={})
    text = renamed(msgspec.json.encode(before, enc_hook=str).decode())
    again = msgspec.json.decode(text, type=Job, dec_hook=lambda kind, value: kind(value))
    # It is no run of the batch that the other was one of.
    request = {key: value for key, value in run.job.request.items() if key != "batch"}
    return replace(again, files=files, code=code, request=request, retried=(), replays=run.job.run_id)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
