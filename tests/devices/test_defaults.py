"""A machine with one GPU and one with two come up with the settings that `labctl init` writes."""

from __future__ import annotations

import pytest
from conftest import FreshLab
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("gpus", [1, 2])
def test_there_are_as_many_nodes_as_the_gpus_are_for(machine: Machine, machine_lab: FreshLab, gpus: int) -> None:
    for index in range(gpus):
        hardware.nvidia(machine, index)
    machine.configure(nvidia_hook=True)
    lab = machine_lab(LAB_ACCELERATOR="auto")
    lab.call("up").expect(0)
    assert sorted(lab.containers()) == ["launcher", *(f"worker-{index}" for index in range(gpus))]
    document = lab.call("run", "hello", "--launcher", "mpirun", "--json").expect(0).json
    assert [rank["node"] for rank in document["ranks"]] == [f"worker-{index}" for index in range(gpus)]
