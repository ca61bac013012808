"""Gaudis in nodes through Habana's runtime, by index and by module id, which is stable across reboots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.harness import Lab
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker
# Capabilities that sshd, the node's start and Habana's runtime need.
CAPABILITIES = {"CAP_AUDIT_WRITE", "CAP_SETGID", "CAP_SETUID", "CAP_SYS_CHROOT", "CAP_SYS_NICE"}
# Indices follow the order of probing, modules the slots of the board.
MODULES = (6, 2, 7, 3)
NETWORK = '{"NIC_NET_CONFIG": []}'


@pytest.fixture(scope="module")
def lab(module_machine: Machine, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield a lab of two nodes, up, on a machine with four Gaudis, an NPU, and a network description."""
    for index, module in enumerate(MODULES):
        hardware.gaudi(module_machine, index, module=module)
    hardware.npu(module_machine, 4)
    module_machine.file("/etc/gaudinet.json", NETWORK)
    lab = module_machine.lab(tmp_path_factory.mktemp("lab"), f"{family}-gaudi", {"LAB_ACCELERATOR": "habana"})
    lab.call("up").expect(0)
    yield lab
    lab.destroy()


@pytest.fixture
def requests(lab: Lab, shared_machine: Machine) -> dict[str, Any]:
    """Return node -> the recorded call of Habana's runtime."""
    return {request["node"]: request for request in shared_machine.requests()}


@pytest.mark.parametrize(("node", "indices", "modules"), [("worker-0", "0,1", "6,2"), ("worker-1", "2,3", "7,3")])
def test_the_runtime_is_asked_for_each_nodes_own_gaudis(
    lab: Lab, requests: dict[str, Any], node: str, indices: str, modules: str
) -> None:
    """Each worker has its two indices and modules in its variables, and their device files."""
    environment = requests[node]["environment"]
    assert environment["HABANA_VISIBLE_DEVICES"] == indices
    assert environment["HABANA_VISIBLE_MODULES"] == modules
    assert environment["OMPI_MCA_btl_vader_single_copy_mechanism"] == "none"
    assert lab.inside(node, "ls", "/dev/accel").split() == [f"accel{index}" for index in indices.split(",")]


def test_the_launcher_gets_no_gaudi(lab: Lab, requests: dict[str, Any]) -> None:
    """Habana's runtime is called for the workers only; the launcher uses runc."""
    assert set(requests) == {"worker-0", "worker-1"}
    assert lab.containers()["launcher"].attrs["HostConfig"]["Runtime"] == "runc"


def test_capabilities_are_those_that_are_listed_and_none_else(lab: Lab, requests: dict[str, Any]) -> None:
    """Runtime and engine get CAPABILITIES only, all others dropped, not privileged."""
    granted = requests["worker-0"]["capabilities"]
    assert {kind: set(names) for kind, names in granted.items() if names} == {
        "bounding": CAPABILITIES,
        "effective": CAPABILITIES,
        "permitted": CAPABILITIES,
    }
    options = lab.containers()["worker-0"].attrs["HostConfig"]
    assert (options["CapDrop"], options["Privileged"]) == (["ALL"], False)
    assert {f"CAP_{name.removeprefix('CAP_')}" for name in options["CapAdd"]} == CAPABILITIES


def test_the_hosts_network_description_is_where_the_libraries_read_it(lab: Lab) -> None:
    """/etc/habanalabs/gaudinet.json of a worker equals the machine's gaudinet.json."""
    assert lab.inside("worker-0", "cat", "/etc/habanalabs/gaudinet.json") == NETWORK
