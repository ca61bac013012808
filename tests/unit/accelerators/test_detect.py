"""Detection of devices from the kernel's files, on trees like a host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import sysfs

from labctl import accelerators
from labctl.accelerators import observe
from labctl.errors import HostError
from labctl.model import Device, Fabric
from labctl.system import pci, procfs

CORE = 3


@pytest.fixture(autouse=True)
def one_core(tmp_path: Path) -> None:
    """Write sysfs files of a machine whose only usable core is number 3 into the test's tree."""
    sysfs.cores(tmp_path, str(CORE))


def find(name: str, root: Path) -> tuple[Device, ...]:
    """Return the devices that the named accelerator finds in the tree below root."""
    return accelerators.get(name).find(root)


# --- NVIDIA --------------------------------------------------------------------------------------------------


def test_a_gpu_is_told_in_full(tmp_path: Path) -> None:
    """Write one GPU with two cores, one of them usable: the Device has path, name, UUID, firmware and that core."""
    sysfs.nvidia(tmp_path, "0000:3b:00.0", 0, numa=1, cores=f"{CORE},{CORE + 1}")
    assert find("nvidia", tmp_path) == (
        Device(
            id="0",
            path="/dev/nvidia0",
            pci="0000:3b:00.0",
            numa=1,
            cpus=(CORE,),
            name="NVIDIA H100 80GB HBM3",
            uuid="GPU-0000-0",
            firmware="96.00.61.00.01",
        ),
    )


def test_indices_are_in_pci_order_and_files_by_minor_number(tmp_path: Path) -> None:
    """Write three GPUs: ids follow the PCI order as numbers, paths follow each GPU's minor number."""
    for minor, address in enumerate(("10000:01:00.0", "0000:c1:00.0", "0000:0b:00.0")):
        sysfs.nvidia(tmp_path, address, minor)
    devices = [(device.id, device.path, device.pci) for device in find("nvidia", tmp_path)]
    assert devices == [
        ("0", "/dev/nvidia2", "0000:0b:00.0"),
        ("1", "/dev/nvidia1", "0000:c1:00.0"),
        ("2", "/dev/nvidia0", "10000:01:00.0"),
    ]


def test_sixteen_gpus_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    """Write sixteen GPUs: /dev/nvidia0 to /dev/nvidia15 come in the order of numbers, not of text."""
    for minor in range(16):
        sysfs.nvidia(tmp_path, f"0000:{0x10 + minor:02x}:00.0", minor)
    assert [device.path for device in find("nvidia", tmp_path)] == [f"/dev/nvidia{index}" for index in range(16)]


def test_a_gpu_without_its_file_keeps_its_index_for_itself(tmp_path: Path) -> None:
    """Write two GPUs, the first without /dev/nvidia0: only id 1 is found, not renumbered to 0."""
    sysfs.nvidia(tmp_path, "0000:01:00.0", 0, file=False)
    sysfs.nvidia(tmp_path, "0000:02:00.0", 1)
    assert [device.id for device in find("nvidia", tmp_path)] == ["1"]


def test_a_file_whose_gpu_is_gone_is_no_device(tmp_path: Path) -> None:
    """Write /dev/nvidia1 without a GPU in /proc: only /dev/nvidia0 is found."""
    sysfs.nvidia(tmp_path, "0000:01:00.0", 0)
    sysfs.put(tmp_path / "dev/nvidia1")
    assert [device.path for device in find("nvidia", tmp_path)] == ["/dev/nvidia0"]


def test_minor_numbers_are_indices_where_the_driver_tells_none(tmp_path: Path) -> None:
    """Write a GPU without a minor number in /proc, and /dev/nvidia3: a Device with id 3 and its path only."""
    sysfs.nvidia(tmp_path, "0000:01:00.0", None)
    sysfs.put(tmp_path / "dev/nvidia3")
    assert find("nvidia", tmp_path) == (Device(id="3", path="/dev/nvidia3"),)


