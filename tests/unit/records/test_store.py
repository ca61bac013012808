from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import lab, printed, workload

from labctl.backends import spec as labs
from labctl.cli.output import to_json
from labctl.config import dotenv, settings
from labctl.errors import ConfigError, HostError
from labctl.model import CriterionResult, File, Lab, Metric, Rank, Result, Secret
from labctl.records import store
from labctl.records.store import RunSummary, ShownRun
from labctl.system import filelock

NOW = datetime(2026, 1, 2, 15, 4, 5, tzinfo=timezone.utc)


def result(run_id: str) -> Result:
    """Return a passed result of this run."""
    check = CriterionResult(criterion="throughput >= 5", value=7.5, passed=True)
    return Result(
        run_id=run_id,
        workload="hello",
        launcher="deepspeed",
        lab="demo",
        verdict="PASS",
        cause=None,
        message="All criteria met.",
        exit_code=0,
        checks=(check,),
        world_size=2,
        ranks=(Rank(rank=0, node="worker-0"), Rank(rank=1, node="worker-1")),
        metrics={"throughput": {"value": 7.5, "unit": "samples/s"}, "loss": {"first": 4.0, "last": 1.0}},
        seconds=12.3456,
        started="2026-01-02T15:04:05+00:00",
    )


def with_secrets(directory: Path, token: str = "", **variables: str) -> Lab:
    """Write .env with these secrets; return a lab whose settings have them."""
    lines = [f"LAB_ENV_{name}={dotenv.quote(value)}\n" for name, value in variables.items()]
    (directory / ".env").write_text("".join([f"HF_TOKEN={token}\n", *lines]), encoding="utf-8")
    loaded = settings.load(directory, {}, {})
    return lab(directory=directory, secrets=labs.secrets(loaded), hidden=labs.hidden(loaded))


def said_by_a_rank(path: Path, output: bytes) -> Path:
    """Write the log of rank 0; return its path."""
    log = path / "ranks/rank-0.log"
    log.parent.mkdir()
    log.write_bytes(output)
    return log


def started(of: Lab, run_id: str) -> Path:
    """Create a run's record with a hostfile and empty settings; return its folder."""
    hostfile = File(path="hostfile", content="worker-0 slots=1\n", mode=0o644)
    return store.create(of, run_id, (hostfile,), (File(path="settings.json", content="[]"),))


# --- ids and states ------------------------------------------------------------------------------------------


def test_ids_sort_by_time_and_read_as_what_they_are() -> None:
    """Make run ids: time, workload and a random part; they sort by time."""
    first, second = store.new_id("opt-tiny", NOW), store.new_id("opt-tiny", NOW.replace(hour=16))
    assert first.startswith("20260102-150405-opt-tiny-")
    assert first < second
    assert store.new_id("opt-tiny", NOW) != first


def test_a_run_goes_from_running_to_done(tmp_path: Path) -> None:
    """Read a run's state: "running" while its lock is held, "done" with a result."""
    of = lab(directory=tmp_path)
    started(of, "r1")
    with filelock.held(store.lock(tmp_path, "r1"), store.purpose("r1")):
        assert store.state(tmp_path, "r1") == "running"
        shown = store.read(tmp_path, "r1")
        assert shown.result is None
        assert (shown.summary.run_id, shown.summary.state, shown.summary.verdict) == ("r1", "running", None)
        store.finish(lab(directory=tmp_path), result("r1"))
    assert store.state(tmp_path, "r1") == "done"


def test_a_run_that_goes_on_or_ended_lately_is_known(tmp_path: Path) -> None:
    """Ask for runs within 60 s: a running one or one ended lately."""
    of, run_id = replace(lab(), directory=tmp_path), "20260101-120000-hello-0001"
    assert not store.ran_within(tmp_path, 60)
    path = started(of, run_id)
    assert store.ran_within(tmp_path, 60)
    (path / store.RESULT).write_text("{}")
    assert store.ran_within(tmp_path, 60)
    os.utime(path / store.RESULT, (1e9, 1e9))
    assert not store.ran_within(tmp_path, 60)


