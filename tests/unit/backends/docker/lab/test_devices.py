"""`labctl devices` on trees like a host's, as JSON and as text."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import sysfs

from labctl import accelerators
from labctl.backends import spec
from labctl.backends.devices import HostDevices
from labctl.backends.docker.lab import devices
from labctl.cli.devices import host_text, ranges
from labctl.cli.output import to_json
from labctl.config import settings
from labctl.system import procfs


@pytest.fixture(autouse=True)
def plain_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a tree with eight cores on two NUMA nodes; fake the group ids of devices, hide vendors' tools."""
    sysfs.cores(tmp_path / "root", "0-7")
    monkeypatch.setattr(procfs, "group_of", lambda path, root: 44 if path == "/dev/nvidia0" else 109)  # noqa: ARG005
    monkeypatch.setenv("PATH", str(tmp_path / "no-tools"))
    for node, cores in (("node0", "0-3"), ("node1", "4-7")):
        sysfs.put(tmp_path / f"root/sys/devices/system/node/{node}/cpulist", f"{cores}\n")


def host(tmp_path: Path, text: str | None = None) -> HostDevices:
    """Return the devices of this host, in a lab with this .env or outside of a lab."""
    directory = tmp_path / "lab"
    directory.mkdir()
    if text is not None:
        (directory / ".env").write_text(text, encoding="utf-8")
    loaded = settings.load(directory, {"HOME": "/home/someone"}, {})
    return devices.of_host(loaded, directory, tmp_path / "root")


