"""A run that breaks, hangs or is stopped: its verdict, and its processes are gone. Times: test_promptness.py."""

from __future__ import annotations

import os
import re
import signal
import tarfile
from typing import Any

import pytest
from support.harness import Answer, Lab, pause, wait_until

pytestmark = pytest.mark.docker

NODES = ["launcher", "worker-0", "worker-1"]


def result(answer: Answer, code: int, cause: str, of_run: int | None = None) -> dict[str, Any]:
    """Assert exit code and cause of an ERROR (``of_run``: exit code in the document); return the document."""
    document: dict[str, Any] = answer.expect(code).json
    assert (document["verdict"], document["cause"], document["exit_code"]) == ("ERROR", cause, of_run or code)
    return document


def running_nodes(lab: Lab) -> list[str]:
    """List the nodes whose containers run, sorted."""
    return sorted(node for node, container in lab.containers().items() if container.status == "running")


def states(lab: Lab) -> dict[str, str]:
    """Return node -> state of its container, from `labctl status`."""
    shown = lab.call("status", "--json").expect(0).json
    return {node["name"]: node["state"] for node in shown["nodes"]}


@pytest.mark.smoke
def test_a_worker_that_is_killed_ends_the_run_and_is_named(lab: Lab) -> None:
    """Kill worker-1: exit code 4, node-lost, its exit code 137 is in message and evidence."""
    with lab.stubborn_run("--launcher", "deepspeed", "--json") as (running, run_id):
        canary = lab.plant_canary("worker-0")
        lab.containers()["worker-1"].kill("SIGKILL")
        answer = running.answer(120)
    document = result(answer, 4, "node-lost")
    assert document["message"] == "worker-1 (rank 1): container died with exit code 137"
    with tarfile.open(lab.path / "runs" / run_id / "evidence.tar.gz") as archive:
        member = archive.extractfile(f"evidence-{run_id}/hosts/local.txt")
        assert member
        assert re.search(r"worker-1-1: die, exit code 137\n", member.read().decode())
    assert lab.processes_of(run_id) == []
    assert running_nodes(lab) == ["launcher", "worker-0"]
    assert canary()


def test_a_worker_that_is_cut_off_from_the_network_ends_the_run_and_is_named(lab: Lab) -> None:
    """Disconnect worker-1: exit code 4, node-lost, the network is named."""
    with lab.stubborn_run("--json") as (running, run_id):
        worker = lab.containers()["worker-1"]
        (network,) = worker.attrs["NetworkSettings"]["Networks"]
        lab.engine.networks.get(network).disconnect(worker)
        try:
            answer = running.answer(120)
            assert lab.processes_of(run_id) == []
        finally:
            worker.remove(force=True)
    document = result(answer, 4, "node-lost")
    assert document["message"] == f"worker-1 (rank 1): container was disconnected from network {network}"


def test_a_worker_whose_sshd_is_killed_ends_the_run_and_up_mends_it(lab: Lab) -> None:
    """Kill sshd on worker-1: exit code 4, node-lost; `run` is refused until `up`."""
    with lab.stubborn_run("--json") as (running, run_id):
        # The container may end before the shell that kills it.
        lab.containers()["worker-1"].exec_run(["sh", "-c", "kill -KILL $(pgrep -o -x sshd)"], user="0")
        answer = running.answer(120)
    document = result(answer, 4, "node-lost")
    assert document["message"] == "worker-1 (rank 1): container died with exit code 137"
    assert lab.processes_of(run_id) == []
    assert states(lab) == {"launcher": "running", "worker-0": "running", "worker-1": "exited"}
    error = lab.call("run", "hello", "--json").expect(3).json["error"]
    assert ("worker-1: exited" in error["message"], error["hint"]) == (True, "labctl up")
    lab.call("up").expect(0)
    lab.call("run", "hello", "--dry-run").expect(0)