def test_a_run_whose_process_ended_without_a_result_is_orphaned(tmp_path: Path) -> None:
    """Read the state of a run without result: "orphaned", also while locks other than its own are held."""
    path = started(lab(directory=tmp_path), "r1")
    assert store.state(tmp_path, "r1") == "orphaned"
    for lock, purpose in ((store.lock(tmp_path, "r2"), "run r2"), (path / store.MARK, "run r1")):
        with filelock.held(lock, purpose):
            assert store.state(tmp_path, "r1") == "orphaned", "containers can lock what is in the record"
    with filelock.held(store.lock(tmp_path, "r1"), store.purpose("r1")):
        pass
    assert store.state(tmp_path, "r1") == "orphaned"


def test_create_makes_room_for_the_ranks_and_writes_what_is_known(tmp_path: Path) -> None:
    """Create a run: its record and its outputs' folder have the files, ranks/ and work/."""
    path = started(lab(directory=tmp_path), "r1")
    assert path == tmp_path / "runs/r1"
    assert {entry.name for entry in path.iterdir()} == {"hostfile", "settings.json", store.MARK}
    written = tmp_path / "runs/.outputs/r1"
    assert {entry.name for entry in written.iterdir()} == {"hostfile", "ranks", "work"}
    assert [(folder / "hostfile").read_text() for folder in (path, written)] == ["worker-0 slots=1\n"] * 2


# --- results -------------------------------------------------------------------------------------------------


def test_the_result_has_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    """Write a result: its JSON has exactly the known keys, and it is read back."""
    started(lab(directory=tmp_path), "r1")
    written = store.finish(lab(directory=tmp_path), result("r1"))
    assert {"schema": 1, **to_json(written)} == {
        "schema": 1,
        "run_id": "r1",
        "workload": "hello",
        "launcher": "deepspeed",
        "lab": "demo",
        "verdict": "PASS",
        "cause": None,
        "message": "All criteria met.",
        "notes": {},
        "exit_code": 0,
        "domain": None,
        "retry": None,
        "evidence": "",
        "world_size": 2,
        "ranks": [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}],
        "metrics": {"throughput": {"value": 7.5, "unit": "samples/s"}, "loss": {"first": 4.0, "last": 1.0}},
        "checks": [{"criterion": "throughput >= 5", "value": 7.5, "passed": True}],
        "seconds": 12.346,
        "started": "2026-01-02T15:04:05+00:00",
        "resumed": "",
        "retried": [],
        "replays": "",
        "hang": None,
        "straggler": None,
        "pace": None,
        "node_changes": [],
    }
    assert json.loads((tmp_path / "runs/r1/result.json").read_text()) == {"schema": 1, **to_json(written)}
    assert store.read(tmp_path, "r1").result == written


def test_a_result_of_a_later_version_is_read(tmp_path: Path) -> None:
    """Read a result with unknown values and keys: it is accepted."""
    started(lab(directory=tmp_path), "r1")
    later = {
        **to_json(store.finish(lab(directory=tmp_path), result("r1"))),
        "verdict": "MAYBE",
        "cause": "tired",
        "mood": "low",
    }
    (tmp_path / "runs/r1/result.json").write_text(json.dumps(later))
    read = store.read(tmp_path, "r1").result
    assert read
    assert (read.verdict, read.cause) == ("MAYBE", "tired")


@pytest.mark.parametrize("run_id", ["nope", "../runs/r1", "..", "r1/ranks", ""])
def test_an_unknown_run_names_the_latest(tmp_path: Path, run_id: str) -> None:
    """Read an unknown run: ConfigError, the hint has the latest."""
    started(lab(directory=tmp_path), "r1")
    with pytest.raises(ConfigError) as caught:
        store.read(tmp_path, run_id)
    assert caught.value.message.startswith(f"no run `{run_id}`")
    assert caught.value.hint == "the latest are r1"


