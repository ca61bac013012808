"""Intel GPUs by their render nodes under ``/dev/dri``."""

from __future__ import annotations

from pathlib import Path

from labctl.model import INTERFACE, DeviceMapping, Host, Mount

INTEL = "0x8086"


def find(root: Path) -> tuple[str, ...]:
    """Render nodes whose PCI vendor is Intel: ``/dev/dri`` may as well be another maker's card."""
    found = []
    for path in sorted((root / "dev/dri").glob("renderD*")):
        vendor = root / "sys/class/drm" / path.name / "device/vendor"
        if vendor.is_file() and vendor.read_text().strip() == INTEL:
            found.append(f"/dev/dri/{path.name}")
    return tuple(found)


def mapping(host: Host, devices: tuple[str, ...]) -> DeviceMapping:
    """These render nodes by name, their by-path links, and this host's own render and video groups."""
    return DeviceMapping(
        ids=devices,
        devices=(*devices, *(("/dev/infiniband",) if host.infiniband else ())),
        environment=(
            ("ZE_AFFINITY_MASK", ",".join(str(index) for index in range(len(devices)))),
            ("CCL_SOCKET_IFNAME", INTERFACE),
            ("FI_TCP_IFACE", INTERFACE),
        ),
        cap_add=(("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else (),
        group_add=host.groups,
        mounts=(Mount(source="/dev/dri/by-path", target="/dev/dri/by-path", read_only=True),) if host.by_path else (),
    )
