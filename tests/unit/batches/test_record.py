from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from labctl.batches import record
from labctl.batches.record import Batch, BatchJob
from labctl.errors import ConfigError, HostError


def job(number: int, **changes: Any) -> BatchJob:
    """Return a waiting job with this number; ``changes`` replace its fields."""
    plain = BatchJob(
        job=f"1xN_batch000{number}",
        set="2nodes_1xN",
        hostfile=f"/h/hostfile_1xN_batch000{number}",
        names=(f"10.0.0.{number}",),
        nodes=(f"worker-{number}",),
        log=f"opt_1_1xN_batch000{number}.log",
    )
    return replace(plain, **changes)


BATCH = Batch(workload="opt", lab="demo", metric="throughput", timeout=60, began=1000.0, jobs=(job(1), job(2)))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Create a record and load it: the same batch."""
    record.create(tmp_path, BATCH)
    assert record.load(tmp_path) == BATCH


def test_a_directory_without_a_record_has_no_batch(tmp_path: Path) -> None:
    """Load from a directory without record, or a missing one: None."""
    assert record.load(tmp_path) is None
    assert record.load(tmp_path / "none") is None


def test_changes_are_in_the_place_of_their_job_the_last_of_each(tmp_path: Path) -> None:
    """Append three changes: each job has its last one, at its place."""
    running = job(2, state="running", run_id="r1", began=1001.5)
    done = replace(running, state="done", verdict="FAIL", cause="criteria", exit_code=5, value=99.5, ended=1009.0)
    record.create(tmp_path, BATCH)
    record.change(tmp_path, running)
    record.change(tmp_path, job(1, state="running"))
    record.change(tmp_path, done)
    assert record.load(tmp_path) == replace(BATCH, jobs=(job(1, state="running"), done))


def test_a_change_costs_one_line(tmp_path: Path) -> None:
    """Append one change: the file grows by one line."""
    record.create(tmp_path, BATCH)
    before = (tmp_path / record.RECORD).read_bytes()
    record.change(tmp_path, job(1, state="running"))
    after = (tmp_path / record.RECORD).read_bytes()
    assert after.startswith(before)
    assert after[len(before) :].count(b"\n") == 1


def test_a_last_line_that_is_cut_is_ignored(tmp_path: Path) -> None:
    """Cut the last line at every length: the record loads without it."""
    record.create(tmp_path, BATCH)
    record.change(tmp_path, job(1, state="running", run_id="r1"))
    whole = (tmp_path / record.RECORD).read_bytes()
    record.change(tmp_path, job(1, state="done", run_id="r1"))
    last = (tmp_path / record.RECORD).read_bytes()[len(whole) :]
    for length in range(len(last)):
        (tmp_path / record.RECORD).write_bytes(whole + last[:length])
        assert record.load(tmp_path) == replace(BATCH, jobs=(job(1, state="running", run_id="r1"), job(2)))


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\n", b'{"workload": "opt"}\n', b"[]\nnothing\n"])
def test_a_broken_record_is_named(tmp_path: Path, content: bytes) -> None:
    """Load a broken first line: ConfigError names the file."""
    (tmp_path / record.RECORD).write_bytes(content)
    with pytest.raises(ConfigError, match=r"batch\.jsonl: cannot be read: "):
        record.load(tmp_path)


def test_a_line_that_a_full_disk_cut_loses_no_other(tmp_path: Path) -> None:
    """Append a change after a cut line: it is loaded."""
    record.create(tmp_path, BATCH)
    with (tmp_path / record.RECORD).open("ab") as stream:
        stream.write(b'{"job": "1xN\n')
    done = replace(BATCH.jobs[0], state="done", verdict="PASS")
    record.change(tmp_path, done)
    loaded = record.load(tmp_path)
    assert loaded
    assert loaded.jobs[0] == done


def test_a_record_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Append a change in a missing directory: HostError names the file."""
    with pytest.raises(HostError, match=r"cannot write .*gone/batch\.jsonl: No such file or directory"):
        record.change(tmp_path / "gone", job(1))
