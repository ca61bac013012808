"""Intel GPUs by their render nodes in ``/dev/dri``."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.accelerators import AcceleratorModule, PciVendor, Tool, Watch
from labctl.accelerators.intel.health import INTEGRATED, MEMORY, SUBJECT, VENDOR
from labctl.model import Device, DeviceMapping, Host
from labctl.system import pci
from labctl.system.hostpath import HostPath
from labctl.system.procfs import numa, read


def find(root: HostPath) -> tuple[Device, ...]:
    """Return the render nodes of Intel GPUs in the order of their numbers; others in ``/dev/dri`` are skipped."""
    names = (re.fullmatch(r"renderD(\d+)", path.name) for path in (root / "dev/dri").glob("renderD*"))
    nodes = sorted((match for match in names if match), key=lambda match: int(match[1]))
    folders = ((match[0], root / "sys/class/drm" / match[0] / "device") for match in nodes)
    # Names in by-path are stable across reboots.
    by_path = (path for path in sorted((root / "dev/dri/by-path").glob("*-render")) if path.is_symlink())
    links = {link.resolve().name: link.name for link in by_path}
    return tuple(
        device(root, name, folder, links.get(name, ""))
        for name, folder in folders
        if read(folder / "vendor").strip() == VENDOR
    )


def device(root: HostPath, name: str, folder: HostPath, link: str) -> Device:
    """Build a GPU from its folder in sysfs; its memory, of all tiles, is None if the driver does not report it."""
    address = pci.address_of(folder)
    texts = (read(path).strip() for pattern in MEMORY for path in folder.glob(pattern))
    memory = sum(map(int, filter(str.isdecimal, texts))) or None
    return Device(
        id=f"/dev/dri/{name}",
        path=f"/dev/dri/{name}",
        pci=address,
        numa=numa(folder),
        cpus=pci.cpus(folder, root),
        link=link,
        # A discrete card may have that address in a virtual machine.
        integrated=address == INTEGRATED and memory is None,
        memory=memory,
    )


def driver(root: HostPath) -> str:
    """Return ``i915`` or ``xe`` with its version, or the kernel's if built in; empty without an Intel GPU."""
    folders = (root / "sys/class/drm" / Path(gpu.path).name / "device" for gpu in find(root))
    names = set(map(pci.driver, folders)) - {""}
    kernel = read(root / "proc/sys/kernel/osrelease").strip()
    versions = ((name, read(root / f"sys/module/{name}/version").strip() or kernel) for name in sorted(names))
    return ", ".join(f"{name} {version}".strip() for name, version in versions)


def container(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Return the device mapping for these GPUs: render nodes, by-path links, environment, the host's device groups."""
    links = tuple((device.link, f"../{Path(device.path).name}") for device in devices if device.link)
    return DeviceMapping(
        paths=tuple(device.path for device in devices),
        links=links,
        environment=(
            ("ZE_AFFINITY_MASK", ",".join(map(str, range(len(devices))))),
            ("CCL_SOCKET_IFNAME", host.interface),
            ("FI_TCP_IFACE", host.interface),
        ),
        group_add=host.groups,
    )


MODULE = AcceleratorModule(
    sought="Intel GPU under /dev/dri",
    aliases=("xpu",),
    chosen_by=("ZE_AFFINITY_MASK",),
    kernel="i915|xe 0000",
    out_of_memory="ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",
    faulted="ERROR_DEVICE_LOST",
    order=30,
    # The driver's name, i915 or xe: Intel's device plugins.
    resources=("gpu.intel.com/i915", "gpu.intel.com/xe"),
    find=find,
    container=container,
    driver=driver,
    pci=PciVendor(VENDOR, "an Intel GPU", ("i915", "xe"), other="an Intel NPU", integrated=INTEGRATED),
    # Source: XPU-SMI's user guide, "Discover the GPU devices": --dump takes the numbers of the properties, and begins
    # with a line of their names. It needs a service of its own, so nodes do not watch by it.
    tool=Tool(("xpu-smi", "discovery", "--dump", "1,11,2,16,4"), lists_all=False),
    watch=Watch(files=("dri/renderD*",)),
    attributes=MEMORY,
    texts=("sys/module/i915/version", "sys/module/xe/version"),
    # Source: XPU-SMI's user guide, "Health": temperature, power, memory and frequency of each device.
    health="xpu-smi health -l",
    subject=SUBJECT,
    count=("torch.xpu", "XPU"),
    torch_index="https://download.pytorch.org/whl/xpu",
    images=(("horovod", "intel-tensorflow"),),
    # Source: horovod_gloo_built() of intel-optimization-for-horovod 0.28.1.6 is false.
    launchers=(("horovod", "horovod:mpi"),),
)
