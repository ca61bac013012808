"""NVIDIA GPUs through compose's device reservations (driver ``nvidia``, exclusive ids)."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.model import INTERFACE, DeviceMapping, Host


def find(root: Path) -> tuple[str, ...]:
    """Indices of the GPUs by the driver's device files ``/dev/nvidia<N>``."""
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    return tuple(sorted((match[1] for match in names if match), key=int))


def mapping(host: Host, devices: tuple[str, ...]) -> DeviceMapping:
    """Exactly these GPUs; InfiniBand and the right to pin memory for it only where this host has it."""
    return DeviceMapping(
        ids=devices,
        gpu_ids=devices,
        devices=("/dev/infiniband",) if host.infiniband else (),
        environment=(("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"), ("NCCL_SOCKET_IFNAME", INTERFACE)),
        cap_add=(("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else (),
    )