NAMED = ("20260101-100000-hello-c3a223", "20260102-100000-opt-tiny-9f01b4", "20260102-110000-opt-tiny-c3a2b7")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("20260101", 0),
        ("20260102-10", 1),
        ("c3a223", 0),
        ("a223", 0),
        ("hello-c3a223", 0),
        ("9f01", 1),
        ("latest", 2),
        ("-1", 2),
        ("-3", 0),
        (NAMED[1], 1),
    ],
)
def test_a_run_is_named_by_a_part_of_its_id_or_counted_back(tmp_path: Path, name: str, place: int) -> None:
    """Find a run by the beginning or end of its id, of the last part, by ``latest`` and ``-N``: the one meant."""
    for run_id in NAMED:
        (tmp_path / "runs" / run_id).mkdir(parents=True)
        (tmp_path / "runs" / run_id / store.MARK).touch()
    assert store.find(tmp_path, name) == NAMED[place]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("20260102", "`20260102` is ambiguous: 2 runs match", f"one of {NAMED[2]}, {NAMED[1]}"),
        ("c3a", "`c3a` is too short to name a run", "type at least 4 characters of its id"),
        ("223", "`223` is too short to name a run", "type at least 4 characters of its id"),
        ("c3a2", "`c3a2` is ambiguous: 2 runs match", f"one of {NAMED[2]}, {NAMED[0]}"),
        ("-4", "no run `-4` in ", "the latest are "),
        ("-0", "no run `-0` in ", "the latest are "),
        ("opt", "no run `opt` in ", "the latest are "),
        ("", "no run `` in ", "the latest are "),
    ],
)
def test_a_name_of_several_runs_or_of_none_is_none_of_them(tmp_path: Path, name: str, message: str, hint: str) -> None:
    """Find a run by what several ids have, by too little, or by what none has: ConfigError with what to type."""
    for run_id in NAMED:
        (tmp_path / "runs" / run_id).mkdir(parents=True)
        (tmp_path / "runs" / run_id / store.MARK).touch()
    with pytest.raises(ConfigError) as caught:
        store.find(tmp_path, name)
    assert caught.value.message.startswith(message)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("broken", [b"{", b'{"run_id": "\xff"}', b"[]", b"{}"])
def test_the_listing_has_the_latest_first_and_takes_broken_results(tmp_path: Path, broken: bytes) -> None:
    """List runs: latest first, at most the limit, a broken result without a verdict; () in another directory."""
    for run_id in ("20260101-a", "20260103-c", "20260102-b"):
        started(lab(directory=tmp_path), run_id)
    store.finish(lab(directory=tmp_path), result("20260103-c"))
    (tmp_path / "runs/20260102-b/result.json").write_bytes(broken)
    assert [(run.run_id, run.state, run.verdict) for run in store.listing(tmp_path)] == [
        ("20260103-c", "done", "PASS"),
        ("20260102-b", "done", None),
        ("20260101-a", "orphaned", None),
    ]
    assert len(store.listing(tmp_path, 1)) == 1
    assert store.listing(tmp_path / "nowhere") == ()


@pytest.mark.parametrize("started", ["2026-01-02T15:04:05+00:00", "junk", None])
def test_a_run_began_when_its_result_says_or_else_when_its_id_says(started: str | None) -> None:
    """Read when a run began: the time of its result, else that of its id, else None; always with a zone."""
    began = store.start("20260304-050607-hello-3fa2c1", started)
    assert began
    assert began.tzinfo
    of_result = datetime(2026, 1, 2, 15, 4, 5, tzinfo=timezone.utc)
    of_id = datetime(2026, 3, 4, 5, 6, 7).astimezone()
    assert began == (of_result if started and started[:4] == "2026" else of_id)
    assert store.start("r1", "junk") is None


def test_a_time_without_a_zone_is_local() -> None:
    """Read a time without a zone: it can be compared with others, as that of this machine."""
    local = datetime(2026, 1, 2, 15, 4, 5).astimezone()
    assert store.start("r1", "2026-01-02T15:04:05") == local


def test_a_short_id_is_the_end_of_an_id_that_names_no_other_run() -> None:
    """Short ids have six characters, or as many more as neither begin nor end another id, and no dash first."""
    assert store.short_ids(["20260102-150405-hello-3fa2c1", "20260102-150406-hello-93bd42"]) == {
        "20260102-150405-hello-3fa2c1": "3fa2c1",
        "20260102-150406-hello-93bd42": "93bd42",
    }
    alike = ["20260102-150405-hello-3fa2c1", "20260102-150406-train-3fa2c1", "20260102-150407-train-202601", "r1"]
    short = store.short_ids(alike)
    assert [short[run_id] for run_id in alike] == ["o-3fa2c1", "n-3fa2c1", "n-202601", "r1"]


