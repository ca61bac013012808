"""Intel Gaudi through the habana container runtime."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.hardware import Device, DeviceMapping, Host, Mount
from labctl.model import INTERFACE


def find(root: Path) -> tuple[Device, ...]:
    """The ``/dev/accel/accel<N>`` that the habanalabs driver serves: an NPU uses the same folder."""
    found = []
    for path in (root / "dev/accel").glob("accel*"):
        match = re.fullmatch(r"accel(\d+)", path.name)
        driver = root / "sys/class/accel" / path.name / "device/driver"
        if match and driver.resolve().name == "habanalabs":
            found.append(Device(id=match[1], path=f"/dev/accel/{path.name}"))
    return tuple(sorted(found, key=lambda device: int(device.id)))


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
            ("HCCL_SOCKET_IFNAME", INTERFACE),
        ),
        cap_add=(
            ("SYS_NICE", "Habana's runtime sets thread priorities and memory policy"),
            *((("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else ()),
        ),
        mounts=(
            (Mount(source=host.gaudinet, target="/etc/habanalabs/gaudinet.json", read_only=True),)
            if host.gaudinet
            else ()
        ),
    )
