from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support.builders import lab

from labctl.cli.output import to_json
from labctl.config import dotenv, settings
from labctl.errors import ConfigError
from labctl.lab import spec as labs
from labctl.model import CriterionResult, File, Lab, Rank, Result, Secret
from labctl.runs import store
from labctl.runs.store import RunSummary
from labctl.system import filelock

NOW = datetime(2026, 1, 2, 15, 4, 5, tzinfo=timezone.utc)


def result(run_id: str) -> Result:
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
    """A lab whose settings hold these secrets."""
    lines = [f"LAB_ENV_{name}={dotenv.quote(value)}\n" for name, value in variables.items()]
    (directory / ".env").write_text("".join([f"HF_TOKEN={token}\n", *lines]), encoding="utf-8")
    found = settings.load(directory, {}, {})
    return lab(directory=directory, secrets=labs.secrets(found), hidden=labs.hidden(found))


def started(of: Lab, run_id: str) -> Path:
    path = store.create(of, run_id, (File(path="hostfile", content="worker-0 slots=1\n", mode=0o644),))
    (path / store.LOCK).touch()
    return path


# --- ids and states ------------------------------------------------------------------------------------------


def test_ids_sort_by_time_and_read_as_what_they_are() -> None:
    first, second = store.new_id("opt-tiny", NOW), store.new_id("opt-tiny", NOW.replace(hour=16))
    assert first.startswith("20260102-150405-opt-tiny-")
    assert first < second
    assert store.new_id("opt-tiny", NOW) != first


def test_a_run_goes_from_running_to_done(tmp_path: Path) -> None:
    of = lab(directory=tmp_path)
    path = started(of, "r1")
    with filelock.held(path / store.LOCK, "run r1"):
        assert store.state(tmp_path, "r1") == "running"
        assert store.read(tmp_path, "r1") == RunSummary(run_id="r1", state="running")
        store.finish(tmp_path, result("r1"))
    assert store.state(tmp_path, "r1") == "done"


def test_a_run_whose_process_ended_without_a_result_is_orphaned(tmp_path: Path) -> None:
    path = started(lab(directory=tmp_path), "r1")
    assert store.state(tmp_path, "r1") == "orphaned"
    with filelock.held(path / store.LOCK, "run r1"):
        pass
    assert store.state(tmp_path, "r1") == "orphaned"


def test_create_makes_room_for_the_ranks_and_writes_what_is_known(tmp_path: Path) -> None:
    path = started(lab(directory=tmp_path), "r1")
    assert path == tmp_path / "runs/r1"
    assert (path / "ranks").is_dir()
    assert (path / "hostfile").read_text() == "worker-0 slots=1\n"


# --- results -------------------------------------------------------------------------------------------------


def test_the_result_has_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    started(lab(directory=tmp_path), "r1")
    written = store.finish(tmp_path, result("r1"))
    assert {"schema": 1, **to_json(written)} == {
        "schema": 1,
        "run_id": "r1",
        "workload": "hello",
        "launcher": "deepspeed",
        "lab": "demo",
        "verdict": "PASS",
        "cause": None,
        "message": "All criteria met.",
        "exit_code": 0,
        "world_size": 2,
        "ranks": [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}],
        "metrics": {"throughput": {"value": 7.5, "unit": "samples/s"}, "loss": {"first": 4.0, "last": 1.0}},
        "checks": [{"criterion": "throughput >= 5", "value": 7.5, "passed": True}],
        "seconds": 12.346,
        "started": "2026-01-02T15:04:05+00:00",
    }
    assert json.loads((tmp_path / "runs/r1/result.json").read_text()) == {"schema": 1, **to_json(written)}
    assert store.read(tmp_path, "r1") == written


def test_a_result_of_a_later_version_is_read(tmp_path: Path) -> None:
    started(lab(directory=tmp_path), "r1")
    later = {**to_json(store.finish(tmp_path, result("r1"))), "verdict": "MAYBE", "cause": "tired", "mood": "low"}
    (tmp_path / "runs/r1/result.json").write_text(json.dumps(later))
    read = store.read(tmp_path, "r1")
    assert (read.verdict, read.cause) == ("MAYBE", "tired")


@pytest.mark.parametrize("run_id", ["nope", "../runs/r1", "..", "r1/ranks", ""])
def test_an_unknown_run_names_the_latest(tmp_path: Path, run_id: str) -> None:
    started(lab(directory=tmp_path), "r1")
    with pytest.raises(ConfigError) as caught:
        store.read(tmp_path, run_id)
    assert caught.value.message.startswith(f"no run `{run_id}`")
    assert caught.value.hint == "the latest are r1"


@pytest.mark.parametrize("broken", [b"{", b'{"run_id": "\xff"}', b"[]", b"{}"])
def test_the_listing_has_the_latest_first_and_takes_broken_results(tmp_path: Path, broken: bytes) -> None:
    for run_id in ("20260101-a", "20260103-c", "20260102-b"):
        started(lab(directory=tmp_path), run_id)
    store.finish(tmp_path, result("20260103-c"))
    (tmp_path / "runs/20260102-b/result.json").write_bytes(broken)
    assert [(run.run_id, run.state, run.verdict) for run in store.listing(tmp_path)] == [
        ("20260103-c", "done", "PASS"),
        ("20260102-b", "done", None),
        ("20260101-a", "orphaned", None),
    ]
    assert len(store.listing(tmp_path, 1)) == 1
    assert store.listing(tmp_path / "nowhere") == ()


