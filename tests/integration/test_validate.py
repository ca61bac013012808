"""A validation on the real engine: it creates a lab, reports, and removes it; a bad node is named."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab, wait_until

pytestmark = pytest.mark.docker

PICKY = """\
description: fails on one node
launcher: mpirun
script: picky.py
timeout: 60s
"""
SCRIPT = "import os, sys\nsys.exit('bad memory' if os.uname().nodename == 'worker-1' else 0)\n"
ALONE = "[{workload: picky, nodes: each}, {workload: hello}]"
TOGETHER = "[{workload: picky}]"


def picky(lab: Lab, checks: str) -> Path:
    """Write workload `picky`, which fails on worker-1, and a profile with these checks; return its path."""
    folder = lab.path / "workloads/picky"
    folder.mkdir()
    (folder / "workload.yml").write_text(PICKY)
    (folder / "picky.py").write_text(SCRIPT)
    profile = lab.path / "mine.yml"
    profile.write_text(f"description: a node that fails\nchecks: {checks}\n")
    return profile


@pytest.mark.parametrize(
    "changes",
    [
        # On a busy machine no speed beside the others is certain.
        pytest.param({"tflops: {}": "tflops: {min: 0.000001}"}, id="on-a-busy-machine"),
        pytest.param({}, id="as-it-is", marks=pytest.mark.slow),
    ],
)
def test_a_good_lab_passes_and_nothing_of_it_is_left(fresh_lab: FreshLab, changes: dict[str, str]) -> None:
    """The quick profile makes a lab, passes all steps, writes a report and removes the lab."""
    lab = fresh_lab()
    text = lab.call("validate", "--profile", "quick", "--print-profile").expect(0).out
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (lab.path / "mine.yml").write_text(text)
    answer = lab.call("validate", "--profile", "mine.yml", "--out", "report", "--json", limit=600).expect(0)
    validation = answer.json["validation"]
    assert (validation["verdict"], validation["message"]) == ("PASS", "All 2 nodes are good.")
    assert {step["name"]: step["status"] for step in validation["steps"]} == dict.fromkeys(
        (
            *("doctor", "network", "up", "nodes", "ssh-check", "matmul", "same-losses", "allreduce"),
            *("network after", "clean-up"),
        ),
        "passed",
    )
    assert lab.labelled() == []
    assert "All 2 nodes are good." in Path(answer.json["page"]).read_text()
    assert json.loads(Path(answer.json["data"]).read_text())["nodes"] == validation["nodes"]


def test_a_node_that_fails_is_named_and_a_lab_that_was_up_is_left_alone(lab: Lab) -> None:
    """A check fails on worker-1: exit code 5, it is failing, worker-0 good, containers stay."""
    profile, before = picky(lab, ALONE), lab.identities()
    answer = lab.call("validate", "--profile", str(profile), "--json").expect(5)
    validation = answer.json["validation"]
    assert {node["node"]: node["verdict"] for node in validation["nodes"]} == {
        "worker-0": "good",
        "worker-1": "failing",
    }
    assert validation["message"].startswith("worker-1 is failing: picky: ")
    assert next(step for step in validation["steps"] if step["name"] == "hello")["status"] == "passed"
    assert lab.identities() == before


@pytest.mark.slow
def test_a_node_that_fails_with_others_is_found_by_bisection(fresh_lab: FreshLab) -> None:
    """A run on four nodes fails by worker-1: exit code 5, bisection names it alone."""
    lab = fresh_lab(LAB_NODES="4")
    answer = lab.call("validate", "--profile", str(picky(lab, TOGETHER)), "--json", limit=300).expect(5)
    validation = answer.json["validation"]
    steps = {step["name"]: step for step in validation["steps"]}
    assert (steps["picky"]["status"], steps["clean-up"]["status"]) == ("failed", "passed")
    assert steps["bisect picky"]["message"].startswith("worker-1 is failing (")
    assert {node["node"] for node in validation["nodes"] if node["verdict"] == "failing"} == {"worker-1"}
    assert lab.labelled() == []


FLIP = """\
        import os
        if os.uname().nodename == "worker-2":
            [*engine.parameters()][-1].data.view(torch.int32).view(-1)[0] ^= 1
        loss = engine("""
SAME_LOSSES = "[{workload: opt-tiny, name: same-losses, nodes: each, rehearse: true, equal: loss_curve}]"


def test_a_node_that_flips_a_bit_computes_wrongly(fresh_lab: FreshLab) -> None:
    """worker-2 flips a bit of its parameters: exit code 5, it is failing as its results are wrong."""
    lab = fresh_lab(LAB_NODES="3")
    training = lab.path / "workloads/opt/sft.py"
    text = training.read_text()
    assert text.count("        loss = engine(") == 1
    training.write_text(text.replace("        loss = engine(", FLIP))
    profile = lab.path / "mine.yml"
    profile.write_text(f"description: the same training on each node\nchecks: {SAME_LOSSES}\n")
    validation = lab.call("validate", "--profile", str(profile), "--json", limit=300).expect(5).json["validation"]
    assert {node["node"]: node["verdict"] for node in validation["nodes"]} == {
        "worker-0": "good",
        "worker-1": "good",
        "worker-2": "failing",
    }
    assert "its results are wrong" in validation["nodes"][2]["evidence"][0]


def test_the_baseline_of_a_lab_that_is_up_is_kept(lab: Lab) -> None:
    """`validate` judges a metric by the baseline that `baseline` recorded in the same lab, and passes."""
    profile, before = lab.path / "mine.yml", lab.identities()
    profile.write_text("description: mine\nwithin: 99%\nchecks: [{workload: hello, metrics: {answer: {}}}]\n")
    lab.call("baseline", "--profile", str(profile)).expect(0)
    answer = lab.call("validate", "--profile", str(profile), "--json").expect(0)
    (figure,) = (figure for figure in answer.json["validation"]["figures"] if figure["step"] == "hello")
    assert figure["passed"]
    assert figure["source"].startswith("99 % below the baseline of ")
    assert lab.identities() == before


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_ctrl_c_and_a_closed_terminal_remove_the_lab(fresh_lab: FreshLab, number: signal.Signals) -> None:
    """SIGINT or SIGHUP during a check: exit code 130, `Interrupted.`, nothing of the lab is left."""
    lab = fresh_lab()
    profile = lab.path / "mine.yml"
    profile.write_text("description: a run that does not end\nchecks: [{workload: stubborn}]\n")
    with lab.start("validate", "--profile", str(profile)) as running:
        wait_until(lambda: "validate: stubborn" in running.err, 120, "the check of the workload")
        running.press(number)
        answer = running.answer(120).expect(130)
    assert "Interrupted." in answer.out
    assert lab.labelled() == []


def test_ctrl_c_ends_a_hook(fresh_lab: FreshLab) -> None:
    """SIGINT during a hook that sleeps: exit code 130, and labctl says that nothing was started."""
    lab = fresh_lab()
    profile = lab.path / "mine.yml"
    profile.write_text(
        "description: a long hook\nhooks: [{name: long, command: sleep 300}]\nchecks: [{workload: hello}]\n"
    )
    with lab.start("validate", "--profile", str(profile)) as running:
        wait_until(lambda: "validate: long" in running.err, 120, "the hook")
        running.press(signal.SIGINT)
        answer = running.answer(120).expect(130)
    assert "nothing was started" in answer.out
