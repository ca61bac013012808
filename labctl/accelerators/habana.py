"""Intel Gaudi through the habana container runtime."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.model import Device, DeviceMapping, Host, Mount
from labctl.system import pci
from labctl.system.procfs import read

SOUGHT = "/dev/accel/accel<N> served by habanalabs"


def find(root: Path) -> tuple[Device, ...]:
    """The ``/dev/accel/accel<N>`` that the habanalabs driver serves: an NPU uses the same folder.

    Source: Documentation/ABI/testing/sysfs-driver-habanalabs of the kernel (device_type, status); ``module_id`` is read
    where Intel's own Gaudi resource drivers read it.
    """
    names = (re.fullmatch(r"accel(\d+)", path.name) for path in (root / "dev/accel").glob("accel*"))
    indices = sorted((match[1] for match in names if match), key=int)
    folders = ((index, root / f"sys/class/accel/accel{index}/device") for index in indices)
    return tuple(device(root, index, folder) for index, folder in folders if pci.driver(folder) == "habanalabs")


def device(root: Path, index: str, folder: Path) -> Device:
    """A Gaudi by its folder in sysfs. Its status is ``operational`` while it can be used."""
    status = read(folder / "status").strip()
    return Device(
        id=index,
        path=f"/dev/accel/accel{index}",
        pci=pci.address_of(folder),
        module=read(folder / "module_id").strip(),
        numa=pci.numa(folder),
        cpus=pci.cpus(folder, root),
        name=read(folder / "device_type").strip(),
        health="" if status.lower() in ("", "operational") else f"its driver says: {status}",
    )


def driver(root: Path) -> str:
    """Version of the kernel driver, such as ``1.18.0-ee698fb``; empty where it is not loaded."""
    return read(root / "sys/module/habanalabs/version").strip()


def mapping(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """These Gaudis by index and module id, what Intel's run line asks for, and the network description if there is one.

    Source: docs.habana.ai, "Multiple Dockers Each with a Single Workload" (modules) and "Docker Installation".
    """
    modules = tuple(device.module for device in devices)
    return DeviceMapping(
        devices=devices,
        runtime="habana",
        paths=host.infiniband,
        environment=(
            ("HABANA_VISIBLE_DEVICES", ",".join(device.id for device in devices)),
            *((("HABANA_VISIBLE_MODULES", ",".join(modules)),) if all(modules) else ()),
            ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
            ("HCCL_SOCKET_IFNAME", host.interface),
        ),
        cap_add=(
            ("SYS_NICE", "Intel's run line asks for it; ranks have no capability"),
            *((("IPC_LOCK", "root pins memory for RDMA; ranks by memlock"),) if host.infiniband else ()),
        ),
        mounts=(
            (Mount(source=host.gaudinet, target="/etc/habanalabs/gaudinet.json", read_only=True),)
            if host.gaudinet
            else ()
        ),
    )
