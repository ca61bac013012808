from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.logs import throughput, write_log

from labctl.batches import logs, record
from labctl.batches.logs import Measured
from labctl.batches.record import Batch, BatchJob
from labctl.errors import ConfigError

FILLER = "[INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=12\n" * 2_000


def measured(directory: Path, pattern: str = "") -> Measured:
    """Return the one log of the directory as read; fail on more."""
    (run,) = logs.read(directory, pattern)
    return run


def test_a_log_says_its_job_its_nodes_and_its_number(tmp_path: Path) -> None:
    """Read a log of two hosts: a Measured with job, names, size, unit and value."""
    write_log(tmp_path, "2xN_batch0001", ["ml-001", "ml-002"], "starting", throughput(1850.5))
    assert measured(tmp_path) == Measured(
        directory=str(tmp_path),
        set=tmp_path.name,
        workload="opt-350m_1",
        job="2xN_batch0001",
        log="opt-350m_1_2xN_batch0001.log",
        names=("ml-001", "ml-002"),
        size=2,
        unit="samples/s",
        value=1850.5,
    )


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (["Throughput: 290.3027 samples/sec"], 290.3027),
        (["ml-512-node-001: Throughput: 290.3027 samples/sec"], 290.3027),
        (["[1,0]<stdout>:Throughput: 290.3027 samples/sec"], 290.3027),
        (["Throughput: 600 samples/sec"], 600),
        (["Throughput: 1e3 samples/sec"], 1000),
        (["Throughput: 12.5 samples/sec\r"], 12.5),
        (["Throughput: 1.5 samples/sec", "Throughput: 612.5 samples/sec"], 612.5),
        (["Throughput: nan samples/sec", "Throughput: 600.0 samples/sec"], 600),
        (["\0\udcff\udcfe\x1b[31m", "Throughput: 600.0 samples/sec"], 600),
    ],
)
def test_the_last_number_counts(tmp_path: Path, lines: list[str], value: float) -> None:
    """Read logs with prefixes, several numbers, nan or odd bytes: the last number is the value."""
    text = "ml-001 slots=8\n\n" + "".join(f"{line}\n" for line in lines)
    (tmp_path / "a.log").write_bytes(text.encode("utf-8", "surrogateescape"))
    run = measured(tmp_path)
    assert (run.value, run.cause, run.message) == (value, "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing matches `Throughput: (\\S+) samples/sec`"),
        ("Execution time: 20.6176 seconds for 100 steps\n", "nothing matches `Throughput: (\\S+) samples/sec`"),
        ("Throughput: 600.0 samples/s", "nothing matches `Throughput: (\\S+) samples/sec`"),
        ("Throughput: 600.0", "nothing matches `Throughput: (\\S+) samples/sec`"),
        ("Throughput: nan samples/sec\n", "`nan` is not a number"),
        ("Throughput: 600.0 samples/sec\nThroughput: nan samples/sec\n", "`nan` is not a number"),
        ("Throughput: inf samples/sec\n", "`inf` is not a number"),
        ("Throughput: -inf samples/sec\n", "`-inf` is not a number"),
        ("Throughput: 1e999 samples/sec\n", "`1e999` is not a number"),
        ("Throughput: 1,234.5 samples/sec\n", "`1,234.5` is not a number"),
        ("Throughput: n/a samples/sec\n", "`n/a` is not a number"),
        ("Throughput: 0.0 samples/sec\n", "0 samples/s is not a throughput"),
        ("Throughput: -650 samples/sec\n", "-650 samples/s is not a throughput"),
    ],
)
def test_a_log_without_a_number_has_none(tmp_path: Path, text: str, message: str) -> None:
    """Read logs without a usable number: value None, cause no-metric, message says why."""
    (tmp_path / "a.log").write_text(f"ml-001 slots=8\n\n{text}", encoding="utf-8")
    run = measured(tmp_path)
    assert (run.value, run.cause, run.message) == (None, "no-metric", message)


@pytest.mark.parametrize("separator", ["\n", "\r"])
def test_a_number_far_from_the_end_is_found(tmp_path: Path, separator: str) -> None:
    """Read a log with the number far before its tail: it is found."""
    behind = FILLER.replace("\n", separator)
    assert len(behind) > logs.TAIL
    write_log(tmp_path, "1xN_batch0001", ["ml-001"], FILLER, f"{throughput(600)}\n{behind}")
    assert measured(tmp_path).value == 600