def test_ranks_are_those_that_reported_in_behind_any_prefix() -> None:
    lines = [
        "worker-1: labctl: rank 1 of 2 on worker-1",
        "labctl: rank 0 of 2 on worker-0",
        "labctl: rank 0 on worker-0 exited with code 1",
        "labctl: rank x of 2 on worker-0",
    ]
    assert store.ranks_of(lines) == (Rank(rank=0, node="worker-0"), Rank(rank=1, node="worker-1"))


MAPPING = "global_rank_mapping=defaultdict(<class 'list'>, {'worker-0': [0, 1], 'worker-1': [2, 3]})"


def test_ranks_that_a_script_started_are_those_of_the_nodes_where_deepspeed_started_them() -> None:
    lines = [f"worker-1: [2026-01-02 15:04:05,000] [INFO] [launch.py:163:main] {MAPPING}", "other: words"]
    assert store.ranks_of(lines) == (Rank(rank=2, node="worker-1"), Rank(rank=3, node="worker-1"))


def test_ranks_that_report_are_counted_by_that_alone() -> None:
    lines = [f"worker-1: [launch.py:163:main] {MAPPING}", "worker-0: labctl: rank 0 of 4 on worker-0"]
    assert store.ranks_of(lines) == (Rank(rank=0, node="worker-0"),)


# --- secrets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["{worker-0: [0]}", "{'worker-0': [__import__('os')]}", "{'worker-0': []}", "{}"])
def test_a_line_that_is_only_like_deepspeeds_starts_no_rank(mapping: str) -> None:
    line = f"worker-0: [INFO] global_rank_mapping=defaultdict(<class 'list'>, {mapping})"
    assert store.ranks_of([line]) == ()


def test_a_pattern_with_flags_of_its_own_is_kept_apart(tmp_path: Path) -> None:
    recorder = store.RunLog(tmp_path, lab(), ["(?i)loss: (\\S+)", "(a)\\1 (\\d)"])
    for line in ("LOSS: 3", "aa 4", "ab 5"):
        recorder.keep(line)
    recorder.close()
    assert recorder.lines == ["LOSS: 3", "aa 4"]


def test_whatever_lies_under_the_name_of_a_log_does_not_cost_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "elsewhere").write_text("secret", encoding="utf-8")
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    store.redact_ranks(tmp_path, (Secret("secret"),))
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == "secret"


def test_secrets_are_taken_out_of_lines_and_of_what_ranks_wrote(tmp_path: Path) -> None:
    of = with_secrets(tmp_path, "CANARY-token", WANDB_API_KEY="CAN ARY's $key")
    path = started(of, "r1")
    recorder = store.RunLog(path, of, ["speed (.*)"])
    said = "got CANARY-token and CAN ARY's $key"
    (path / "ranks/rank-0.log").write_bytes(said.encode() + b" \xff\n")
    assert recorder.keep(said) == "got [REDACTED] and [REDACTED]"
    recorder.close()
    assert not recorder.lines
    assert (path / "output.log").read_text() == "got [REDACTED] and [REDACTED]\n"
    assert (path / "ranks/rank-0.log").read_bytes() == b"got [REDACTED] and [REDACTED] \xff\n"


@pytest.mark.parametrize("value", ["first line\nsecond line", "unclosed ' quote\nand \" another", "a\x85b\u2028c-long"])
def test_a_secret_of_several_lines_is_taken_out_line_by_line(tmp_path: Path, value: str) -> None:
    of = with_secrets(tmp_path, SIGNING_KEY=value, OTHER_KEY="other-value")
    hidden = of.hidden
    kept = [store.redact(line, hidden) for line in (*value.split("\n"), "other-value")]
    assert not [line for line in kept if "line" in line or "quote" in line or "long" in line or "other" in line]


def test_a_secret_that_begins_another_leaves_no_rest_of_it(tmp_path: Path) -> None:
    of = with_secrets(tmp_path, A_KEY="abcd", B_KEY="abcdEFGH")
    recorder = store.RunLog(started(of, "r1"), of, [])
    kept = recorder.keep("x abcdEFGH y")
    recorder.close()
    assert "EFGH" not in kept


def test_the_verdict_reads_what_was_said_though_the_record_hides_it(tmp_path: Path) -> None:
    of = with_secrets(tmp_path, PORT_PASSWORD="2048")  # noqa: S106
    recorder = store.RunLog(started(of, "r1"), of, [r"Throughput: (\S+)"])
    for line in (
        "worker-0: labctl: rank 0 of 1 on worker-0",
        "nothing of note",
        "worker-0: Throughput: 2048.3 samples/sec",
    ):
        recorder.keep(line)
    recorder.close()
    assert recorder.lines == ["worker-0: labctl: rank 0 of 1 on worker-0", "worker-0: Throughput: 2048.3 samples/sec"]
    assert "2048" not in (tmp_path / "runs/r1/output.log").read_text()


def test_an_abandoned_run_is_closed_without_its_secrets(tmp_path: Path) -> None:
    of = with_secrets(tmp_path, "CANARY-token")
    path = started(of, "r1")
    (path / "ranks/rank-0.log").write_text("got CANARY-token\n")
    store.abandon(of, "r1")
    assert (path / "ranks/rank-0.log").read_text() == "got [REDACTED]\n"
    assert to_json(store.read(tmp_path, "r1"))["cause"] == "interrupted"


def test_lines_are_on_disk_as_they_come(tmp_path: Path) -> None:
    of = lab(directory=tmp_path)
    recorder = store.RunLog(started(of, "r1"), of, [])
    recorder.keep("ü first")
    assert (tmp_path / "runs/r1/output.log").read_text(encoding="utf-8") == "ü first\n"
    recorder.close()
