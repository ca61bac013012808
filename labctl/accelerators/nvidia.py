"""NVIDIA GPUs, by the way of asking for them that the engine has: CDI, device reservations or the runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from labctl.model import Device, DeviceMapping, Host
from labctl.system import pci
from labctl.system.procfs import read

SOUGHT = "/dev/nvidia<N>"
CDI_KIND = "nvidia.com/gpu"
GPUS = "proc/driver/nvidia/gpus"


def find(root: Path) -> tuple[Device, ...]:
    """The GPUs by the driver's device files ``/dev/nvidia<minor>``, with what the driver tells of each.

    An id is the index that nvidia-smi, ``--gpus device=`` and NVIDIA_VISIBLE_DEVICES use: the place in PCI order among
    all GPUs of the driver, which need not be the minor number. Where the driver does not tell the minors, they stand
    for the indices. Source: NVIDIA in nvidia-docker#376 (minor numbers differ from the PCI order of nvidia-smi).
    """
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    minors = sorted((match[1] for match in names if match), key=int)
    told = [information(folder) for folder in (root / GPUS).glob("*") if pci.address(folder.name)]
    told.sort(key=lambda fields: pci.order(fields["address"]))
    if not told or not all("Device Minor" in fields for fields in told):
        return tuple(Device(id=minor, path=f"/dev/nvidia{minor}") for minor in minors)
    return tuple(
        device(root, str(index), fields) for index, fields in enumerate(told) if fields["Device Minor"] in minors
    )


def information(folder: Path) -> dict[str, str]:
    """The fields that the driver tells of a GPU, and its ``address``."""
    lines = (line.partition(":") for line in read(folder / "information").splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines if value.strip()}
    return {**fields, "address": pci.address(folder.name)}


def device(root: Path, index: str, fields: Mapping[str, str]) -> Device:
    """A GPU; the driver writes ``?`` in the uuid of one that nobody has opened yet."""
    folder = root / "sys/bus/pci/devices" / fields["address"]
    uuid = fields.get("GPU UUID", "")
    return Device(
        id=index,
        path=f"/dev/nvidia{fields['Device Minor']}",
        pci=fields["address"],
        numa=pci.numa(folder),
        cpus=pci.cpus(folder, root),
        name=fields.get("Model", ""),
        uuid="" if "?" in uuid else uuid,
    )


def driver(root: Path) -> str:
    """Version of the kernel driver, such as ``550.54.15``; empty where it is not loaded."""
    version = read(root / "sys/module/nvidia/version").strip()
    line = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", read(root / "proc/driver/nvidia/version"))
    return version or (line[1] if line else "")


def mapping(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Exactly these GPUs; InfiniBand and the right to pin memory for it only where this host has it."""
    ids = tuple(device.id for device in devices)
    by_runtime = host.request == "runtime"
    # An image may ask for all of them, and get them where the engine's default runtime is `nvidia`.
    visible = {"runtime": ",".join(ids), "cdi": "void"}.get(host.request)
    asked = {"reservation": ("nvidia", ids), "cdi": ("cdi", tuple(f"{CDI_KIND}={one}" for one in ids))}
    driver, requests = asked.get(host.request, ("", ()))
    return DeviceMapping(
        devices=devices,
        runtime="nvidia" if by_runtime else None,
        driver=driver,
        requests=requests,
        paths=host.infiniband,
        environment=(
            *((("NVIDIA_VISIBLE_DEVICES", visible),) if visible else ()),
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
            ("NCCL_SOCKET_IFNAME", host.interface),
        ),
        cap_add=(("IPC_LOCK", "root pins memory for RDMA; ranks by memlock"),) if host.infiniband else (),
    )
