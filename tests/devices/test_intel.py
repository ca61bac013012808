"""Intel GPUs in nodes as render nodes, with the groups of this host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import Lab
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker
INTEL, AMD = "0x8086", "0x1002"
VIDEO = 44
# The AMD card has the first number.
NODES = [("worker-0", "0000:04:00.0", "/dev/dri/renderD129"), ("worker-1", "0000:05:00.0", "/dev/dri/renderD130")]


@pytest.fixture(scope="module")
def lab(module_machine: Machine, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield a lab of two nodes, up, on a machine with an AMD card and two Intel cards, which `auto` picks."""
    for number, vendor in enumerate((AMD, INTEL, INTEL)):
        hardware.card(module_machine, number, vendor=vendor)
    hardware.groups(module_machine, render=hardware.RENDER, video=VIDEO)
    lab = module_machine.lab(tmp_path_factory.mktemp("lab"), f"{family}-intel", {"LAB_ACCELERATOR": "auto"})
    assert "accelerator intel" in lab.call("up").expect(0).err
    yield lab
    lab.destroy()


@pytest.mark.parametrize(("node", "address", "path"), NODES)
def test_a_node_has_its_own_render_node_and_no_other(lab: Lab, node: str, address: str, path: str) -> None:
    """Each worker has one render node in devices, label and /dev/dri, and ZE_AFFINITY_MASK=0."""
    options = lab.containers()[node].attrs["HostConfig"]
    assert [(device["PathOnHost"], device["PathInContainer"]) for device in options["Devices"]] == [(path, path)]
    assert lab.containers()[node].labels["labctl.devices"] == path
    assert lab.inside(node, "find", "/dev/dri", "-type", "c").split() == [path]
    assert "ZE_AFFINITY_MASK=0" in lab.inside(node, "env").split()


def test_the_launcher_has_none(lab: Lab) -> None:
    """The launcher's container has no devices."""
    assert not lab.containers()["launcher"].attrs["HostConfig"]["Devices"]


@pytest.mark.parametrize(("node", "address", "path"), NODES)
def test_its_name_by_path_leads_to_it(lab: Lab, node: str, address: str, path: str) -> None:
    """/dev/dri/by-path of a worker has one link, by PCI address, to its render node."""
    listed = "cd /dev/dri/by-path && for name in *; do echo $name $(readlink -f $name); done"
    assert lab.inside(node, "sh", "-c", listed) == f"pci-{address}-render {path}\n"


@pytest.mark.parametrize(("node", "address", "path"), NODES)
def test_the_labs_user_may_open_it_by_this_hosts_groups(lab: Lab, node: str, address: str, path: str) -> None:
    """Over ssh, a worker's user has groups video and render and opens the render node."""
    assert lab.containers()[node].attrs["HostConfig"]["GroupAdd"] == [str(VIDEO), str(hardware.RENDER)]
    # Log in as ranks are started: by ssh, as the lab's user.
    opened, *groups = lab.inside("launcher", "ssh", node, f": < {path} && echo {path} && id -G").split()
    assert opened == path
    assert {str(VIDEO), str(hardware.RENDER)} <= set(groups)