def test_a_worker_that_is_paused_ends_the_run_and_the_next_one_ends_what_it_left(lab: Lab) -> None:
    """Pause worker-1: exit code 124, stalled, and a run meanwhile exits with 3; the next one ends what was left."""
    with lab.stubborn_run("--json") as (running, run_id):
        worker = lab.containers()["worker-1"]
        pause(worker)
        try:
            answer = running.answer(120)
            error = lab.call("run", "hello", "--json").expect(3).json["error"]
            assert ("worker-1: paused" in error["message"], error["hint"]) == (True, f"docker unpause {worker.name}")
        finally:
            worker.unpause()
    document = result(answer, 124, "stalled")
    reason = f"container is paused; to resume it: docker unpause {worker.name}"
    assert document["message"].startswith(f"worker-1 (rank 1): {reason}; could not kill: worker-1: ")
    assert lab.processes_of(run_id)
    lab.call("run", "hello").expect(0)
    assert lab.processes_of(run_id) == []


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_rank_that_loops_without_end_stalls_the_run_and_says_where(lab: Lab, launcher: str) -> None:
    """Rank 1 loops: exit code 124, stalled, both ranks' places in message and stacks."""
    # labctl itself requests the stacks.
    answer = lab.call("run", "hang", "--launcher", launcher, "-s", "LAB_STALL_SECONDS=4", "--json")
    document = answer.json
    assert (answer.code, document["verdict"], document["cause"]) == (124, "ERROR", "stalled")
    assert re.fullmatch(
        r"no step and no line for \d+ s; steps took 0\.\d+ s; the last was step 5/50; "
        r"no rank waits for another: rank 0 is at hang\.py:\d+, rank 1 is at hang\.py:\d+",
        document["message"],
    )
    record = lab.path / "runs" / document["run_id"]
    doing = {node: (record / f"stacks/{node}.txt").read_text() for node in ("worker-0", "worker-1")}
    assert re.search(r"hang\.py\n  S \(sleeping\), \d % of a core", doing["worker-0"])
    assert re.search(r"hang\.py\n  R \(running\), \d\d+ % of a core", doing["worker-1"])
    assert "wait_for_others" in doing["worker-0"]
    assert "lose_count" in doing["worker-1"]
    assert document["hang"]["kind"] == "all-outside"
    assert lab.processes_of(document["run_id"]) == []


def test_a_launcher_that_is_killed_ends_the_run_and_is_named(lab: Lab) -> None:
    """Kill the launcher's container: exit code 4, node-lost; status partial, doctor LAB-NODE-001."""
    with lab.stubborn_run("--json") as (running, run_id):
        lab.containers()["launcher"].kill("SIGKILL")
        answer = running.answer(120)
    assert "launcher" in result(answer, 4, "node-lost")["message"]
    assert lab.processes_of(run_id) == []
    assert running_nodes(lab) == ["worker-0", "worker-1"]
    assert state_of(lab, run_id) == "done"
    assert lab.call("status", "--json").expect(0).json["state"] == "partial"
    errors = [
        finding for finding in lab.call("doctor", "--json").expect(3).json["findings"] if finding["level"] == "error"
    ]
    assert [(finding["code"], finding["node"]) for finding in errors] == [("LAB-NODE-001", "launcher")]


def test_a_rank_that_crashes_ends_the_run_and_is_named(lab: Lab) -> None:
    """Rank 1 exits with 7: exit code 4, rank-crashed, other processes of its node stay."""
    canary = lab.plant_canary("worker-1")
    document = result(lab.call("run", "crash", "--launcher", "deepspeed", "--json"), 4, "rank-crashed")
    assert re.search(r"rank 1\b.*worker-1.*code 7\b", document["message"])
    assert lab.processes_of(document["run_id"]) == []
    assert running_nodes(lab) == NODES
    assert canary()


@pytest.mark.smoke
def test_ctrl_c_ends_the_run_and_leaves_nothing_of_it(lab: Lab) -> None:
    """Ctrl-C: exit code 130, interrupted, no process of the run; other processes stay."""
    with lab.stubborn_run("--launcher", "deepspeed", "--json") as (running, run_id):
        canary = lab.plant_canary("worker-1")
        assert lab.processes_of(run_id)
        running.press()
        answer = running.answer(120)
    assert result(answer, 130, "interrupted")["run_id"] == run_id
    assert lab.processes_of(run_id) == []
    assert running_nodes(lab) == NODES
    assert canary()
    assert lab.call("show", run_id, "--json").expect(0).json["cause"] == "interrupted"