def test_ranks_are_those_that_reported_in_behind_any_prefix() -> None:
    """Read the reports of ranks behind prefixes: rank and node of each."""
    lines = [
        "worker-1: labctl: rank 1 of 2 on worker-1",
        "labctl: rank 0 of 2 on worker-0",
        "labctl: rank 0 on worker-0 exited with code 1",
        "labctl: rank x of 2 on worker-0",
    ]
    assert store.ranks_of(lines) == (Rank(rank=0, node="worker-0"), Rank(rank=1, node="worker-1"))


MAPPING = "global_rank_mapping=defaultdict(<class 'list'>, {'worker-0': [0, 1], 'worker-1': [2, 3]})"


def test_ranks_that_a_script_started_are_those_of_the_nodes_where_deepspeed_started_them() -> None:
    """Read DeepSpeed's mapping of ranks: those of the line's own node."""
    lines = [f"worker-1: [2026-01-02 15:04:05,000] [INFO] [launch.py:163:main] {MAPPING}", "other: words"]
    assert store.ranks_of(lines) == (Rank(rank=2, node="worker-1"), Rank(rank=3, node="worker-1"))


def test_ranks_that_report_are_counted_by_that_alone() -> None:
    """Read reports and a mapping: the reports alone count."""
    lines = [f"worker-1: [launch.py:163:main] {MAPPING}", "worker-0: labctl: rank 0 of 4 on worker-0"]
    assert store.ranks_of(lines) == (Rank(rank=0, node="worker-0"),)


def test_a_line_of_a_program_counts_as_the_report_of_a_rank_only_under_a_script(tmp_path: Path) -> None:
    """Print a report without a mark: it counts only under launcher script."""

    def printed_lines(launcher: str) -> list[str]:
        """Write two reports of ranks as this launcher's run; return the lines that are kept."""
        of, path = lab(directory=tmp_path), store.create(lab(directory=tmp_path), launcher, ())
        with closing(store.RunLog(path, of, workload(launcher=launcher))) as log:
            log.keep((printed("labctl: rank 1 of 2 on worker-1"), printed("\x010!\x02labctl: rank 0 of 2 on worker-0")))
            return log.lines

    assert printed_lines("mpirun") == ["labctl: rank 0 of 2 on worker-0"]
    assert printed_lines("script") == ["labctl: rank 1 of 2 on worker-1", "labctl: rank 0 of 2 on worker-0"]


# --- secrets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["{worker-0: [0]}", "{'worker-0': [__import__('os')]}", "{'worker-0': []}", "{}"])
def test_a_line_that_is_only_like_deepspeeds_starts_no_rank(mapping: str) -> None:
    """Read invalid mappings of ranks: no ranks."""
    line = f"worker-0: [INFO] global_rank_mapping=defaultdict(<class 'list'>, {mapping})"
    assert store.ranks_of([line]) == ()


def test_a_pattern_with_flags_of_its_own_is_kept_apart(tmp_path: Path) -> None:
    """Declare patterns with and without flags: each keeps its own."""
    metrics = (Metric(name="loss", pattern="(?i)loss: (\\S+)"), Metric(name="a", pattern="(?:a)(?:a) (\\d)"))
    recorder = store.RunLog(tmp_path, lab(), workload(metrics=metrics))
    for line in ("LOSS: 3", "aa 4", "AA 5"):
        recorder.keep((printed(line),))
    recorder.close()
    assert {name: [*values] for name, values in recorder.values.items()} == {"loss": [3], "a": [4]}


def test_behind_a_progress_bar_that_was_drawn_many_times_numbers_are_read(tmp_path: Path) -> None:
    """Read a number behind a long bar: it is found, and output.log has the whole line."""
    bar = "".join(f"\r{step:3}% ####       {step}/1000 [00:01<00:09]" for step in range(1000))
    text = f"worker-0: {bar}\r{{'loss': 2.25, 'epoch': 0.5}}"
    metrics = (Metric(name="loss", pattern=r"'loss': ([\d.]+)"),)
    with closing(store.RunLog(tmp_path, lab(), workload(metrics=metrics))) as recorder:
        recorder.keep((printed(text),))
    assert [*recorder.values["loss"]] == [2.25]
    assert (tmp_path / store.OUTPUT).read_bytes() == f"{text}\n".encode()


