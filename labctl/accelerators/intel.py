"""Intel GPUs by their render nodes under ``/dev/dri``."""

from __future__ import annotations

from pathlib import Path

from labctl.hardware import Device, DeviceMapping, Host
from labctl.model import INTERFACE

INTEL = "0x8086"


def find(root: Path) -> tuple[Device, ...]:
    """Render nodes whose PCI vendor is Intel: ``/dev/dri`` may as well be another maker's card."""
    found = []
    for path in sorted((root / "dev/dri").glob("renderD*")):
        vendor = root / "sys/class/drm" / path.name / "device/vendor"
        if vendor.is_file() and vendor.read_text().strip() == INTEL:
            found.append(Device(id=f"/dev/dri/{path.name}", path=f"/dev/dri/{path.name}"))
    return tuple(found)


def mapping(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """These render nodes by name, their by-path links, and this host's own render and video groups."""
    return DeviceMapping(
        devices=devices,
        paths=(*(device.path for device in devices), *host.infiniband),
        links=tuple((device.link, f"../{Path(device.path).name}") for device in devices if device.link),
        environment=(
            ("ZE_AFFINITY_MASK", ",".join(str(index) for index in range(len(devices)))),
            ("CCL_SOCKET_IFNAME", INTERFACE),
            ("FI_TCP_IFACE", INTERFACE),
        ),
        cap_add=(("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else (),
        group_add=host.groups,
    )
