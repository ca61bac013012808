"""A validation over several hosts, one with a fault: it is named, the others are checked, nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import RackLabs
from support.rack.rack import Rack, RackLab

import labctl

pytestmark = pytest.mark.docker

CPU_PROFILE = Path(labctl.__file__).with_name("batches") / "profiles/cpu.yml"
PROFILE = """\
description: hosts with a trouble
hooks:
  - name: firmware
    command: touch /tmp/$L3_ENABLED
    check: test -e /tmp/true && test "$(hostname)" != h2
checks:
  - {workload: hello, nodes: each}
"""


def test_bad_hosts_are_named_and_nothing_is_left(rack: Rack, rack_lab: RackLabs) -> None:
    """h2 fails a hook and h3 has no engine: failing and not reached, worker-0 good, no container is left."""
    lab = rack_lab(3)
    (lab.path / "mine.yml").write_text(PROFILE)
    *_, last = rack.hosts(3)
    last.stop_engine()
    answer = lab.call("validate", "--profile", str(lab.path / "mine.yml"), "--json", environ={"L3_ENABLED": "true"})
    validation = answer.expect(5).json["validation"]
    verdicts = {node["node"]: (node["host"], node["verdict"]) for node in validation["nodes"]}
    assert verdicts == {
        "worker-0": ("h1", "good"),
        "worker-1": ("h2", "failing"),
        "worker-2": ("h3", "not reached"),
    }
    steps = {step["name"]: step for step in validation["steps"]}
    assert steps["firmware"]["message"].startswith("1 of 3 hosts: h2: check failed with exit code 1")
    assert (steps["up"]["status"], steps["hello"]["status"]) == ("failed", "passed")
    assert "h3" in steps["clean-up"]["message"]
    last.cure()
    assert remains(lab) == []


@pytest.mark.parametrize(
    "changes",
    [
        # All checks, with limits that a busy machine holds.
        pytest.param(
            {
                "description": "within: 98%\ndescription",
                "memory: {}": "memory: {min: 0.001}",
                "disk: {}": "disk: {min: 0.001}",
                "tflops: {}": "tflops: {min: 0.000001}",
            },
            id="on-a-busy-machine",
        ),
        pytest.param({}, id="as-it-is", marks=pytest.mark.slow),
    ],
)
def test_two_hosts_go_from_nothing_to_a_report_and_back_to_nothing(rack_lab: RackLabs, changes: dict[str, str]) -> None:
    """The cpu profile passes on two hosts with all figures; no container is left."""
    lab = rack_lab(2)
    mine = lab.path / "mine.yml"
    mine.write_text(CPU_PROFILE.read_text())
    for old, new in changes.items():
        assert mine.read_text().count(old) == 1
        mine.write_text(mine.read_text().replace(old, new))
    validation = validated(lab, str(mine) if changes else "cpu", code=0)
    assert validation["message"] == "All 2 nodes are good."
    assert {step["status"] for step in validation["steps"]} == {"passed"}
    assert {figure["step"] for figure in validation["figures"]} == {
        *("network", "memory-bandwidth", "disk-read", "matmul", "allreduce", "opt-tiny")
    }
    assert remains(lab) == []


@pytest.mark.slow
def test_a_host_whose_cores_are_slow_is_named(rack_lab: RackLabs) -> None:
    """h2's CPU is throttled: exit code 5, worker-1 is slow in matmul, no container is left."""
    lab = rack_lab(2)
    lab.hosts[1].throttle(0.15)
    matmul = "{workload: matmul, nodes: turns, set: {rounds: '1'}, metrics: {tflops: {}}}"
    validation = validated(lab, profile(lab, matmul), code=5)
    assert verdicts(validation) == {"worker-0": "good", "worker-1": "slow"}
    assert "% below the others), " in validation["message"]
    assert remains(lab) == []


@pytest.mark.slow
def test_a_node_whose_ssh_is_blocked_between_the_hosts_is_named(rack_lab: RackLabs) -> None:
    """h2 refuses the nodes' ssh port: worker-1 is failing, and hello passes."""
    lab = rack_lab(2, LAB_SSH_PORT="12321")
    lab.hosts[1].refuse(12321)
    validation = validated(lab, profile(lab, "{workload: ssh-check}", "{workload: hello}"), code=5)
    assert verdicts(validation) == {"worker-0": "good", "worker-1": "failing"}
    assert "LAB-SSH-001: not reached from the launcher" in validation["message"]
    assert {step["name"]: step["status"] for step in validation["steps"]}["hello"] == "passed"
    assert remains(lab) == []


@pytest.mark.slow
def test_a_node_with_the_wrong_interface_is_named(rack: Rack, rack_lab: RackLabs) -> None:
    """`iface=eth0` for h2 is wrong: worker-1 is failing, with the interface that bytes took."""
    lab = rack_lab(2)
    first_host, second_host = lab.hosts
    first, second = (host.interface(host.second_interface(rack.fabric)) for host in (first_host, second_host))
    (lab.path / "hosts.txt").write_text(f"{first_host.line(iface=first)}\n{second_host.line(iface='eth0')}\n")
    validation = validated(lab, profile(lab, "{workload: hello}"), code=5)
    assert verdicts(validation) == {"worker-0": "good", "worker-1": "failing"}
    assert f"bytes between the hosts went through {second}, not through eth0" in validation["message"]
    assert remains(lab) == []


def profile(lab: RackLab, *checks: str) -> str:
    """Write a validation profile with these checks to mine.yml; return its path."""
    path = lab.path / "mine.yml"
    path.write_text(f"description: a few checks\nwithin: 30%\nchecks: [{', '.join(checks)}]\n")
    return str(path)


def validated(lab: RackLab, profile: str, *, code: int) -> dict[str, Any]:
    """Run a validation with this profile; assert its exit code; return its document."""
    answer = lab.call("validate", "--profile", profile, "--json", limit=400).expect(code)
    validation: dict[str, Any] = answer.json["validation"]
    return validation


def verdicts(validation: dict[str, Any]) -> dict[str, str]:
    """Return node -> verdict of a validation."""
    return {node["node"]: node["verdict"] for node in validation["nodes"]}


def remains(lab: RackLab) -> list[Any]:
    """List all containers of all hosts."""
    return [container for host in lab.hosts for container in host.engine.containers.list(all=True)]
