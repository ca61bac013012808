"""The stop rules hold under every launcher, on one, two and four nodes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

LAUNCHERS = ("deepspeed", "deepspeed:openmpi", "mpirun", "torchrun")
# test_runs_that_break.py has the first of them; under `script` a script starts ranks by itself.
STUBBORN = {
    **{launcher: ("stubborn", "--launcher", launcher) for launcher in LAUNCHERS[1:]},
    "script": ("stubborn-own",),
}
# DeepSpeed over Open MPI ends as mpirun does.
STOPPED = [pytest.param("deepspeed:openmpi", marks=pytest.mark.slow), "mpirun", "torchrun", "script"]


def result(answer: Answer, code: int, cause: str) -> dict[str, Any]:
    """The answer's document, when it is an error of this cause with this exit code."""
    document: dict[str, Any] = answer.json
    assert (answer.code, document["verdict"], document["cause"]) == (code, "ERROR", cause), answer.err
    return document


@pytest.fixture(scope="module")
def four_nodes(new_lab: Callable[[dict[str, str]], Lab], image: str) -> Iterator[Lab]:
    lab = new_lab({"LAB_NODES": "4", "LAB_SLOTS": "2"})
    lab.call("up").expect(0)
    yield lab
    lab.destroy()


@pytest.mark.parametrize("nodes", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_slot_of_so_many_nodes_has_its_rank(four_nodes: Lab, launcher: str, nodes: int) -> None:
    # The last nodes of the hostfile, so that the order is the hostfile's and not the names'.
    names = [f"worker-{number}" for number in range(4)][-nodes:][::-1]
    hostfile = four_nodes.path / f"{nodes}-nodes"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in names), encoding="utf-8")
    words = ("run", "hello", "--launcher", launcher, "--hostfile", str(hostfile), "--json")
    document = four_nodes.call(*words).expect(0).json
    ranks = [(rank["rank"], rank["node"]) for rank in document["ranks"]]
    assert ranks == list(enumerate(name for name in names for _ in range(2)))
    assert document["metrics"]["answer"]["value"] == 42


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nodes_are_left_out_as_deepspeed_writes_it(four_nodes: Lab, launcher: str) -> None:
    words = ("run", "hello", "--launcher", launcher, "--exclude", "worker-1@worker-2", "--json")
    document = four_nodes.call(*words).expect(0).json
    assert [rank["node"] for rank in document["ranks"]] == ["worker-0", "worker-0", "worker-3", "worker-3"]


def test_slots_are_chosen_by_number_under_deepspeed(four_nodes: Lab) -> None:
    document = four_nodes.call("run", "hello", "--include", "worker-1:1@worker-2", "--json").expect(0).json
    assert [rank["node"] for rank in document["ranks"]] == ["worker-1", "worker-2", "worker-2"]


@pytest.mark.alone
@pytest.mark.parametrize("launcher", STOPPED)
def test_a_worker_that_is_killed_ends_the_run_and_is_named(lab: Lab, launcher: str) -> None:
    workload, *flags = STUBBORN[launcher]
    with lab.stubborn_run(*flags, "--json", workload=workload) as (running, run_id):
        killed = time.monotonic()
        lab.containers()["worker-1"].kill("SIGKILL")
        answer = running.answer(120)
        assert time.monotonic() - killed < 15
    assert "worker-1 (rank 1)" in result(answer, 4, "node-lost")["message"]
    assert lab.processes_of(run_id) == []


@pytest.mark.parametrize("launcher", STOPPED[:-1])
def test_a_rank_that_crashes_ends_the_run_and_is_named(lab: Lab, launcher: str) -> None:
    document = result(lab.call("run", "crash", "--launcher", launcher, "--json"), 4, "rank-crashed")
    assert re.search(r"rank 1\b.*worker-1.*code 7\b", document["message"])
    assert lab.processes_of(document["run_id"]) == []


@pytest.mark.alone
@pytest.mark.parametrize("launcher", STOPPED)
def test_ctrl_c_ends_the_run_and_leaves_nothing_of_it(lab: Lab, launcher: str) -> None:
    workload, *flags = STUBBORN[launcher]
    with lab.stubborn_run(*flags, "--json", workload=workload) as (running, run_id):
        pressed = time.monotonic()
        running.press(signal.SIGINT)
        answer = running.answer(120)
        assert time.monotonic() - pressed < 15
    result(answer, 130, "interrupted")
    assert lab.processes_of(run_id) == []


@pytest.mark.alone
@pytest.mark.parametrize("launcher", STOPPED)
def test_the_time_limit_ends_even_what_does_not_listen(lab: Lab, launcher: str) -> None:
    answer = lab.call("run", *STUBBORN[launcher], "--timeout", "8", "--json")
    document = result(answer, 124, "timeout")
    assert 8 <= document["seconds"] < 23
    assert lab.processes_of(document["run_id"]) == []


@pytest.mark.parametrize(("launcher", "program"), [("horovod", "horovodrun"), ("impi", "mpiexec.hydra")])
def test_a_launcher_that_the_image_lacks_is_refused_before_anything_starts(
    lab: Lab, launcher: str, program: str
) -> None:
    before = lab.run_ids()
    error = lab.call("run", "hello", "--launcher", launcher, "--json").expect(3).json["error"]
    assert f"launcher `{program}` not found" in error["message"]
    assert "LAB_IMAGE" in error["hint"]
    assert lab.run_ids() == before
