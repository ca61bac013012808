"""Record of a batch, beside the logs of its jobs: ``batch.jsonl`` has the batch, then a line per change of a job.

A job that begins or ends costs one line, and nothing is lost if labctl is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import ConfigError, HostError
from labctl.model import Cause
from labctl.system import files
from labctl.system.decode import decode

RECORD = "batch.jsonl"
LOST: Cause = "lab-lost"
"""Cause of a job whose lab lost its launcher."""
UNFINISHED: tuple[Cause, ...] = ("interrupted", LOST)
"""Causes of jobs that tell nothing about their nodes, and that ``--resume`` runs."""


class BatchJob(Struct, frozen=True, kw_only=True):
    """A hostfile of a batch: its nodes, and the state and result of its run."""

    job: str
    """The hostfile's name without ``hostfile_``, as ``2xN_batch0001``."""
    set: str
    """The name of the directory that the hostfile is in, as ``4nodes_2xN``."""
    repeat: int = 1
    """Number of the run of this hostfile, from 1."""
    hostfile: str
    names: tuple[str, ...]
    """Nodes as named in the hostfile."""
    nodes: tuple[str, ...]
    """Nodes as named in the lab, in the same order."""
    log: str
    """The name of its log, in the directory of the record."""
    state: Literal["waiting", "running", "done"] = "waiting"
    run_id: str = ""
    verdict: str = ""
    """PASS, FAIL or ERROR, once it is done."""
    cause: str | None = None
    message: str = ""
    exit_code: int = 0
    value: float | None = None
    """Value of the batch's metric; None if the run gave no number."""
    began: float | None = None
    """Start in seconds since 1970."""
    ended: float | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """A batch: one workload over many hostfiles."""

    schema: int = 1
    id: str = ""
    """Recorded with each of its runs."""
    workload: str
    lab: str
    metric: str = ""
    """Metric to compare jobs by, as ``throughput``."""
    unit: str = ""
    timeout: float
    began: float
    """Start in seconds since 1970."""
    request: Mapping[str, Any] = {}
    """Options of the command, as JSON."""
    jobs: tuple[BatchJob, ...]

    @property
    def complete(self) -> bool:
        """Return True if ``--resume`` would run nothing: all jobs are done, failed ones too, and none is unfinished."""
        return all(job.state == "done" and job.cause not in UNFINISHED for job in self.jobs)

    def require_launcher_kept(self) -> None:
        """Raise HostError if the lab lost its launcher under a job."""
        if lost := next((job for job in self.jobs if job.cause == LOST), None):
            raise HostError(lost.message, hint="`labctl up` starts the launcher again; then re-run the command")


def load(directory: Path) -> Batch | None:
    """Load a directory's batch with the latest state of each job; None if it has none. ConfigError if unreadable."""
    path = directory / RECORD
    try:
        first, *changes = path.read_bytes().split(b"\n")
        batch = decode(first, Batch)
        by_log = {job.log: job for job in (*batch.jobs, *_whole(changes[:-1]))}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return replace(batch, jobs=tuple(by_log.values()))


def _whole(lines: list[bytes]) -> Iterator[BatchJob]:
    """Yield the job states that can be decoded; skip lines left incomplete by a kill or a full disk."""
    for line in lines:
        with suppress(ValueError):
            yield decode(line, BatchJob)


def create(directory: Path, batch: Batch) -> None:
    """Write a batch's record, replacing an earlier one atomically. HostError if it cannot be written."""
    files.write(directory / RECORD, f"{msgspec.json.encode(batch).decode()}\n", mode=0o644)


def change(directory: Path, job: BatchJob) -> None:
    """Append the new state of a job to the record. HostError if it cannot be written."""
    path = directory / RECORD
    with files.writing(path), path.open("ab") as record:
        record.write(msgspec.json.encode(job) + b"\n")
