"""The record of a batch, beside its jobs' logs: ``batch.jsonl`` has the batch, then a line for each change of a job.

So a job that begins or ends costs one line, and a labctl that is killed loses none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.system import files

RECORD = "batch.jsonl"


class BatchJob(Struct, frozen=True, kw_only=True):
    """A hostfile of a batch: the nodes that it names, and the run that it became."""

    job: str
    """The hostfile's name without ``hostfile_``, as ``2xN_batch0001``."""
    set: str
    """The name of the directory that the hostfile is in, as ``4nodes_2xN``."""
    repeat: int = 1
    """Which of the runs of this hostfile it is, from 1."""
    hostfile: str
    names: tuple[str, ...]
    """Nodes as the hostfile has them."""
    nodes: tuple[str, ...]
    """The same nodes, as the lab calls them."""
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
    """Of the batch's metric; None where the run gave no number."""
    began: float | None = None
    """In seconds since 1970."""
    ended: float | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """A batch: one workload over many hostfiles."""

    schema: int = 1
    id: str = ""
    """Recorded with each of its runs."""
    workload: str
    lab: str
    metric: str = ""
    """The metric that is compared, as ``throughput``."""
    unit: str = ""
    timeout: float
    began: float
    """In seconds since 1970."""
    request: Mapping[str, Any] = {}
    """The options that it was asked for with, as JSON has them."""
    jobs: tuple[BatchJob, ...]


def load(directory: Path) -> Batch | None:
    """The batch whose record is in a directory, as it is now; None where there is none. ConfigError if it is broken."""
    path = directory / RECORD
    try:
        first, *changes = path.read_bytes().split(b"\n")
        batch = msgspec.json.decode(first, type=Batch)
        now = {job.log: job for job in (*batch.jobs, *_whole(changes[:-1]))}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return replace(batch, jobs=tuple(now.values()))


def _whole(lines: list[bytes]) -> Iterator[BatchJob]:
    """The changes that were written whole: a labctl that was killed, or a full disk, leaves parts of lines."""
    for line in lines:
        with suppress(ValueError):
            yield msgspec.json.decode(line, type=BatchJob)


def create(directory: Path, batch: Batch) -> None:
    """Write the record of a batch, in one step."""
    files.write(directory / RECORD, f"{msgspec.json.encode(batch).decode()}\n", mode=0o644)


def change(directory: Path, job: BatchJob) -> None:
    """Add how a job is now to the record. HostError where it cannot be written."""
    path = directory / RECORD
    with files.writing(path), path.open("ab") as record:
        record.write(msgspec.json.encode(job) + b"\n")