def take(tmp_path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the host's devices as their JSON document."""
    document: dict[str, Any] = json.loads(json.dumps(to_json(host(tmp_path, text))))
    return document


def two_gpus(tmp_path: Path) -> Path:
    """Add two NVIDIA GPUs on two NUMA nodes, with a driver, to the tree; return its root."""
    root = tmp_path / "root"
    sysfs.nvidia(root, "0000:3b:00.0", 1, numa=0, cores="0-3")
    sysfs.nvidia(root, "0000:af:00.0", 0, numa=1, cores="4-7")
    sysfs.put(root / "sys/module/nvidia/version", "550.54.15\n")
    return root


def test_a_bare_host_outside_a_lab(tmp_path: Path) -> None:
    """A host without devices is accelerator cpu with the reason, two NUMA nodes and no lab nodes."""
    document = take(tmp_path)
    assert (document["accelerator"], document["devices"], document["nodes"]) == ("cpu", [], [])
    assert document["why"].startswith("auto: no /dev/nvidia<N>, ")
    assert document["numa"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_auto_says_what_it_would_have_taken(tmp_path: Path) -> None:
    """choice() is cpu with what `auto` looked for, and that an NVIDIA card has no device file."""
    root = tmp_path / "root"
    sysfs.nvidia(root, "0000:3b:00.0", 0, file=False)
    assert spec.choice(settings.load(tmp_path, {"HOME": "/home/someone"}, {}), root) == (
        "cpu",
        "auto: no /dev/nvidia<N>, no /dev/accel/accel<N> served by habanalabs, no Intel GPU under /dev/dri; "
        "an NVIDIA card at 0000:3b:00.0 has its driver, nvidia, but no device file "
        "(`sudo nvidia-modprobe -c0 -u` makes the first)",
    )


def test_each_device_names_the_node_that_gets_it(tmp_path: Path) -> None:
    """Two GPUs in a lab of two nodes: each names its node, whose cores are of the same NUMA node."""
    two_gpus(tmp_path)
    document = take(tmp_path, "LAB_NODES=2\n")
    assert [(device["id"], device["path"], device["node"]) for device in document["devices"]] == [
        ("0", "/dev/nvidia1", "worker-0"),
        ("1", "/dev/nvidia0", "worker-1"),
    ]
    assert [(node["name"], node["cpus"], node["devices"]) for node in document["nodes"]] == [
        ("worker-0", [0, 1, 2, 3], ["0"]),
        ("worker-1", [4, 5, 6, 7], ["1"]),
    ]
    assert document["drivers"] == {"nvidia": "550.54.15"}


def test_devices_that_the_lab_leaves_have_no_node(tmp_path: Path) -> None:
    """With LAB_DEVICES of one GPU, the other one has node None."""
    two_gpus(tmp_path)
    document = take(tmp_path, "LAB_NODES=1\nLAB_DEVICES=0000:af:00.0\n")
    assert [(device["id"], device["node"]) for device in document["devices"]] == [("0", None), ("1", "worker-0")]


def test_a_device_that_a_lab_has_now_names_it(tmp_path: Path) -> None:
    """The holder of a device is the lab in its locked lease file, with user, node, directory and time."""
    lease = Path(procfs.lock_directory(two_gpus(tmp_path))) / "labctl-0000:af:00.0.lock"
    sysfs.put(lease, '{"lab": "other", "node": "worker-0", "directory": "/srv/lab", "uid": 4000000, "since": "noon"}')
    with lease.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        held = [device["holder"] for device in take(tmp_path)["devices"]]
    assert held == ["", "lab `other` of user 4000000 (worker-0, /srv/lab, since noon)"]


def test_a_device_whose_lab_is_gone_is_free(tmp_path: Path) -> None:
    """A lease file that is not locked gives no holder."""
    sysfs.put(Path(procfs.lock_directory(two_gpus(tmp_path))) / "labctl-0000:af:00.0.lock", '{"lab": "other"}')
    assert [device["holder"] for device in take(tmp_path)["devices"]] == ["", ""]


def test_what_other_makers_have_is_shown_too(tmp_path: Path) -> None:
    """Devices of other vendors are listed without a node; an AMD card is a note."""
    root = two_gpus(tmp_path)
    sysfs.gaudi(root, 0, "0000:19:00.0", told={"module_id": "3"})
    sysfs.render_node(root, 128, "0000:00:02.0", driver="i915")
    sysfs.card(root, "0000:d8:00.0", "0x1002", driver="amdgpu")
    document = take(tmp_path, "LAB_NODES=2\n")
    assert [device["accelerator"] for device in document["devices"]] == ["nvidia", "nvidia", "habana", "intel"]
    assert [device["node"] for device in document["devices"]] == ["worker-0", "worker-1", None, None]
    assert ["AMD" in note for note in document["notes"]] == [True]


def test_a_lab_that_asks_for_what_is_not_there_is_shown_what_is(tmp_path: Path) -> None:
    """LAB_ACCELERATOR=habana on a host with GPUs: accelerator None with the reason, and both GPUs are listed."""
    two_gpus(tmp_path)
    document = take(tmp_path, "LAB_ACCELERATOR=habana\n")
    assert document["accelerator"] is None
    assert document["why"] == "this host has no habana device: no /dev/accel/accel<N> served by habanalabs"
    assert len(document["devices"]) == 2


def test_a_lab_that_asks_for_too_much_is_told_so(tmp_path: Path) -> None:
    """Two nodes of two slots with two GPUs give a note that four are needed."""
    two_gpus(tmp_path)
    (note,) = take(tmp_path, "LAB_NODES=2\nLAB_SLOTS=2\n")["notes"]
    assert "need 4 nvidia devices, local has 2" in note


def test_people_read_a_table(tmp_path: Path) -> None:
    """host_text() prints host, cores, fabric, nodes and notes, and a table of devices."""
    root = two_gpus(tmp_path)
    sysfs.card(root, "0000:d8:00.0", "0x10de")
    sysfs.put(root / "sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n")
    sysfs.put(root / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    (root / "sys/class/infiniband/mlx5_0/device/net/ib0").mkdir(parents=True)
    assert host_text(host(tmp_path, "LAB_NODES=2\n")) == (
        "host         local\n"
        "accelerator  nvidia; auto: found /dev/nvidia1, /dev/nvidia0\n"
        "driver       nvidia: 550.54.15\n"
        "cores        0-3 | 4-7\n"
        "fabric       mlx5_0 InfiniBand ACTIVE, ib0\n"
        "groups       containers get gids 44, 109\n"
        "node         worker-0: devices 0; cores 0-3\n"
        "node         worker-1: devices 1; cores 4-7\n"
        "note         an NVIDIA card at 0000:d8:00.0 has no driver; it needs nvidia\n"
        "\n"
        "KIND    ID  FILE          PCI           NUMA  CORES  NAME                   NODE\n"
        "nvidia  0   /dev/nvidia1  0000:3b:00.0  0     0-3    NVIDIA H100 80GB HBM3  worker-0\n"
        "nvidia  1   /dev/nvidia0  0000:af:00.0  1     4-7    NVIDIA H100 80GB HBM3  worker-1"
    )


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((8, 0, 1, 2, 10), "0-2,8,10"), ((1, 3), "1,3")]
)
def test_numbers_in_a_row_are_a_range(numbers: tuple[int, ...], text: str) -> None:
    """ranges() joins consecutive numbers, sorted, as in `0-2,8,10`."""
    assert ranges(numbers) == text


def test_groups_of_containers_have_their_names(tmp_path: Path) -> None:
    """Groups that the host names are listed by name, with all ids."""
    two_gpus(tmp_path)
    sysfs.put(tmp_path / "root/etc/group", "video:x:44:\nrender:x:109:\nusers:x:100:\n")
    named = host(tmp_path)
    assert "groups       containers get video, render (gids 44, 109)" in host_text(named)
    assert named.group_names == {"video": 44, "render": 109}
    assert "groups       containers get gids 44, 109" in host_text(replace(named, group_names={}))


def test_a_narrow_terminal_has_fewer_columns_of_devices(tmp_path: Path) -> None:
    """On 60 columns no line is longer, and the names of devices are still shown."""
    two_gpus(tmp_path)
    text = host_text(host(tmp_path), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "CORES" not in text
    assert text.splitlines()[-1].startswith("nvidia")


def test_devices_of_a_lab_that_names_none_are_all_that_were_found(tmp_path: Path) -> None:
    """Devices, nodes and slots are decided from the host, as far as no setting says them."""
    _, observed = accelerators.observe("nvidia", two_gpus(tmp_path))

    def decided(**flags: str) -> dict[str, str]:
        """Return the values that are decided with these settings."""
        loaded = settings.load(tmp_path, {}, flags)
        return {row.key: row.value for row in devices.decided(loaded, "nvidia", observed)}

    assert decided() == {"LAB_NODES": "2", "LAB_SLOTS": "1", "LAB_DEVICES": "0,1", "LAB_IMAGE": "labctl/nvidia"}
    assert decided(LAB_SLOTS="2", LAB_IMAGE="mine") == {"LAB_NODES": "1", "LAB_DEVICES": "0,1"}
    assert decided(LAB_NODES="3") == {}