def test_of_many_lines_only_numbers_stay_in_memory(tmp_path: Path) -> None:
    """Read 5000 lines: numbers stay in memory, below 40 bytes each."""
    of = workload(metrics=(Metric(name="loss", pattern=r"loss (\S+)"),), notes=(("data", "data (.*)"),))
    with closing(store.RunLog(tmp_path, lab(), of)) as recorder:
        recorder.keep((printed("\x010!\x02labctl: rank 0 of 1 on worker-0"),))
        recorder.keep((printed(f"step 0 loss 1.0 data {0:0100}"),))
        tracemalloc.start()
        for step in range(1, 5000):
            recorder.keep((printed(f"step {step} loss 1.0 data {step:0100}"),))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (len(recorder.lines), len(recorder.values["loss"])) == (2, 5000)
    assert held < 5000 * 40


def test_a_secret_is_redacted_in_the_quote_of_a_found_metric_wherever_that_is_cut(tmp_path: Path) -> None:
    """Find a metric between secrets: the quoted line has no part of them, wherever it is cut."""
    of = replace(lab(), hidden=(Secret("CANARY-token"),))
    for blanks in range(20, 80):
        path = tmp_path / str(blanks)
        path.mkdir()
        with closing(store.RunLog(path, of, workload(known_metrics="all"))) as recorder:
            recorder.keep((printed(f"CANARY-token {'.' * blanks} loss: 1.5 {'.' * blanks} CANARY-token"),))
        quote = recorder.found()["loss"]["line"]
        assert "CAN" not in quote
        assert "ken" not in quote


def test_whatever_lies_under_the_name_of_a_log_does_not_cost_the_verdict(tmp_path: Path) -> None:
    """Redact a folder and a link named as logs: the link's target stays as it was."""
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "elsewhere").write_text("secret", encoding="utf-8")
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    store.redact_ranks(tmp_path, (Secret("secret"),))
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == "secret"


def test_secrets_are_taken_out_of_lines_and_of_what_ranks_wrote(tmp_path: Path) -> None:
    """Keep a line with secrets: redacted in output, output.log and the rank's log, other bytes kept."""
    of = with_secrets(tmp_path, "CANARY-token", WANDB_API_KEY="CAN ARY's $key")
    path = started(of, "r1")
    recorder = store.RunLog(path, of, workload(metrics=(Metric(name="speed", pattern="speed (.*)"),)))
    text = "got CANARY-token and CAN ARY's $key"
    log = said_by_a_rank(path, text.encode() + b" \xff\n")
    assert [line.text for line in recorder.keep((printed(text),))] == ["got [REDACTED] and [REDACTED]"]
    recorder.close()
    assert not recorder.lines
    assert (path / "output.log").read_text() == "got [REDACTED] and [REDACTED]\n"
    assert log.read_bytes() == b"got [REDACTED] and [REDACTED] \xff\n"


@pytest.mark.parametrize("value", ["first line\nsecond line", "unclosed ' quote\nand \" another", "a\x85b\u2028c-long"])
def test_a_secret_of_several_lines_is_taken_out_line_by_line(tmp_path: Path, value: str) -> None:
    """Redact secrets of several lines: each line of them."""
    of = with_secrets(tmp_path, SIGNING_KEY=value, OTHER_KEY="other-value")
    hidden = of.hidden
    kept = [store.redact(line, hidden) for line in (*value.split("\n"), "other-value")]
    assert not [line for line in kept if "line" in line or "quote" in line or "long" in line or "other" in line]


def test_a_secret_that_begins_another_leaves_no_rest_of_it(tmp_path: Path) -> None:
    """Redact a secret that begins another: no rest of the longer one."""
    of = with_secrets(tmp_path, A_KEY="abcd", B_KEY="abcdEFGH")
    recorder = store.RunLog(started(of, "r1"), of, workload())
    kept = recorder.keep((printed("x abcdEFGH y"),))
    recorder.close()
    assert "EFGH" not in kept[0].text


