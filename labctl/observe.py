"""This host as the lab sees it: accelerator, devices, cores, memory, network, and the person who called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from labctl import accelerators, host
from labctl.errors import HostError
from labctl.hardware import Host
from labctl.model import Accelerator

ROOT = Path("/")


def observe(wanted: str, root: Path = ROOT) -> tuple[Accelerator, Host]:
    """The accelerator that the setting asks for (``auto`` takes what is there) and this host.

    Raises HostError when there is no device of the wanted kind.
    """
    if wanted == "auto":
        name, devices = accelerators.detect(root)
    else:
        name, devices = wanted, accelerators.get(wanted).find(root)
        if not devices and name != "cpu":
            raise HostError(
                f"this host has no {name} device: none found by the device files under {root / 'dev'}",
                hint="set LAB_ACCELERATOR=auto or LAB_ACCELERATOR=cpu in .env",
            )
    gaudinet = root / "etc/gaudinet.json"
    return cast(Accelerator, name), Host(
        name="local",
        cpus=host.cpus(),
        memory=host.memory(),
        mtu=host.default_mtu(),
        uid=os.getuid(),
        gid=os.getgid(),
        devices=devices,
        groups=host.groups("render", "video"),
        numa=host.numa_nodes(root),
        infiniband=host.infiniband(root),
        gaudinet=str(gaudinet) if gaudinet.is_file() else None,
    )