def test_a_line_that_begins_before_the_tail_is_read_whole(tmp_path: Path) -> None:
    """Read logs whose tail begins inside the number: it is read whole."""
    number = "1234567890.5"
    path = tmp_path / "a.log"
    for cut in range(1, len(number)):
        text = f"{FILLER}{number} is the value\n" + "-\n" * logs.TAIL
        path.write_text(text[: len(FILLER) + cut + logs.TAIL])
        assert measured(tmp_path, r"(\S+) is the value").value == float(number)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("ml-001 slots=8\nml-002 slots=8\n\n", ("ml-001", "ml-002")),
        ("ml-001 slots=8\nml-002 slots=8\n[INFO] no blank line\n", ("ml-001", "ml-002")),
        ("ml-001 slots=8\r\nml-002\tslots=8\r\n\r\n", ("ml-001", "ml-002")),
        ("# two nodes\nml-001 slots=8  # rack 1\nml-002 slots=8\n\n", ("ml-001", "ml-002")),
        ("ml-001 slots=8\nml-001 slots=8\n\n", ("ml-001",)),
        ("[INFO] starting\nml-001 slots=8\n", ()),
        ("\n", ()),
        ("\0\x01\x02", ()),
    ],
)
def test_hosts_are_those_of_the_hostfile_at_the_head(tmp_path: Path, head: str, names: tuple[str, ...]) -> None:
    """Read logs with hostfiles of several forms: names are the hosts before the first other line."""
    (tmp_path / "a.log").write_bytes(f"{head}starting: 3 slots=4\n".encode())
    assert measured(tmp_path).names == names


def test_a_hostfile_of_many_nodes_is_read_whole(tmp_path: Path) -> None:
    """Read a log with 4000 hosts: all are in names."""
    hosts = [f"ml-512-node-{number:04}" for number in range(4_000)]
    write_log(tmp_path, "4000xN_batch0001", hosts, throughput(600))
    assert measured(tmp_path).names == tuple(hosts)


@pytest.mark.parametrize(
    ("name", "workload", "job", "size"),
    [
        ("opt-350m_1_1xN_batch0001.log", "opt-350m_1", "1xN_batch0001", 1),
        ("opt-350m_bs24_zero0_1_16xN_batch0003.log", "opt-350m_bs24_zero0_1", "16xN_batch0003", 16),
        ("opt-350m_1_2xN.log", "opt-350m_1", "2xN", 2),
        ("2xN_batch0001.log", "", "2xN_batch0001", 2),
        ("mine.log", "", "mine", None),
        ("0xN_batch0001.log", "", "0xN_batch0001", None),
    ],
)
def test_without_a_hostfile_the_name_says_how_many_nodes(
    tmp_path: Path, name: str, workload: str, job: str, size: int | None
) -> None:
    """Read logs without hostfile: workload, job and size come from the file name."""
    (tmp_path / name).write_text("Throughput: 600 samples/sec\n", encoding="utf-8")
    run = measured(tmp_path)
    assert (run.workload, run.job, run.size, run.names, run.value) == (workload, job, size, (), 600)


def test_a_log_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    """Read a folder, a broken link and a FIFO named *.log: cause unreadable, the other log is read."""
    write_log(tmp_path, "1xN_batch0001", ["ml-001"], throughput(600))
    (tmp_path / "opt-350m_1_1xN_batch0002.log").mkdir()
    (tmp_path / "opt-350m_1_1xN_batch0003.log").symlink_to("nowhere")
    os.mkfifo(tmp_path / "opt-350m_1_1xN_batch0004.log")
    assert [(run.value, run.cause, run.message) for run in logs.read(tmp_path)] == [
        (600, "", ""),
        (None, "unreadable", "cannot be read: not a regular file"),
        (None, "unreadable", "cannot be read: No such file or directory"),
        (None, "unreadable", "cannot be read: not a regular file"),
    ]


def test_another_pattern_finds_other_numbers(tmp_path: Path) -> None:
    """Read with a pattern: its last match is the value, without a unit."""
    write_log(tmp_path, "1xN_batch0001", ["ml-001"], "step 1 bus 3.5 GB/s", "step 2 bus 4.5 GB/s", throughput(600))
    run = measured(tmp_path, r"^step \d+ bus (\S+)")
    assert (run.value, run.unit) == (4.5, "")


def test_a_number_that_the_log_ends_with_may_be_cut(tmp_path: Path) -> None:
    """Read a number at the log's end without line end: it is ignored, and alone it gives a message."""
    (tmp_path / "a.log").write_text("value: 12\nvalue: 34", encoding="utf-8")
    assert measured(tmp_path, r"value: (\S+)").value == 12
    (tmp_path / "a.log").write_text("value: 34", encoding="utf-8")
    assert measured(tmp_path, r"value: (\S+)").message == "`34` at the end of the log may be cut"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("value: (", "--pattern `value: (`: missing ), unterminated subpattern at position 7"),
        ("value: .*", "--pattern `value: .*` has no capturing groups"),
        (r"(\w+): (\S+)", r"--pattern `(\\w+): (\\S+)` has 2 capturing groups"),
    ],
)
def test_a_pattern_that_is_none_is_refused(tmp_path: Path, pattern: str, message: str) -> None:
    """Read with an invalid pattern or not one group: ConfigError names the fault."""
    with pytest.raises(ConfigError) as caught:
        logs.read(tmp_path, pattern)
    assert caught.value.message == message


