"""`run`, `runs`, `show`: the verdict, the record, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

RESULT_KEYS = {
    "schema", "run_id", "workload", "launcher", "lab", "verdict", "cause", "message", "exit_code", "world_size",
    "ranks", "metrics", "checks", "seconds", "started", "domain", "retry", "evidence",
}  # fmt: skip


@pytest.fixture
def lab(module_lab: Lab) -> Lab:
    """Return the module's lab, up."""
    module_lab.ensure_up()
    return module_lab


@pytest.fixture(scope="module")
def hello(module_lab: Lab) -> Answer:
    """Return the answer of `run hello --json` under DeepSpeed's launcher."""
    return module_lab.call("run", "hello", "--launcher", "deepspeed", "--json", "--set", "print=PROJECT_PATH")


@pytest.fixture
def record(hello: Answer, lab: Lab) -> Path:
    """Return the record directory of the run of `hello`."""
    return lab.path / "runs" / str(hello.json["run_id"])


@pytest.mark.smoke
def test_a_run_that_meets_its_criteria_passes_with_one_document(hello: Answer, lab: Lab) -> None:
    """`run hello --json` prints a result with all keys, verdict PASS and metric answer 42."""
    result = hello.expect(0).json
    assert result.keys() >= RESULT_KEYS
    assert (result["schema"], result["verdict"], result["cause"], result["exit_code"]) == (1, "PASS", None, 0)
    assert (result["workload"], result["launcher"], result["lab"]) == ("hello", "deepspeed", lab.name)
    assert result["metrics"] == {"answer": {"value": 42, "unit": "things"}}
    assert [check["passed"] for check in result["checks"]] == [True]
    assert 0 < result["seconds"] < 120


@pytest.mark.smoke
def test_there_is_one_rank_on_each_node(hello: Answer) -> None:
    """Rank 0 is on worker-0 and rank 1 on worker-1."""
    assert hello.json["world_size"] == 2
    assert hello.json["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]


@pytest.mark.smoke
def test_a_run_leaves_its_whole_record(hello: Answer, record: Path) -> None:
    """The record has all files, and result.json equals the printed document."""
    expected = {
        "plan.txt", "job.json", "settings.json", "versions.json", "hostfile", "rank.sh", "result.json",
        "output.log", "output.times", "metrics.jsonl",
        "rendered/nodes/worker-0/compose.yml", "rendered/nodes/worker-1/compose.yml",
        "ranks/rank-0.log", "ranks/rank-1.log",
    }  # fmt: skip
    assert {str(path.relative_to(record)) for path in record.rglob("*")} >= expected
    assert json.loads((record / "result.json").read_text()) == hello.json
    assert "image_id" in json.loads((record / "versions.json").read_text())
    assert "deepspeed" in json.loads((record / "job.json").read_text())["argv"]
    assert (record / "hostfile").read_text().split() == ["worker-0", "slots=1", "worker-1", "slots=1"]


@pytest.mark.smoke
def test_every_rank_has_its_own_log_and_all_of_them_are_in_the_output(record: Path) -> None:
    """Each rank log has its rank's lines alone; output.log has both."""
    for rank in (0, 1):
        log = (record / f"ranks/rank-{rank}.log").read_text()
        assert f"rank {rank} arguments ['--print', 'PROJECT_PATH']" in log
        assert f"rank {1 - rank} arguments" not in log
        assert f"rank {rank} arguments" in (record / "output.log").read_text()


@pytest.mark.smoke
def test_the_record_belongs_to_the_caller(record: Path) -> None:
    """All files of the record have the owner of the runs directory."""
    owner = record.parent.stat().st_uid
    assert {path.stat().st_uid for path in record.rglob("*")} == {owner}


@pytest.mark.smoke
def test_nothing_of_a_run_that_passed_is_left(hello: Answer, lab: Lab) -> None:
    """No process of the run is left in any container."""
    assert lab.processes_of(hello.json["run_id"]) == []


@pytest.mark.smoke
def test_show_and_runs_read_the_record_back(hello: Answer, lab: Lab) -> None:
    """`show` prints the same document with the run's note and command; `runs` and `status` list the run as done."""
    run_id, command = hello.json["run_id"], "labctl run hello --launcher deepspeed --set print=PROJECT_PATH"
    lab.call("note", run_id, "the", "first").expect(0)
    shown = lab.call("show", run_id, "--json").expect(0).json
    assert shown == {**hello.json, "note": "the first", "command": command}
    assert run_id in lab.call("show", run_id).expect(0).out
    listed = {run["run_id"]: run for run in lab.call("runs", "--json").expect(0).json["runs"]}
    assert [listed[run_id][key] for key in ("state", "verdict", "note")] == ["done", "PASS", "the first"]
    shown = {run["run_id"]: run["state"] for run in lab.call("status", "--json").expect(0).json["runs"]}
    assert shown[run_id] == "done"


@pytest.mark.smoke
def test_an_expectation_that_is_missed_fails_on_the_nodes_of_the_hostfile(lab: Lab) -> None:
    """`--expect answer>=50` with 47 on worker-1: exit code 5, FAIL, cause criteria."""
    hostfile = lab.path / "one-node"
    hostfile.write_text("worker-1 slots=1\n", encoding="utf-8")
    answer = lab.call("run", "hello", "--hostfile", str(hostfile), "--set", "answer=47", "--expect", "answer>=50")
    assert "FAIL (criteria)" in answer.expect(5).out
    assert "(>= 50 wanted)" in answer.out
    result = lab.call("show", "latest", "--json").expect(0).json
    assert (result["verdict"], result["cause"], result["exit_code"]) == ("FAIL", "criteria", 5)
    assert result["metrics"]["answer"]["value"] == 47
    assert [check["passed"] for check in result["checks"]] == [True, False]
    assert result["ranks"] == [{"rank": 0, "node": "worker-1"}]


@pytest.mark.smoke
def test_a_number_that_is_missing_is_never_a_pass(lab: Lab) -> None:
    """A workload that prints no metric: exit code 4, cause no-metric, and its name."""
    result = lab.call("run", "silent", "--json").expect(4).json
    assert (result["verdict"], result["cause"]) == ("ERROR", "no-metric")
    assert "speed" in result["message"]


@pytest.mark.smoke
def test_a_hostfile_that_is_not_there_is_no_local_run(lab: Lab) -> None:
    """`--hostfile` of a missing file: exit code 2, it is named, and no run is recorded."""
    before = lab.run_ids()
    answer = lab.call("run", "hello", "--hostfile", "nowhere", "--json").expect(2)
    assert "nowhere" in answer.json["error"]["message"]
    assert lab.run_ids() == before


def test_a_dry_run_says_what_it_would_do_and_does_nothing(lab: Lab) -> None:
    """The plan has DeepSpeed's command, and no run is recorded."""
    before = lab.run_ids()
    plan = lab.call("run", "hello", "--launcher", "deepspeed", "--dry-run").expect(0).out
    assert "deepspeed --hostfile" in plan
    assert lab.run_ids() == before


def test_an_unknown_workload_is_a_usage_error(lab: Lab) -> None:
    """`run helo`: exit code 2, and the error suggests hello."""
    answer = lab.call("run", "helo", "--json").expect(2)
    assert "helo" in answer.json["error"]["message"]
    assert "hello" in answer.json["error"]["hint"] + answer.json["error"]["message"]
