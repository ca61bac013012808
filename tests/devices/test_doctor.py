"""Doctor's findings about devices and a separate engine, and the commands that it suggests."""

from __future__ import annotations

import json

import pytest
from conftest import FreshLab
from support.doctoring import doctor, single, type_in
from support.machine import hardware
from support.machine.machine import Dockerd, Machine

pytestmark = pytest.mark.docker


@pytest.mark.dockerd(Dockerd())
def test_an_engine_without_gaudi_s_runtime_is_told_of_and_gets_it(machine: Machine, machine_lab: FreshLab) -> None:
    """LAB-RUNTIME-001; its fix adds the runtime to daemon.json and keeps the rest."""
    before = machine.at("/etc/docker/daemon.json").read_text()
    for index in range(2):
        hardware.gaudi(machine, index, module=index)
    lab = machine_lab(LAB_ACCELERATOR="habana")
    finding = single(doctor(lab), "LAB-RUNTIME-001", "local")
    assert "habana" in finding["seen"]
    # dockerd reloads asynchronously after the signal.
    answered = "timeout 30 sh -c 'until docker info | grep -w habana; do sleep 0.1; done'"
    remaining = type_in(lab, [finding["fix"], answered], {})
    assert "LAB-RUNTIME-001" not in {finding["code"] for finding in remaining}
    # The earlier configuration is kept.
    assert json.loads(before).items() <= json.loads(machine.at("/etc/docker/daemon.json").read_text()).items()
    machine.stop_engine()
    machine.configure(Dockerd())


@pytest.mark.dockerd(Dockerd({"features": {"cdi": True}}))
def test_a_gpu_that_its_specification_lost_is_told_of_before_a_node_fails_to_start(
    machine: Machine, machine_lab: FreshLab
) -> None:
    """A CDI file names a missing device: LAB-RUNTIME-002 with `cdi generate`."""
    hardware.nvidia(machine, 0)
    device = {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}
    machine.file(
        "/etc/cdi/nvidia.yaml", json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device]})
    )
    lab = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    finding = single(doctor(lab), "LAB-RUNTIME-002", "local")
    assert "/dev/nvidia7" in finding["seen"]
    assert "cdi generate" in finding["fix"]


def test_a_device_file_that_the_nodes_user_may_not_open_is_told_of_and_opened(
    machine: Machine, machine_lab: FreshLab
) -> None:
    """Mode 0600: LAB-DEVICE-002 of doctor and `up`, and its fix opens it."""
    hardware.nvidia(machine, 0)
    machine.at("/dev/nvidia0").chmod(0o600)
    machine.run("chown", "5:5", "/dev/nvidia0")
    lab = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    finding = single(doctor(lab), "LAB-DEVICE-002", "local")
    refused = lab.call("up", "--json").expect(3).json["error"]
    assert "LAB-DEVICE-002" in refused["message"]
    assert refused["hint"] == finding["fix"]
    assert "LAB-DEVICE-002" not in {finding["code"] for finding in type_in(lab, [finding["fix"]], {})}


def test_a_gpu_of_which_its_tool_says_that_it_is_lost_is_told_of(machine: Machine, machine_lab: FreshLab) -> None:
    """nvidia-smi fails: LAB-DEVICE-003 quotes it and suggests --gpu-reset."""
    hardware.nvidia(machine, 0)
    machine.program(
        "nvidia-smi", "#!/bin/sh\necho 'Unable to determine the device handle for GPU: Unknown Error'\nexit 15\n"
    )
    lab = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    finding = single(doctor(lab), "LAB-DEVICE-003", "worker-0")
    assert "Unknown Error" in finding["seen"]
    assert "--gpu-reset" in finding["fix"]


@pytest.mark.dockerd(Dockerd({"default-address-pools": [{"base": "10.201.0.0/28", "size": 29}]}))
@pytest.mark.parametrize(
    ("label", "fix"),
    [
        ("labctl.lab=gone", "docker network rm left-over"),
        ("other=1", "docker network inspect left-over  # and remove"),
    ],
    ids=["labctls-own-go", "others-are-named"],
)
def test_address_pools_that_are_used_up_are_told_of_and_room_is_made_of_labctls_own(
    machine: Machine, machine_lab: FreshLab, label: str, fix: str
) -> None:
    """LAB-NET-003; its fix removes a network of labctl, and only names another one."""
    machine.run("docker", "network", "create", "--label", label, "left-over")
    try:
        lab = machine_lab()
        finding = single(doctor(lab), "LAB-NET-003", "local")
        assert finding["fix"].startswith(fix)
        if label.startswith("labctl"):
            assert "LAB-NET-003" not in {finding["code"] for finding in type_in(lab, [finding["fix"]], {})}
        assert lab.networks() == []
    finally:
        machine.run("docker", "network", "rm", "left-over", check=False)


@pytest.mark.slow
def test_a_gpu_that_another_lab_has_is_told_of_with_whose_it_is_and_had_when_that_lab_is_down(
    machine: Machine, machine_lab: FreshLab
) -> None:
    """LAB-DEVICE-005 names the other lab; its fix takes that down."""
    hardware.nvidia(machine, 0)
    first = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    first.call("up").expect(0)
    second = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    finding = single(doctor(second), "LAB-DEVICE-005", "worker-0")
    assert first.name in finding["seen"]
    assert "LAB-DEVICE-005" not in {finding["code"] for finding in type_in(second, [finding["fix"]], {})}
