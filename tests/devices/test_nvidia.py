"""NVIDIA GPUs in nodes, in each way that a real dockerd supports."""

from __future__ import annotations

import json

import pytest
from conftest import FreshLab
from support.harness import Lab
from support.machine import hardware
from support.machine.machine import Dockerd, Machine

pytestmark = pytest.mark.docker
CDI = {"features": {"cdi": True}}
RUNTIME = {"runtimes": {"nvidia": {"path": "/run/stand-in/bin/nvidia-container-runtime"}}}
COMMON = {"/dev/nvidiactl", "/dev/nvidia-uvm"}


@pytest.fixture(autouse=True)
def gpus(machine: Machine) -> None:
    """Plant four NVIDIA GPUs on the machine."""
    for index in range(4):
        hardware.nvidia(machine, index)


def specification(ids: range) -> str:
    """Return the JSON of a CDI specification of these GPUs, as `nvidia-ctk cdi generate` writes, without hooks."""
    devices = [
        {
            "name": str(index),
            "containerEdits": {"env": [f"GPU_{index}=1"], "deviceNodes": [{"path": f"/dev/nvidia{index}"}]},
        }
        for index in ids
    ]
    common = {"deviceNodes": [{"path": path} for path in sorted(COMMON)]}
    return json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": common})


def gpus_in(lab: Lab, node: str) -> set[str]:
    """Return the paths of the GPUs' device files in a node, without those that all GPUs share."""
    return set(lab.inside(node, "sh", "-c", "ls /dev/nvidia* 2>/dev/null || true").split()) - COMMON


def asked_of_the_engine(lab: Lab) -> dict[str, list[tuple[str, list[str]]]]:
    """Return node -> driver and ids of each device request of its container."""
    return {
        node: [
            (request["Driver"], request["DeviceIDs"])
            for request in container.attrs["HostConfig"]["DeviceRequests"] or ()
        ]
        for node, container in lab.containers().items()
    }


def variables(lab: Lab, node: str) -> dict[str, str]:
    """Return the environment of a node's first process."""
    text = lab.inside(node, "cat", "/proc/1/environ", user="0:0")
    return dict(pair.split("=", 1) for pair in text.split("\0") if pair)


def requested(machine: Machine) -> dict[str, str]:
    """Return worker -> NVIDIA_VISIBLE_DEVICES as NVIDIA's runtime got it; trial containers are skipped."""
    ids_by_node = {request["node"]: request["environment"]["NVIDIA_VISIBLE_DEVICES"] for request in machine.requests()}
    return {node: ids for node, ids in ids_by_node.items() if node.startswith("worker-")}


def shown(lab: Lab) -> tuple[str, str]:
    """Return the way of the device request, and its reason, from `labctl config`."""
    rows = {row["key"]: (row["value"], row["why"]) for row in lab.call("config", "--json").expect(0).json["decided"]}
    return rows["device request"]


def test_only_the_gpus_that_are_named_are_asked_for(machine: Machine, machine_lab: FreshLab) -> None:
    """LAB_DEVICES=3,1,4,0: worker-0 reserves and has 3 and 1, worker-1 4 and 0, the launcher none."""
    hardware.nvidia(machine, 4)
    lab = machine_lab(LAB_ACCELERATOR="nvidia", LAB_DEVICES="3,1,4,0")
    lab.call("up").expect(0)
    assert requested(machine) == {"worker-0": "3,1", "worker-1": "4,0"}
    assert asked_of_the_engine(lab) == {
        "launcher": [],
        "worker-0": [("nvidia", ["3", "1"])],
        "worker-1": [("nvidia", ["4", "0"])],
    }
    assert gpus_in(lab, "worker-0") == {"/dev/nvidia3", "/dev/nvidia1"}
    assert gpus_in(lab, "worker-1") == {"/dev/nvidia4", "/dev/nvidia0"}
    assert gpus_in(lab, "launcher") == set()
    assert shown(lab) == ("reservation", "engine, when it was tried")


@pytest.mark.dockerd(Dockerd(CDI, nvidia_hook=True))
def test_cdi_is_preferred_and_brings_device_files_and_environment(machine: Machine, machine_lab: FreshLab) -> None:
    """With CDI, each worker has its two GPUs and CDI's variables, and the runtime is not asked."""
    machine.file("/etc/cdi/nvidia.yaml", specification(range(4)))
    lab = machine_lab(LAB_ACCELERATOR="nvidia")
    lab.call("render").expect(0)
    assert "driver: cdi" in (lab.path / ".lab/nodes/worker-0/compose.yml").read_text()
    assert shown(lab) == ("cdi", "engine")
    lab.call("up").expect(0)
    assert asked_of_the_engine(lab) == {
        "launcher": [],
        "worker-0": [("cdi", ["nvidia.com/gpu=0", "nvidia.com/gpu=1"])],
        "worker-1": [("cdi", ["nvidia.com/gpu=2", "nvidia.com/gpu=3"])],
    }
    assert gpus_in(lab, "worker-0") == {"/dev/nvidia0", "/dev/nvidia1"}
    assert gpus_in(lab, "worker-1") == {"/dev/nvidia2", "/dev/nvidia3"}
    assert variables(lab, "worker-1")["GPU_3"] == "1"
    assert variables(lab, "worker-1")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert machine.requests() == []
    assert shown(lab) == ("cdi", "engine")
    before = lab.identities()
    lab.call("up").expect(0)
    assert lab.identities() == before


@pytest.mark.dockerd(Dockerd(RUNTIME))
def test_the_runtime_serves_where_only_that_is_there(machine: Machine, machine_lab: FreshLab) -> None:
    """Only runtime nvidia: both workers use it and have two GPUs each; the launcher uses runc."""
    lab = machine_lab(LAB_ACCELERATOR="nvidia")
    lab.call("up").expect(0)
    assert requested(machine) == {"worker-0": "0,1", "worker-1": "2,3"}
    runtimes = {node: container.attrs["HostConfig"]["Runtime"] for node, container in lab.containers().items()}
    assert runtimes == {"launcher": "runc", "worker-0": "nvidia", "worker-1": "nvidia"}
    assert gpus_in(lab, "worker-0") == {"/dev/nvidia0", "/dev/nvidia1"}
    assert gpus_in(lab, "worker-1") == {"/dev/nvidia2", "/dev/nvidia3"}
    assert shown(lab) == ("runtime", "engine, when it was tried")