def test_the_verdict_reads_what_was_said_though_the_record_hides_it(tmp_path: Path) -> None:
    """Redact a secret that is part of a metric: the value is read before."""
    of = with_secrets(tmp_path, PORT_PASSWORD="2048")  # noqa: S106
    metric = Metric(name="speed", pattern=r"Throughput: (\S+)")
    recorder = store.RunLog(started(of, "r1"), of, workload(metrics=(metric,)))
    for line in (
        "worker-0: \x010!\x02labctl: rank 0 of 1 on worker-0",
        "nothing of note",
        "worker-0: Throughput: 2048.3 samples/sec",
    ):
        recorder.keep((printed(line),))
    recorder.close()
    assert recorder.lines == ["worker-0: labctl: rank 0 of 1 on worker-0"]
    assert [*recorder.values["speed"]] == [2048.3]
    assert "2048" not in (tmp_path / "runs/r1/output.log").read_text()


def test_an_abandoned_run_is_closed_without_its_secrets(tmp_path: Path) -> None:
    """Abandon a run: cause interrupted, its logs redacted."""
    of = with_secrets(tmp_path, "CANARY-token")
    path = started(of, "r1")
    log = said_by_a_rank(path, b"got CANARY-token\n")
    store.abandon(of, "r1")
    assert log.read_text() == "got [REDACTED]\n"
    assert to_json(store.read(tmp_path, "r1").result)["cause"] == "interrupted"


def test_lines_are_on_disk_as_they_come(tmp_path: Path) -> None:
    """Keep a line: it is in output.log before the log is closed."""
    of = lab(directory=tmp_path)
    recorder = store.RunLog(started(of, "r1"), of, workload())
    recorder.keep((printed("ü first"),))
    assert (tmp_path / "runs/r1/output.log").read_text(encoding="utf-8") == "ü first\n"
    recorder.close()


def test_no_text_of_a_result_has_a_secret(tmp_path: Path) -> None:
    """Write a result with secrets in every text: redacted in the file and in what is returned."""
    of = with_secrets(tmp_path, "CANARY-token", QUOTED_KEY='CANARY "quoted" ü')
    started(of, "r1")
    check = CriterionResult(criterion="throughput >= 5 CANARY-token", value=7.5, passed=True)
    finished = replace(
        result("r1"),
        message='CANARY-token in CANARY "quoted" ü',
        evidence="CANARY-token",
        checks=(check,),
        ranks=(Rank(rank=0, node="CANARY-token"),),
        metrics={"loss": {"value": None, "unit": "CANARY-token", "note": "CANARY-token"}},
    )
    written = store.finish(of, finished)
    assert written.message == "[REDACTED] in [REDACTED]"
    assert "CANARY" not in (tmp_path / "runs/r1/result.json").read_text() + str(written)
    assert store.read(tmp_path, "r1").result == written


# --- what a workload plants in runs/ -------------------------------------------------------------------------


@pytest.fixture
def limited() -> Iterator[None]:
    """Fail the test after 60 s by SIGALRM; restore the handler at the end."""

    def expire(*_: object) -> None:
        """Fail the test."""
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def sparse(path: Path, size: int, end: bytes = b"") -> None:
    """Write a sparse file of this size that ends with ``end``."""
    with path.open("wb") as stream:
        stream.truncate(size - len(end))
        stream.seek(0, os.SEEK_END)
        stream.write(end)


PLANTS: dict[str, Callable[[Path], object]] = {
    "object": lambda path: path.write_text("{}"),
    "array": lambda path: path.write_text("[]"),
    "nested": lambda path: path.write_text("[" * 1_000_000),
    "nested in a key": lambda path: path.write_text('{"metrics": {"a": ' + '{"a":' * 1_000_000),
    "odd text": lambda path: path.write_bytes(b'{"workload": "\xff"}'),
    "large number": lambda path: path.write_text('{"seconds": 1e999}'),
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "large": lambda path: sparse(path, 1 << 40),
}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_planted_result_is_passed_over(tmp_path: Path, plant: Callable[[Path], object]) -> None:
    """Plant an invalid result.json: the run is listed and read as done, without a result."""
    started(lab(directory=tmp_path), "20260101-a")
    plant(started(lab(directory=tmp_path), "20260102-b") / "result.json")
    assert [run.run_id for run in store.listing(tmp_path)] == ["20260102-b", "20260101-a"]
    assert store.read(tmp_path, "latest") == ShownRun(RunSummary(run_id="20260102-b", state="done"), None)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_run_with_a_planted_job_is_closed(tmp_path: Path, plant: Callable[[Path], object]) -> None:
    """Plant an invalid job.json and abandon the run: workload "unknown"."""
    of = lab(directory=tmp_path)
    plant(started(of, "r1") / "job.json")
    store.abandon(of, "r1")
    assert to_json(store.read(tmp_path, "r1").result)["workload"] == "unknown"


