"""A device is lost while the lab is up: the node reports it, a run on it ends, and `up` repairs the lab."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import FreshLab
from docker.models.containers import Container
from support.harness import Lab, wait_until
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker

# Two intervals of a node's health check in the compose file, in seconds.
TWO_INTERVALS = 2 * 15
FLAG = "/tmp/gpu-lost"  # noqa: S108
LOST = "Failed to initialize NVML: Unknown Error"
# Imitates the real tool until the file exists, in this node alone; a recreated node has no such file.
NVIDIA_SMI = f"""#!/bin/sh
if [ -e {FLAG} ]; then
    echo '{LOST}'
    exit 255
fi
ls /dev/nvidia[0-9]* | sed 's|/dev/nvidia\\(.*\\)|GPU \\1: Stand-in (UUID: GPU-\\1)|'
"""


@pytest.fixture
def nvidia(machine: Machine, machine_lab: FreshLab) -> Lab:
    """Return a lab of two nodes with a stand-in GPU each, up, with an nvidia-smi that lists the devices."""
    for index in (0, 1):
        hardware.nvidia(machine, index)
    machine.program("nvidia-smi", NVIDIA_SMI)
    lab = machine_lab(LAB_ACCELERATOR="nvidia")
    lab.call("up").expect(0)
    return lab


@pytest.fixture
def intel(machine: Machine, machine_lab: FreshLab) -> Lab:
    """Return a lab of two nodes with a stand-in render node each, up; group render may open them."""
    hardware.groups(machine, render=hardware.RENDER)
    for number in (0, 1):
        hardware.card(machine, number, vendor="0x8086")
    lab = machine_lab(LAB_ACCELERATOR="intel")
    lab.call("up").expect(0)
    return lab


def has_health(container: Container, health: str) -> bool:
    """Return True if the container's health status, read anew, is this."""
    container.reload()
    return bool(container.attrs["State"]["Health"]["Status"] == health)


def checked(lab: Lab, *nodes: str) -> None:
    """Wait until these nodes are healthy."""
    for node in nodes:
        container = lab.containers()[node]
        wait_until(partial(has_health, container, "healthy"), 120, f"{node} is healthy")


def unhealthy_within_two_intervals(lab: Lab, lost: float, *nodes: str) -> None:
    """Wait until these nodes are unhealthy, at most 30 s after ``lost``."""
    for node in nodes:
        container = lab.containers()[node]
        remaining = lost + TWO_INTERVALS - time.monotonic()
        wait_until(partial(has_health, container, "unhealthy"), remaining, f"{node} is unhealthy")


def reasons(lab: Lab) -> dict[str, str]:
    """Return node -> reason, from `labctl status`."""
    return {node["name"]: node["reason"] for node in lab.call("status", "--json").expect(0).json["nodes"]}


UNLUCKY = f"""#!/bin/bash
[[ $HOSTNAME == worker-1 ]] || exit 0
touch {FLAG}
exit 7
"""


def test_a_gpu_that_is_lost_ends_the_run_on_it_and_up_makes_its_node_anew(nvidia: Lab) -> None:
    """nvidia-smi fails on worker-1: exit code 4, device-lost; `up` recreates it alone."""
    with nvidia.stubborn_run("--json", workload="stubborn-own") as (running, run_id):
        checked(nvidia, "worker-1")
        nvidia.inside("worker-1", "touch", FLAG)
        document = running.answer(120).expect(4).json
    # The next check fails, and Docker reports it.
    assert (document["verdict"], document["cause"]) == ("ERROR", "device-lost")
    assert f"worker-1 (rank 1): device lost: nvidia-smi says `{LOST}`; `labctl up`" in document["message"]
    assert nvidia.processes_of(run_id) == []
    assert has_health(nvidia.containers()["worker-1"], "unhealthy")

    assert {node for node, reason in reasons(nvidia).items() if LOST in reason} == {"worker-1"}
    shown = nvidia.call("status").expect(0).out
    assert "UNHEALTHY" in shown
    assert f"worker-1: device lost: nvidia-smi says `{LOST}`" in shown

    before = nvidia.run_ids()
    error = nvidia.call("run", "stubborn-own", "--json").expect(3).json["error"]
    assert (error["node"], error["hint"], LOST in error["message"]) == ("worker-1", "labctl up", True)
    assert nvidia.run_ids() == before

    kept = nvidia.identities()
    nvidia.call("up").expect(0)
    assert {node for node, identity in nvidia.identities().items() if identity != kept[node]} == {"worker-1"}
    checked(nvidia, "worker-1")

    # A rank that crashes before the next check gets that cause, too.
    folder = nvidia.path / "workloads/unlucky"
    folder.mkdir()
    (folder / "workload.yml").write_text(
        "description: loses its GPU\nlauncher: mpirun\nscript: unlucky.sh\ntimeout: 3m\n"
    )
    (folder / "unlucky.sh").write_text(UNLUCKY)
    (folder / "unlucky.sh").chmod(0o755)
    document = nvidia.call("run", "unlucky", "--json").expect(4).json
    assert document["cause"] == "device-lost"
    assert f"worker-1 (rank 1): device lost: nvidia-smi says `{LOST}`" in document["message"]


@pytest.mark.slow
def test_render_nodes_that_vanish_or_are_closed_are_lost(intel: Lab) -> None:
    """Remove one render node and close another: both workers are unhealthy within 30 s, with reason."""
    checked(intel, "worker-0", "worker-1")
    lost = time.monotonic()
    intel.inside("worker-0", "rm", "/dev/dri/renderD128", user="0")
    intel.inside("worker-1", "chmod", "0", "/dev/dri/renderD129", user="0")
    unhealthy_within_two_intervals(intel, lost, "worker-0", "worker-1")
    reason_by_node = reasons(intel)
    assert reason_by_node["worker-0"].startswith("device lost: /dev/dri/renderD128 is gone;")
    assert reason_by_node["worker-1"].startswith("device lost: the lab's user may not open /dev/dri/renderD129;")


@pytest.mark.slow
def test_a_gpu_that_the_device_cgroup_has_lost_is_lost(nvidia: Lab) -> None:
    """Revoke the device as systemd does to GPU containers on daemon-reload; the device file stays."""
    container = nvidia.containers()["worker-0"]
    groups = Path(f"/proc/{container.attrs['State']['Pid']}/cgroup").read_text()
    devices = re.search(r"^\d+:devices:(.+)$", groups, re.MULTILINE)
    if not devices:
        pytest.skip("this kernel keeps device rules in programs (cgroup 2), not in files")
    checked(nvidia, "worker-0")
    lost = time.monotonic()
    Path(f"/sys/fs/cgroup/devices{devices[1]}/devices.deny").write_text("c 1:7 rwm")
    unhealthy_within_two_intervals(nvidia, lost, "worker-0")
    assert reasons(nvidia)["worker-0"].startswith("device lost: the lab's user may not open /dev/nvidia")