def test_the_uuid_of_a_gpu_that_nobody_opened_is_unknown(tmp_path: Path) -> None:
    """Write an information file whose UUID is question marks: the Device's uuid is empty."""
    sysfs.nvidia(tmp_path, "0000:01:00.0", 0)
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 0\n")
    assert find("nvidia", tmp_path)[0].uuid == ""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/module/nvidia/version", "550.54.15\n"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC:  12\n",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (root@)\n",
        ),
    ],
    ids=["module", "proprietary", "open"],
)
def test_the_version_of_the_nvidia_driver(tmp_path: Path, path: str, text: str) -> None:
    """Read the version from the module's file or from either text of /proc/driver/nvidia/version."""
    sysfs.put(tmp_path / path, text)
    assert accelerators.get("nvidia").driver(tmp_path) == "550.54.15"


# --- Gaudi ---------------------------------------------------------------------------------------------------


def test_a_gaudi_is_told_in_full(tmp_path: Path) -> None:
    """Write one Gaudi: the Device has all the fields that sysfs gives, and driver() returns its version."""
    attributes = {"module_id": "3", "device_type": "GAUDI2", "fw_os_ver": "1.18.0-fw-53.1", "status": "Operational"}
    sysfs.gaudi(tmp_path, 0, "0000:19:00.0", numa=0, cores=str(CORE), told=attributes)
    sysfs.put(tmp_path / "sys/module/habanalabs/version", "1.18.0-ee698fb\n")
    assert find("habana", tmp_path) == (
        Device(
            id="0",
            path="/dev/accel/accel0",
            pci="0000:19:00.0",
            module="3",
            numa=0,
            cpus=(CORE,),
            name="GAUDI2",
            firmware="1.18.0-fw-53.1",
        ),
    )
    assert accelerators.get("habana").driver(tmp_path) == "1.18.0-ee698fb"


def test_a_gaudi_that_its_driver_gave_up_says_so(tmp_path: Path) -> None:
    """Write a Gaudi with status Malfunction: its health is "driver status: Malfunction"."""
    sysfs.gaudi(tmp_path, 0, "0000:19:00.0", told={"status": "Malfunction"})
    assert find("habana", tmp_path)[0].health == "driver status: Malfunction"


def test_an_npu_beside_a_gaudi_is_left_alone(tmp_path: Path) -> None:
    """Write an Intel NPU under /dev/accel beside a Gaudi: only the Gaudi is found, and a remark names the NPU."""
    sysfs.gaudi(tmp_path, 0, "0000:00:0b.0", driver="intel_vpu", vendor="0x8086")
    sysfs.gaudi(tmp_path, 1, "0000:19:00.0", told={"module_id": "6"})
    assert [(device.id, device.module) for device in find("habana", tmp_path)] == [("1", "6")]
    assert accelerators.remarks(tmp_path) == ("an Intel NPU at 0000:00:0b.0 is not used: it is not a GPU",)


# --- Intel ---------------------------------------------------------------------------------------------------


def test_an_intel_card_is_told_in_full(tmp_path: Path) -> None:
    """Write a render node with two tiles: the Device has its path as id, link, and the sum of both tiles' memory."""
    folder = sysfs.render_node(tmp_path, 129, "0000:4d:00.0", numa=0, cores=str(CORE))
    for tile in (0, 1):
        sysfs.put(folder / f"tile{tile}/physical_vram_size_bytes", f"{8 << 30}\n")
    sysfs.put(tmp_path / "proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    assert find("intel", tmp_path) == (
        Device(
            id="/dev/dri/renderD129",
            path="/dev/dri/renderD129",
            pci="0000:4d:00.0",
            numa=0,
            cpus=(CORE,),
            link="pci-0000:4d:00.0-render",
            memory=16 << 30,
        ),
    )
    assert accelerators.get("intel").driver(tmp_path) == "xe 6.8.0-45-generic"


def test_graphics_in_the_processor_are_taken_only_when_asked_for(tmp_path: Path) -> None:
    """Write integrated graphics only: auto chooses cpu and names LAB_ACCELERATOR=intel, which takes them."""
    sysfs.render_node(tmp_path, 128, "0000:00:02.0", driver="i915")
    choice = accelerators.choose("auto", tmp_path)
    assert choice.name == "cpu"
    assert "processor's own (LAB_ACCELERATOR=intel uses it)" in choice.why
    assert [device.path for device in accelerators.choose("intel", tmp_path).devices] == ["/dev/dri/renderD128"]