def test_only_directories_that_are_named_as_runs_are_listed(tmp_path: Path) -> None:
    """Plant folders, links and files in runs/: only proper run folders are listed and read."""
    of = lab(directory=tmp_path)
    started(of, "20260101-a")
    for name in ("\x1b[2J", "new\nline", ".hidden", "-option", "with blank", "ünicode"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "result.json").touch()
    (tmp_path / "runs/20260102-link").symlink_to("20260101-a")
    (tmp_path / "runs/20260103-file").touch()
    assert [run.run_id for run in store.listing(tmp_path)] == ["20260101-a"]
    for name in ("20260102-link", "\x1b[2J"):
        with pytest.raises(ConfigError):
            store.read(tmp_path, name)


def test_a_directory_that_is_there_before_its_run_is_not_taken(tmp_path: Path) -> None:
    """Create a run whose folder exists or is a link: HostError, nothing is written there."""
    of = lab(directory=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/r1").mkdir()
    (tmp_path / "runs/r2").symlink_to(elsewhere)
    for run_id in ("r1", "r2"):
        with pytest.raises(HostError, match=f"cannot write .*/runs/{run_id}: File exists"):
            store.create(of, run_id, (File(path="job.json", content="{}"),))
    assert list(elsewhere.iterdir()) == []


def record(of: Lab, run_id: str) -> None:
    """Write all files of a run's record that labctl writes."""
    names = ("job.json", "rendered/nodes/worker-0/compose.yml")
    with ExitStack() as held:
        path = store.create(of, run_id, (), [File(path=name, content="{}") for name in names])
        log = store.RunLog(path, of, workload())
        held.callback(log.close)
        log.keep((printed("ssh-ed25519 AAAA"),))
        store.finish(of, result(run_id))


def test_no_link_that_is_planted_in_a_run_is_followed(tmp_path: Path) -> None:
    """Plant links in runs while they are written: files elsewhere stay as they are."""
    of = lab(directory=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    names = ("output.log", "result.json", "job.json", "started", "run.lock", "rendered", "ranks")
    for name in names:
        (elsewhere / name).write_text("mine")
    (tmp_path / "runs").mkdir()
    targets, over = [tmp_path / "runs/r0/job.json"], threading.Event()

    def plant() -> None:
        """Replace the current target by a link to ``elsewhere`` again and again."""
        while not over.is_set():
            place = targets[-1]
            with suppress(OSError):
                if place.exists() and not place.is_symlink():
                    place.rename(tmp_path / os.urandom(4).hex())
                    place.symlink_to(elsewhere if place.parent.name == "runs" else elsewhere / place.name)
                elif place.parent.name != "runs":
                    place.symlink_to(elsewhere / place.name)

    planter = threading.Thread(target=plant)
    planter.start()
    try:
        for number in range(50):
            run_id = f"r{number}"
            targets.append(tmp_path / "runs" / run_id / ("", *names)[number % 7])
            with suppress(HostError):
                record(of, run_id)
    finally:
        over.set()
        planter.join()
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == dict.fromkeys(names, "mine")


def test_a_link_in_place_of_a_file_that_is_yet_to_be_made_is_refused(tmp_path: Path) -> None:
    """Plant a link as output.log: HostError, its target stays."""
    of = lab(directory=tmp_path)
    (tmp_path / "keys").write_text("mine")
    path = store.create(of, "r1", ())
    (path / "output.log").symlink_to(tmp_path / "keys")
    with pytest.raises(HostError, match=r"cannot write .*/output.log: File exists"):
        store.RunLog(path, of, workload())
    assert (tmp_path / "keys").read_text() == "mine"


def test_a_result_replaces_a_link_and_does_not_go_through_one(tmp_path: Path) -> None:
    """Plant a link as result.json or as the run's folder: it is replaced, or HostError; targets stay."""
    of = lab(directory=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keys").write_text("mine")
    (store.create(of, "r1", ()) / "result.json").symlink_to(elsewhere / "keys")
    store.finish(of, result("r1"))
    assert store.read(tmp_path, "r1").result == replace(result("r1"), seconds=12.346)
    store.create(of, "r2", ()).rename(tmp_path / "away")
    (tmp_path / "runs/r2").symlink_to(elsewhere)
    with pytest.raises(HostError, match=r"cannot write .*/runs/r2/result.json: "):
        store.finish(of, result("r2"))
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"keys": "mine"}


# --- the logs of ranks -----------------------------------------------------------------------------------------

HIDDEN = (Secret("CANARY-token"),)


def test_logs_that_only_seem_to_be_a_runs_are_left_alone(tmp_path: Path) -> None:
    """Redact logs behind links or with a second hard link: they stay."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("a.log", "b.log"):
        (elsewhere / name).write_text("CANARY-token")
    run = tmp_path / "run"
    run.mkdir()
    (run / "ranks").symlink_to(elsewhere)
    (run / "hosts").mkdir()
    (run / "hosts/h1").symlink_to(elsewhere)
    os.link(elsewhere / "b.log", run / "b.log")
    store.redact_ranks(run, HIDDEN)
    (tmp_path / "link").symlink_to(elsewhere)
    store.redact_ranks(tmp_path / "link", HIDDEN)
    assert {path.read_text() for path in elsewhere.iterdir()} == {"CANARY-token"}


@pytest.mark.usefixtures("limited")
def test_a_pipe_under_the_name_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    """Redact a folder with a FIFO: it is skipped, the other log is redacted."""
    os.mkfifo(tmp_path / "x.log")
    (tmp_path / "y.log").write_text("CANARY-token")
    store.redact_ranks(tmp_path, HIDDEN)
    assert (tmp_path / "y.log").read_text() == "[REDACTED]"


SWAP = """
import os, sys
opened, log, link = *sys.argv[1:],
print("ready", flush=True)
while True:
    for name in os.listdir(opened):
        try:
            if os.readlink(f"{opened}/{name}") == log:
                os.replace(link, log)
                sys.exit()
        except FileNotFoundError:
            pass
"""


@pytest.mark.usefixtures("limited")
def test_a_log_that_becomes_a_link_while_it_is_read_is_not_written_through(tmp_path: Path) -> None:
    """Replace a log by a link while it is redacted: the link's target stays."""
    keys, log, link = tmp_path / "keys", tmp_path / "x.log", tmp_path / "link"
    keys.write_text("mine")
    log.write_bytes(b"CANARY-token\n" * 2_000_000)
    link.symlink_to(keys)
    argv = [sys.executable, "-c", SWAP, f"/proc/{os.getpid()}/fd", str(log), str(link)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout
        assert attacker.stdout.readline()
        store.redact_ranks(tmp_path, HIDDEN)
        assert attacker.wait() == 0
    assert keys.read_text() == "mine"


@pytest.mark.usefixtures("limited")
def test_a_log_larger_than_the_memory_takes_little_of_it(tmp_path: Path) -> None:
    """Redact a sparse log of 4 TiB: below 16 MiB of memory."""
    sparse(tmp_path / "x.log", 1 << 42, b"CANARY-token\r\n")
    tracemalloc.start()
    store.redact_ranks(tmp_path, HIDDEN)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert (tmp_path / "x.log").read_bytes().endswith(b"[REDACTED]\r\n")


@pytest.mark.parametrize("piece", range(1, 30))
def test_a_secret_is_found_wherever_the_pieces_of_a_log_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Redact with pieces of 1 to 29 bytes: every secret, line ends and mode kept."""
    monkeypatch.setattr(store, "PIECE", piece)
    path = tmp_path / "x.log"
    path.write_bytes(b"\xff abcdEFGH\r\nabcd abcdEFGabcdEFGH\0 \n\r\nabc")
    path.chmod(0o640)
    store.redact_ranks(tmp_path, (Secret("abcdEFGH"), Secret("abcd")))
    assert path.read_bytes() == b"\xff [REDACTED]\r\n[REDACTED] [REDACTED]EFG[REDACTED]\0 \n\r\nabc"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_log_without_secrets_stays_as_it_is(tmp_path: Path) -> None:
    """Redact a log without secrets: it is not written."""
    (tmp_path / "x.log").write_bytes(b"fine\r\n")
    before = (tmp_path / "x.log").stat()
    store.redact_ranks(tmp_path, HIDDEN)
    assert (tmp_path / "x.log").stat() == before
