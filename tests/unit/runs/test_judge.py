from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.builders import job, lab, workload
from support.in_memory import InMemory

from labctl.backends.docker import agent
from labctl.errors import ConfigError, HostError
from labctl.model import Criterion, Lab, Metric, Result
from labctl.records import store
from labctl.records.active import Run
from labctl.records.lines import Line
from labctl.records.verdict import RunOutcome
from labctl.runs import judge


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Write .env with HF_TOKEN; return a lab at tmp_path."""
    (tmp_path / ".env").write_text("HF_TOKEN=hf_canary\n")
    return lab(directory=tmp_path)


def logs(of: Lab, rank: int | None, *, live: bool = False, timestamps: bool = False) -> list[str]:
    """Return the lines that judge.logs prints for run r1."""
    lines: list[str] = []
    judge.logs(InMemory(of), "r1", lines.append, follow=live, rank=rank, timestamps=timestamps)
    return lines


def wrote(of: Lab, name: str, text: str | bytes) -> None:
    """Write a file below runs/."""
    path = of.directory / "runs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_run_that_has_ended_is_printed_from_its_record(of: Lab) -> None:
    """Print a run that has ended: output.log, or the log of one rank."""
    wrote(of, "r1/result.json", "{}")
    wrote(of, "r1/output.log", b"one\n\nworker-1: two \xff\nno end")
    wrote(of, "r1/ranks/rank-1.log", "two\n")
    wrote(of, "r1/ranks/rank-10.log", "ten\n")
    assert logs(of, None) == ["one", "", "worker-1: two \ufffd", "no end"]
    assert logs(of, 1) == ["two"]
    assert logs(of, 10) == ["ten"]


def test_output_that_is_larger_than_any_other_record_is_printed(of: Lab) -> None:
    """Print output above the size limit of records: every line."""
    lines = (store.LARGEST_RECORD >> 20) + 1
    wrote(of, "r1/output.log", (b"x" * ((1 << 20) - 1) + b"\n") * lines)
    assert len(logs(of, None)) == lines


def test_a_rank_of_an_elastic_launcher_is_printed_from_every_node_that_it_was_on(of: Lab) -> None:
    """Print a rank that was on two nodes: the lines of both logs."""
    wrote(of, "r1/ranks/rank-0@worker-0.log", "before\n")
    wrote(of, "r1/ranks/rank-0@worker-1.log", "after\n")
    assert logs(of, 0) == ["before", "after"]


def test_a_rank_of_a_run_that_is_under_way_is_printed_so_far_without_secrets(of: Lab) -> None:
    """Print a rank of a running run: its output so far, secrets redacted."""
    wrote(of, ".outputs/r1/ranks/rank-0.log", "token hf_canary\n")
    assert logs(of, 0) == ["token [REDACTED]"]


def test_a_rank_without_a_log_is_an_error_that_says_where_its_lines_are(of: Lab) -> None:
    """Print a rank without a log: ConfigError, the hint names -f."""
    wrote(of, "r1/ranks/rank-0.log", "hello\n")
    with pytest.raises(ConfigError, match="run r1 has no log of rank 1 here") as caught:
        logs(of, 1)
    assert "-f follows" in caught.value.hint


def test_each_line_of_a_run_and_of_a_rank_has_its_time(of: Lab) -> None:
    """Print with timestamps: each line has its time, "-" where none is recorded."""
    path = store.create(of, "r1", ())
    lines = ((1000.0, None, "launcher"), (1000.25, 1, "one\rtwo"), (1000.5, 0, "zero"), (1001.0, 1, "three"))
    with closing(store.RunLog(path, of, workload())) as log:
        for when, rank, text in lines:
            log.keep((Line(text, when, rank),))
    wrote(of, "r1/ranks/rank-1.log", "one\rtwo\nthree\nnever arrived\n")
    at = [datetime.fromtimestamp(when).astimezone().isoformat(timespec="milliseconds") for when, *_ in lines]
    assert logs(of, None, timestamps=True) == [
        f"{at[0]} launcher", f"{at[1]} one", f"{at[1]} two", f"{at[2]} zero", f"{at[3]} three",
    ]  # fmt: skip
    assert logs(of, 1, timestamps=True) == [f"{at[1]} one", f"{at[1]} two", f"{at[3]} three", "- never arrived"]
    (path / store.TIMES).unlink()
    assert logs(of, None, timestamps=True)[0] == "- launcher"


def test_of_one_rank_only_what_it_says_is_followed(of: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow one rank: its lines alone, secrets redacted."""

    def follow_all(*arguments: Any) -> None:
        """Hand three lines of launcher and ranks to the reader."""
        for place, text in enumerate(("launcher", "worker-0: \x010\x02zero", "worker-1: \x011\x02one hf_canary")):
            arguments[3].read([f"{place + 1} 1000.5 {text}"])

    monkeypatch.setattr(agent, "follow", follow_all)
    recorded = msgspec.to_builtins(replace(job(of, run_id="r1"), files=()), enc_hook=str)
    wrote(of, "r1/job.json", json.dumps({"job": recorded}))
    assert logs(of, 1, live=True) == ["one [REDACTED]"]
    assert [line.partition(" ")[2] for line in logs(of, 1, live=True, timestamps=True)] == ["one [REDACTED]"]
    assert logs(of, None, live=True) == ["launcher", "worker-0: zero", "worker-1: one [REDACTED]"]