def test_no_directory_no_logs_and_logs_further_down_are_told_apart(tmp_path: Path) -> None:
    """Read a missing, wrong, empty or nested directory: ConfigError, the hint names the nested one."""
    with pytest.raises(ConfigError, match="no such directory"):
        logs.read(tmp_path / "none")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        logs.read(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"no \*\.log file found") as caught:
        logs.read(tmp_path)
    assert caught.value.hint == "logs are named like opt-350m_1_1xN_batch0001.log"
    write_log(tmp_path / "2nodes", "1xN_batch0001", ["ml-001"])
    with pytest.raises(ConfigError, match=r"no \*\.log file found") as caught:
        logs.read(tmp_path)
    assert caught.value.hint == f"labctl eval {tmp_path}/2nodes"


# --- of a batch with a record ----------------------------------------------------------------------------------


def recorded(directory: Path, *jobs: BatchJob, metric: str = "throughput") -> tuple[Measured, ...]:
    """Write a batch's record with these jobs; return what logs.read finds."""
    batch = Batch(workload="opt", lab="demo", metric=metric, unit="samples/s", timeout=60, began=0, jobs=jobs)
    record.create(directory, batch)
    return logs.read(directory)


def batch_job(
    state: str = "done", verdict: str = "PASS", cause: str | None = None, message: str = "", value: float | None = 600
) -> BatchJob:
    """Return a job of two nodes with these fields."""
    return BatchJob(
        job="2xN_batch0001",
        set="4nodes_2xN",
        hostfile="hostfiles/4nodes_2xN/hostfile_2xN_batch0001",
        names=("ml-001", "ml-002"),
        nodes=("worker-0", "worker-1"),
        log="2xN_batch0001.log",
        state=state,  # type: ignore[arg-type]
        verdict=verdict,
        cause=cause,
        message=message,
        value=value,
    )


def test_a_batchs_record_has_its_numbers_and_nodes(tmp_path: Path) -> None:
    """Read a batch's directory: value and names come from the record, not from the log."""
    (tmp_path / "2xN_batch0001.log").write_text("Throughput: 1 samples/sec\n", encoding="utf-8")
    assert recorded(tmp_path, batch_job()) == (
        Measured(
            directory=str(tmp_path),
            set="4nodes_2xN",
            workload="opt",
            job="2xN_batch0001",
            log="2xN_batch0001.log",
            names=("ml-001", "ml-002"),
            size=2,
            unit="samples/s",
            value=600,
        ),
    )


@pytest.mark.parametrize(
    ("job", "cause", "message"),
    [
        (batch_job(verdict="ERROR", cause="timeout", message="It ran too long."), "timeout", "It ran too long."),
        (batch_job(verdict="FAIL", cause="criteria", message="1 not met."), "criteria", "1 not met."),
        (batch_job(verdict="ERROR", message="Odd."), "error", "Odd."),
        (batch_job(state="running", verdict=""), "not-finished", "running"),
        (batch_job(state="waiting", verdict=""), "not-finished", "waiting"),
        (batch_job(value=None), "no-metric", "no `throughput` in its record"),
    ],
)
def test_a_run_that_did_not_pass_fails_whatever_its_number(
    tmp_path: Path, job: BatchJob, cause: str, message: str
) -> None:
    """Read a record's job that failed or has not ended: its cause and message, whatever its value."""
    (run,) = recorded(tmp_path, job)
    assert (run.cause, run.message) == (cause, message)


def test_a_batch_that_compares_no_number_needs_none(tmp_path: Path) -> None:
    """Read a batch without a metric: no value and no cause."""
    (run,) = recorded(tmp_path, batch_job(value=None), metric="")
    assert (run.value, run.cause) == (None, "")


def test_one_set_of_a_batch_has_its_jobs_of_the_record_above(tmp_path: Path) -> None:
    """Read one set's folder of a batch: its jobs of the record above, and only its logs."""
    passed = replace(batch_job(value=590), set="1nodes", log="1nodes/opt_1_1xN.log")
    failed = replace(batch_job(verdict="ERROR", cause="rank-crashed", value=None), log="2nodes/opt_1_2xN.log")
    recorded(tmp_path, passed, failed)
    for folder in ("1nodes", "2nodes"):
        (tmp_path / folder).mkdir()
    assert [run.value for run in logs.read(tmp_path / "1nodes")] == [590]
    assert [run.cause for run in logs.read(tmp_path / "2nodes")] == ["rank-crashed"]
    assert logs.paths(tmp_path / "2nodes") == [str(tmp_path / "2nodes/opt_1_2xN.log")]


def test_a_job_that_was_interrupted_is_not_finished(tmp_path: Path) -> None:
    """Read a job that was interrupted: cause not-finished with its message."""
    (run,) = recorded(tmp_path, batch_job(verdict="ERROR", cause="interrupted", message="ann stopped the batch"))
    assert (run.cause, run.message) == ("not-finished", "ann stopped the batch")
