"""NVIDIA GPUs, by the way of asking for them that the engine has: CDI, device reservations or the runtime."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.hardware import Device, DeviceMapping, Host
from labctl.model import INTERFACE

CDI_KIND = "nvidia.com/gpu"


def find(root: Path) -> tuple[Device, ...]:
    """The GPUs by the driver's device files ``/dev/nvidia<N>``."""
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    found = sorted((match[1] for match in names if match), key=int)
    return tuple(Device(id=index, path=f"/dev/nvidia{index}") for index in found)


def mapping(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Exactly these GPUs; InfiniBand and the right to pin memory for it only where this host has it."""
    ids = tuple(device.id for device in devices)
    by_runtime = host.request == "runtime"
    asked = {"reservation": ("nvidia", ids), "cdi": ("cdi", tuple(f"{CDI_KIND}={one}" for one in ids))}
    driver, requests = asked.get(host.request, ("", ()))
    return DeviceMapping(
        devices=devices,
        runtime="nvidia" if by_runtime else None,
        driver=driver,
        requests=requests,
        paths=host.infiniband,
        environment=(
            *((("NVIDIA_VISIBLE_DEVICES", ",".join(ids)),) if by_runtime else ()),
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
            ("NCCL_SOCKET_IFNAME", INTERFACE),
        ),
        cap_add=(("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else (),
    )