def test_metrics_that_no_line_matched_are_remarked_unless_they_are_optional() -> None:
    """Ask for unmatched metrics of a PASS: the required ones without a value; none of an ERROR."""
    loss, accuracy = Metric(name="loss", pattern="loss (.)"), Metric(name="accuracy", pattern="acc (.)", optional=True)
    of = workload(metrics=(loss, accuracy))
    silent = Result(
        run_id="r1",
        workload="hello",
        launcher="deepspeed",
        lab="demo",
        verdict="PASS",
        cause=None,
        message="Completed.",
        exit_code=0,
    )
    assert judge.unmatched(of, silent) == [loss]
    assert judge.unmatched(of, replace(silent, metrics={"loss": {"value": 3.0}})) == []
    assert judge.unmatched(of, replace(silent, verdict="ERROR")) == []


def test_a_script_is_judged_by_the_loss_that_was_found_in_its_output(of: Lab) -> None:
    """Judge a program by `loss`: train_loss found in its output meets it, and the series are recorded."""
    asked = job(of, run_id="r1", criteria=(Criterion(metric="loss", below=1),), known_metrics="all")
    lines = [Line(f"labctl: rank {rank} of 2 on worker-{rank}", 1.0, rank, report=True) for rank in (0, 1)]
    lines = [replace(line, said=line.text) for line in lines]
    with closing(store.RunLog(store.create(of, "r1", ()), of, asked.workload)) as log:
        log.keep([*lines, Line("step 1 train loss: 0.5, lr: 0.1", 2.0, 0), Line("nothing", 3.0, 1)])
        result = judge.result_of(
            Run(lab=of, job=asked), RunOutcome(exit_code=0, cause=None, message=""), log, 1.0, datetime.now()
        )
    assert (result.verdict, [check.criterion for check in result.checks]) == ("PASS", ["train_loss < 1"])
    assert result.metrics["train_loss"] == {
        "value": 0.5,
        "unit": "",
        "found": "name: 1.2",
        "line": "step 1 train loss: 0.5, lr: 0.1",
    }
    samples = (of.directory / "runs/r1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(sample)["metric"] for sample in samples] == ["train_loss", "learning_rate"]


def test_stop_closes_a_run_that_nothing_supervises_any_more(of: Lab) -> None:
    """Stop a run that never began, as of a labctl that was killed: its record is closed, its result returned."""
    wrote(of, "r1/started", "")
    result = judge.stop(InMemory(of), "r1", 0)
    assert (result.run_id, result.verdict, result.cause) == ("r1", "ERROR", "lab-lost")
    assert store.read_result(of.directory, "r1") == result
    with pytest.raises(HostError, match="run r1 has ended: ERROR"):
        judge.stop(InMemory(of), "r1", 0)
    wrote(of, "r1/result.json", "{")
    with pytest.raises(HostError, match=r"run r1 has ended: its result\.json cannot be read"):
        judge.stop(InMemory(of), "r1", 0)