@pytest.mark.parametrize("setting", ["auto", "intel"])
def test_a_card_goes_before_graphics_in_the_processor(tmp_path: Path, setting: str) -> None:
    """Write integrated graphics and a card: auto and intel both choose the card alone."""
    sysfs.render_node(tmp_path, 128, "0000:00:02.0", driver="i915")
    sysfs.render_node(tmp_path, 129, "0000:03:00.0")
    choice = accelerators.choose(setting, tmp_path)
    assert (choice.name, [device.path for device in choice.devices]) == ("intel", ["/dev/dri/renderD129"])


def test_a_card_with_memory_is_a_card_at_whatever_address(tmp_path: Path) -> None:
    """Write a card with own memory at the address of integrated graphics: auto chooses intel."""
    folder = sysfs.render_node(tmp_path, 128, "0000:00:02.0", driver="i915")
    sysfs.put(folder / "drm/card0/lmem_total_bytes", f"{16 << 30}\n")
    assert accelerators.choose("auto", tmp_path).name == "intel"


def test_an_amd_card_beside_an_intel_card_is_left_alone(tmp_path: Path) -> None:
    """Write an AMD and an Intel card: only the Intel one is found, and a remark names the AMD card as not used."""
    sysfs.render_node(tmp_path, 128, "0000:03:00.0", vendor="0x1002", driver="amdgpu")
    sysfs.render_node(tmp_path, 129, "0000:04:00.0")
    assert [device.link for device in find("intel", tmp_path)] == ["pci-0000:04:00.0-render"]
    (remark,) = accelerators.remarks(tmp_path)
    assert "an AMD card at 0000:03:00.0 is not used" in remark


# --- what is broken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numa", [-1, None])
def test_a_numa_node_that_the_kernel_does_not_know_is_none(tmp_path: Path, numa: int | None) -> None:
    """Write numa_node -1 or no such file: the Device's numa is None."""
    sysfs.nvidia(tmp_path, "0000:01:00.0", 0, numa=numa)
    assert find("nvidia", tmp_path)[0].numa is None


def test_files_that_are_empty_leave_what_is_known(tmp_path: Path) -> None:
    """Write a Gaudi whose attribute files are empty: the Device has id, path and PCI address only."""
    folder = sysfs.gaudi(tmp_path, 0, "0000:19:00.0", told={"module_id": "", "status": "", "device_type": ""})
    sysfs.put(folder / "numa_node")
    sysfs.put(folder / "local_cpulist")
    assert find("habana", tmp_path) == (Device(id="0", path="/dev/accel/accel0", pci="0000:19:00.0"),)


def test_files_that_cannot_be_read_leave_what_is_known(tmp_path: Path) -> None:
    """Write folders in place of a Gaudi's attribute files: the Device has id, path and PCI address only."""
    folder = sysfs.gaudi(tmp_path, 0, "0000:19:00.0")
    # Whoever runs this, root included, cannot read a folder as a file.
    for name in ("module_id", "status"):
        (folder / name).mkdir()
    assert find("habana", tmp_path) == (Device(id="0", path="/dev/accel/accel0", pci="0000:19:00.0"),)


def test_links_that_lead_nowhere_are_no_devices(tmp_path: Path) -> None:
    """Write broken links and plain files in /sys and /dev for Gaudi and Intel: find_all returns {}."""
    for name in ("dev/accel/accel0", "dev/dri/renderD128"):
        sysfs.put(tmp_path / name)
    sysfs.link(tmp_path / "sys/class/accel/accel0/device", tmp_path / "gone")
    sysfs.link(tmp_path / "sys/class/drm/renderD128/device", tmp_path / "gone")
    sysfs.link(tmp_path / "dev/dri/by-path/pci-0000:03:00.0-render", Path("../renderD200"))
    sysfs.put(tmp_path / "dev/dri/by-path/pci-0000:04:00.0-render")
    assert accelerators.find_all(tmp_path) == {}


