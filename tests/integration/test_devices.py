"""`labctl devices` and the detected accelerator, on the machine that runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.harness import Lab

from labctl import accelerators

pytestmark = pytest.mark.docker

KINDS = {name: f"dev/{module.watch.files[0]}" for name, module in accelerators.modules().items() if module.watch}


@pytest.mark.skipif(
    any(list(Path("/").glob(pattern)) for pattern in KINDS.values()), reason="this machine may have an accelerator"
)
def test_a_machine_without_accelerators_is_a_cpu_lab_and_says_why(lab: Lab) -> None:
    """LAB_ACCELERATOR=auto gives cpu, and the reason lists each kind that was not found."""
    (here,) = lab.call("devices", "-s", "LAB_ACCELERATOR=auto", "--json").expect(0).json["hosts"]
    assert here["accelerator"] == "cpu"
    sought = ", ".join(f"no {accelerators.get(name).sought}" for name in KINDS)
    assert here["why"] == f"auto: {sought}"
    assert sought in lab.call("config", "-s", "LAB_ACCELERATOR=auto").expect(0).out
    containers = lab.engine.containers.list(filters={"label": f"labctl.lab={lab.name}"})
    workers = {
        container.labels["labctl.node"] for container in containers if container.labels["labctl.role"] == "worker"
    }
    assert {node["name"] for node in here["nodes"]} == workers


@pytest.mark.parametrize("accelerator", KINDS)
def test_a_kind_that_is_not_here_ends_with_what_was_looked_for(lab: Lab, accelerator: str) -> None:
    """`up` for an accelerator that is missing: exit code 3, and the device file that was sought."""
    if list(Path("/").glob(KINDS[accelerator])):
        pytest.skip("this machine may have it")
    answer = lab.call("up", "-s", f"LAB_ACCELERATOR={accelerator}").expect(3)
    assert f"this host has no {accelerator} device: no " in answer.err
    assert "/dev/" in answer.err