def test_a_second_ctrl_c_ends_the_run_too(lab: Lab) -> None:
    """Ctrl-C twice within the grace: exit code 130, and no process of the run is left."""
    with lab.stubborn_run() as (running, run_id):
        running.press()
        assert not running.ends_within(0.5)
        running.press()
        running.answer(120).expect(130)
    assert lab.processes_of(run_id) == []


def test_the_time_limit_ends_even_what_does_not_listen(lab: Lab) -> None:
    """`--timeout 10` with ranks that ignore signals: exit code 124, no process is left."""
    canary = lab.plant_canary("worker-1")
    answer = lab.call("run", "stubborn", "--timeout", "10", "--json")
    document = result(answer, 124, "timeout")
    assert "10 s" in document["message"]
    assert answer.err.count("does not listen") == 2
    assert document["seconds"] >= 10
    assert lab.processes_of(document["run_id"]) == []
    assert running_nodes(lab) == NODES
    assert canary()


def orphan(lab: Lab) -> str:
    """Start a run and kill its labctl, with the process group, while the ranks are up; return the run's id."""
    with lab.stubborn_run() as (running, run_id):
        assert state_of(lab, run_id) == "running"
        running.press(signal.SIGKILL)
        running.process.wait()
    return run_id


def state_of(lab: Lab, run_id: str) -> str:
    """Return the state of a run, from `labctl runs`."""
    states = {run["run_id"]: run["state"] for run in lab.call("runs", "--json").expect(0).json["runs"]}
    return str(states[run_id])


def test_a_run_whose_labctl_was_killed_goes_on_and_keeps_its_nodes_until_it_is_stopped(lab: Lab) -> None:
    """Another run is refused with `labctl stop`, which ends all processes."""
    run_id = orphan(lab)
    assert state_of(lab, run_id) == "running"
    assert lab.call("show", run_id, "--json").expect(0).json["state"] == "running"
    wait_until(lambda: "its labctl is gone" in lab.call("run", "hello").expect(3).err, 30, "nobody follows it")
    error = lab.call("run", "hello", "--json").expect(3).json["error"]
    assert f"in use by run {run_id}" in error["message"]
    assert f"labctl stop {run_id}" in error["hint"]
    # Start a process outside of its rank's session and environment.
    leave = ["sh", "-c", "env -i setsid sleep 900 & until pgrep -x sleep; do :; done"]
    assert lab.containers()["worker-1"].exec_run(leave, user=f"{os.getuid()}:{os.getgid()}").exit_code == 0
    stopped_run = result(lab.call("stop", run_id, "--grace", "1", "--json"), 0, "interrupted", 130)
    assert stopped_run["message"].startswith("stopped by ")
    assert lab.processes_of(run_id) == []
    lab.call("run", "hello", "--dry-run").expect(0)


def test_a_second_run_is_refused_and_told_which_one_is_active(lab: Lab) -> None:
    """End the first run by TERM to labctl alone; Ctrl-C goes to its whole group."""
    before = set(lab.run_ids())
    with lab.start("run", "stubborn", "--json") as first:
        (run_id,) = wait_until(lambda: set(lab.run_ids()) - before, 120, "the first run has begun")
        wait_until(lambda: state_of(lab, run_id) == "running", 120, "the first run is launched")
        wait_until(lambda: run_id in lab.call("run", "hello", "--dry-run").err, 120, "a plan says who uses the nodes")
        error = lab.call("run", "hello", "--json").expect(3).json["error"]["message"]
        assert f"in use by run {run_id}" in error
        assert set(lab.run_ids()) - before == {run_id}
        first.process.send_signal(signal.SIGTERM)
        answer = first.answer(120)
    result(answer, 130, "interrupted")
    assert lab.processes_of(run_id) == []