# --- cards that no lab can use -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "driver", "message"),
    [
        ("0x10de", "", "an NVIDIA card at 0000:3b:00.0 has no driver; it needs nvidia"),
        ("0x10de", "nouveau", "an NVIDIA card at 0000:3b:00.0 is bound to the driver nouveau, not to nvidia"),
        (
            "0x10de",
            "nvidia",
            "an NVIDIA card at 0000:3b:00.0 has its driver, nvidia, but no device file "
            "(`sudo nvidia-modprobe -c0 -u` makes the first)",
        ),
        ("0x1da3", "", "a Gaudi at 0000:3b:00.0 has no driver; it needs habanalabs"),
        ("0x8086", "vfio-pci", "an Intel GPU at 0000:3b:00.0 is bound to the driver vfio-pci, not to i915 or xe"),
    ],
)
def test_a_card_that_cannot_be_used_says_why(tmp_path: Path, vendor: str, driver: str, message: str) -> None:
    """Write a PCI card with no driver, another driver, or no device file: the one remark gives that reason."""
    sysfs.card(tmp_path, "0000:3b:00.0", vendor, driver=driver)
    assert accelerators.remarks(tmp_path) == (message,)


def test_nothing_is_said_of_cards_in_use_nor_of_what_is_no_accelerator(tmp_path: Path) -> None:
    """Write a used GPU, integrated graphics, an audio function, a bridge and a VGA chip: no remarks."""
    sysfs.nvidia(tmp_path, "0000:3b:00.0", 0)
    sysfs.render_node(tmp_path, 128, "0000:00:02.0", driver="i915")
    sysfs.card(tmp_path, "0000:3b:00.1", "0x10de", kind="0x040300")
    sysfs.card(tmp_path, "0000:00:00.0", "0x8086", kind="0x060000")
    sysfs.card(tmp_path, "0000:02:00.0", "0x1a03", kind="0x030000", driver="ast")
    assert accelerators.remarks(tmp_path) == ()


def test_gpus_whose_addresses_are_unknown_are_not_said_to_lack_files(tmp_path: Path) -> None:
    """Write an NVIDIA card and /dev/nvidia0 that cannot be matched to it: no remarks."""
    sysfs.card(tmp_path, "0000:3b:00.0", "0x10de", driver="nvidia")
    sysfs.put(tmp_path / "dev/nvidia0")
    assert accelerators.remarks(tmp_path) == ()


# --- the choice ----------------------------------------------------------------------------------------------


def test_auto_says_what_it_looked_for(tmp_path: Path) -> None:
    """Choose automatically: `why` lists what was not found, and with an Intel GPU what was."""
    sought = "no /dev/nvidia<N>, no /dev/accel/accel<N> served by habanalabs"
    assert accelerators.choose("auto", tmp_path).why == f"{sought}, no Intel GPU under /dev/dri"
    sysfs.render_node(tmp_path, 128, "0000:03:00.0")
    assert accelerators.choose("auto", tmp_path).why == f"{sought}, found /dev/dri/renderD128"


def test_what_auto_would_have_taken_is_told_beside_what_it_took(tmp_path: Path) -> None:
    """Write a GPU without its file beside a usable one: auto takes nvidia, unserved() names the other's address."""
    sysfs.nvidia(tmp_path, "0000:3b:00.0", 0, file=False)
    assert accelerators.choose("auto", tmp_path).name == "cpu"
    sysfs.nvidia(tmp_path, "0000:5e:00.0", 1)
    assert accelerators.choose("auto", tmp_path).why == "found /dev/nvidia1"
    (message,) = accelerators.unserved(tmp_path)
    assert "0000:3b:00.0" in message


def test_what_auto_never_takes_is_not_missed(tmp_path: Path) -> None:
    """Write graphics, an AMD card and an NPU: unserved() is empty."""
    sysfs.card(tmp_path, "0000:00:02.0", "0x8086")
    sysfs.card(tmp_path, "0000:03:00.0", "0x1002", driver="amdgpu")
    sysfs.gaudi(tmp_path, 0, "0000:00:0b.0", driver="intel_vpu", vendor="0x8086")
    assert accelerators.unserved(tmp_path) == ()


