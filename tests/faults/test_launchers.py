"""Launchers start the requested ranks, and end their runs by the same rules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import FreshLab
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

LAUNCHERS = ("deepspeed", "deepspeed:openmpi", "mpirun", "torchrun")
# test_runs_that_break.py covers the first one; DeepSpeed over Open MPI ends as mpirun does.
OVER_OPEN_MPI = pytest.param("deepspeed:openmpi", marks=pytest.mark.slow)


def result(answer: Answer, code: int, cause: str) -> dict[str, Any]:
    """Assert exit code and cause of an ERROR; return the document."""
    document: dict[str, Any] = answer.json
    assert (answer.code, document["verdict"], document["cause"]) == (code, "ERROR", cause), answer.err
    return document


@pytest.fixture(scope="module")
def four_nodes(lend_module: FreshLab) -> Lab:
    """Return a lab of four nodes with two slots each, up."""
    return lend_module(LAB_NODES="4", LAB_SLOTS="2")


def hello(lab: Lab, launcher: str, order: tuple[int, ...], *flags: str) -> list[str]:
    """Run `hello` on these workers, two slots each; assert that it passes; return the node of each rank in order."""
    hostfile = lab.path / "hostfile-of-test"
    hostfile.write_text("".join(f"worker-{number} slots=2\n" for number in order), encoding="utf-8")
    argv = ("run", "hello", "--launcher", launcher, "--hostfile", str(hostfile), *flags, "--json")
    document = lab.call(*argv).expect(0).json
    assert document["metrics"]["answer"]["value"] == 42
    assert [rank["rank"] for rank in document["ranks"]] == list(range(document["world_size"]))
    return [rank["node"] for rank in document["ranks"]]


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_every_slot_in_the_hostfiles_order_has_its_rank_and_none_on_a_node_that_is_left_out(
    four_nodes: Lab, launcher: str
) -> None:
    """Ranks follow the hostfile's order without the excluded worker-2."""
    ranks = hello(four_nodes, launcher, (3, 2, 1, 0), "--exclude", "worker-2")
    assert ranks == ["worker-3", "worker-3", "worker-1", "worker-1", "worker-0", "worker-0"]


def test_slots_are_chosen_by_number_under_deepspeed(four_nodes: Lab) -> None:
    """`--include worker-3:1@worker-1@worker-0` gives one rank on worker-3 and two on the others."""
    ranks = hello(four_nodes, "deepspeed", (3, 2, 1, 0), "--include", "worker-3:1@worker-1@worker-0")
    assert ranks == ["worker-3", "worker-1", "worker-1", "worker-0", "worker-0"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_slot_of_few_nodes_has_its_rank(four_nodes: Lab, launcher: str, nodes: int) -> None:
    """On one and two nodes, each launcher starts two ranks per node in the hostfile's order."""
    order = (3, 2)[:nodes]
    assert hello(four_nodes, launcher, order) == [f"worker-{number}" for number in order for _ in range(2)]


@pytest.mark.parametrize("launcher", [OVER_OPEN_MPI, "mpirun", "torchrun", "script"])
def test_a_worker_that_is_killed_ends_the_run_and_is_named(lab: Lab, launcher: str) -> None:
    """Cover all launchers: the remaining ranks are ended as on Ctrl-C and at the time limit."""
    # With launcher `script`, the script starts the ranks.
    run = ("stubborn-own",) if launcher == "script" else ("stubborn", "--launcher", launcher)
    with lab.stubborn_run(*run[1:], "--json", workload=run[0]) as (running, run_id):
        lab.containers()["worker-1"].kill("SIGKILL")
        answer = running.answer(120)
    message = "worker-1 (rank 1): container died with exit code 137"
    assert result(answer, 4, "node-lost")["message"] == message
    assert lab.processes_of(run_id) == []


@pytest.mark.parametrize("launcher", [OVER_OPEN_MPI, "mpirun", "torchrun"])
def test_a_rank_that_crashes_ends_the_run_and_is_named(lab: Lab, launcher: str) -> None:
    """Rank 1 exits with 7: exit code 4, rank-crashed, node and code; no process is left."""
    document = result(lab.call("run", "crash", "--launcher", launcher, "--json"), 4, "rank-crashed")
    assert re.search(r"rank 1\b.*worker-1.*code 7\b", document["message"])
    assert lab.processes_of(document["run_id"]) == []


def test_ctrl_c_ends_ranks_that_a_script_started(lab: Lab) -> None:
    """Ctrl-C on a script that starts its own ranks: exit code 130, no process is left."""
    with lab.stubborn_run("--json", workload="stubborn-own") as (running, run_id):
        running.press()
        answer = running.answer(120)
    result(answer, 130, "interrupted")
    assert lab.processes_of(run_id) == []


@pytest.mark.parametrize(("launcher", "program"), [("horovod", "horovodrun"), ("impi", "mpiexec.hydra")])
def test_a_launcher_that_the_image_lacks_is_refused_before_anything_starts(
    lab: Lab, launcher: str, program: str
) -> None:
    """horovodrun or mpiexec.hydra is missing: exit code 3, no run is recorded."""
    before = lab.run_ids()
    error = lab.call("run", "hello", "--launcher", launcher, "--json").expect(3).json["error"]
    assert f"launcher `{program}` not found" in error["message"]
    assert "LAB_IMAGE" in error["hint"]
    assert lab.run_ids() == before
