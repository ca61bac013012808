"""Intel Gaudi through the habana container runtime."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.model import INTERFACE, DeviceMapping, Host, Mount


def find(root: Path) -> tuple[str, ...]:
    """Indices of ``/dev/accel/accel<N>`` that the habanalabs driver serves: an NPU uses the same folder."""
    found = []
    for path in (root / "dev/accel").glob("accel*"):
        match = re.fullmatch(r"accel(\d+)", path.name)
        driver = root / "sys/class/accel" / path.name / "device/driver"
        if match and driver.resolve().name == "habanalabs":
            found.append(match[1])
    return tuple(sorted(found, key=int))


def mapping(host: Host, devices: tuple[str, ...]) -> DeviceMapping:
    """These Gaudis by index, what Intel's run line asks for, and the network description where the host has it."""
    gaudinet = (
        Mount(source=host.gaudinet, target="/etc/habanalabs/gaudinet.json", read_only=True) if host.gaudinet else None
    )
    return DeviceMapping(
        ids=devices,
        runtime="habana",
        devices=("/dev/infiniband",) if host.infiniband else (),
        environment=(
            ("HABANA_VISIBLE_DEVICES", ",".join(devices)),
            ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
            ("HCCL_SOCKET_IFNAME", INTERFACE),
        ),
        cap_add=(
            ("SYS_NICE", "Habana's runtime sets thread priorities and memory policy"),
            *((("IPC_LOCK", "RDMA pins memory"),) if host.infiniband else ()),
        ),
        mounts=(gaudinet,) if gaudinet else (),
    )