@pytest.mark.parametrize(
    ("setting", "sought"),
    [
        ("nvidia", "no /dev/nvidia<N>"),
        ("habana", "no /dev/accel/accel<N> served by habanalabs"),
        ("intel", "no Intel GPU under /dev/dri"),
    ],
)
def test_no_device_of_the_wanted_kind_names_what_was_looked_for(tmp_path: Path, setting: str, sought: str) -> None:
    """Ask for a kind with no device: HostError names the files looked for and the NVIDIA card without a driver."""
    sysfs.card(tmp_path, "0000:3b:00.0", "0x10de")
    with pytest.raises(HostError) as caught:
        observe(setting, tmp_path)
    assert f"this host has no {setting} device: {sought}" in caught.value.message
    assert "an NVIDIA card at 0000:3b:00.0 has no driver" in caught.value.message


def test_a_host_is_observed_with_its_driver_and_groups(tmp_path: Path) -> None:
    """Observe an Intel card: driver with version, and groups of its file, video and render, without root's."""
    sysfs.render_node(tmp_path, 128, "0000:03:00.0")
    node = tmp_path / "dev/dri/renderD128"
    if os.geteuid() == 0:
        os.chown(node, -1, 4242)
    sysfs.put(tmp_path / "sys/module/xe/version", "1.2.3\n")
    sysfs.put(tmp_path / "etc/group", "root:x:0:\nvideo:x:44:someone\nrender:x:109:\nbroken\n")
    _, here = observe("intel", tmp_path)
    assert here.driver == "xe 1.2.3"
    assert set(here.groups) == {node.stat().st_gid, 44, 109} - {0}


def test_paths_are_named_as_the_host_knows_them(tmp_path: Path) -> None:
    """Observe a Gaudi below a root directory: /etc/gaudinet.json and /tmp are given without that root."""
    sysfs.put(tmp_path / "etc/gaudinet.json")
    sysfs.gaudi(tmp_path, 0, "0000:19:00.0")
    _, here = observe("habana", tmp_path)
    assert (here.files, here.locks) == (("/etc/gaudinet.json",), "/tmp")  # noqa: S108


# --- fabrics, groups, addresses ------------------------------------------------------------------------------


def test_fabrics_by_their_first_port(tmp_path: Path) -> None:
    """Write two InfiniBand devices: each Fabric has layer, state, NUMA node and interface, or empty and None."""
    first, second = (tmp_path / "sys/class/infiniband" / name for name in ("mlx5_0", "mlx5_1"))
    sysfs.put(first / "ports/1/link_layer", "Ethernet\n")
    sysfs.put(first / "ports/1/state", "4: ACTIVE\n")
    sysfs.put(first / "device/numa_node", "1\n")
    (first / "device/net/ens1f0").mkdir(parents=True)
    sysfs.put(second / "ports/1/state", "1: DOWN\n")
    sysfs.put(second / "device/numa_node", "-1\n")
    assert procfs.fabrics(tmp_path) == (
        Fabric(name="mlx5_0", layer="Ethernet", state="ACTIVE", numa=1, interface="ens1f0"),
        Fabric(name="mlx5_1", layer="", state="DOWN"),
    )


def test_a_file_has_a_group_and_one_that_is_gone_has_roots(tmp_path: Path) -> None:
    """Read the group of an existing device file, and 0 for one that is not there."""
    sysfs.put(tmp_path / "dev/mine")
    mine = (tmp_path / "dev/mine").stat().st_gid
    assert [procfs.group_of(path, tmp_path) for path in ("/dev/mine", "/dev/gone")] == [mine, 0]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("Unable to determine the device handle for GPU0000:65:00.0: Unknown Error", "0000:65:00.0"),
        ("[Unknown Error]", ""),
        ("", ""),
    ],
)
def test_addresses_are_written_as_sysfs_writes_them(text: str, address: str) -> None:
    """Turn an address as nvidia-smi prints it into sysfs's form; empty where the text has none."""
    assert pci.address(text) == address
