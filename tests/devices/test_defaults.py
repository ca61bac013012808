"""A machine with one GPU comes up with the settings that `labctl init` writes."""

from __future__ import annotations

import pytest
from conftest import FreshLab
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker


def test_a_machine_with_one_gpu_is_a_lab_of_one_node(machine: Machine, machine_lab: FreshLab) -> None:
    """LAB_ACCELERATOR=auto with one GPU: launcher and worker-0, and a run with a rank there."""
    hardware.nvidia(machine, 0)
    lab = machine_lab(LAB_ACCELERATOR="auto")
    lab.call("up").expect(0)
    assert sorted(lab.containers()) == ["launcher", "worker-0"]
    document = lab.call("run", "hello", "--launcher", "mpirun", "--json").expect(0).json
    assert [rank["node"] for rank in document["ranks"]] == ["worker-0"]
