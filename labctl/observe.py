"""This host as the lab sees it: accelerator, devices, cores, memory, network, and the person who called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from labctl import accelerators, host
from labctl.hardware import HERE, Device, Host
from labctl.model import Accelerator

ROOT = Path("/")


def observe(wanted: str, root: Path = ROOT) -> tuple[Accelerator, Host]:
    """The accelerator that the setting asks for (``auto`` takes what is there) and this host.

    Raises HostError when there is no device of the wanted kind.
    """
    choice = accelerators.choose(wanted, root)
    gaudinet = root / "etc/gaudinet.json"
    return cast(Accelerator, choice.name), Host(
        name=HERE,
        cpus=host.cpus(),
        memory=host.memory(),
        mtu=host.default_mtu(),
        uid=os.getuid(),
        gid=os.getgid(),
        devices=choice.devices,
        driver=accelerators.get(choice.name).driver(root),
        groups=groups(choice.devices, root),
        numa=host.numa_nodes(root),
        infiniband=host.infiniband(root),
        fabrics=host.fabrics(root),
        gaudinet=str(gaudinet) if gaudinet.is_file() else None,
        locks=host.lock_directory(root),
    )


def groups(devices: tuple[Device, ...], root: Path) -> tuple[int, ...]:
    """The groups that may open these devices, and ``render`` and ``video`` where this host names them; never root's."""
    named = host.groups("render", "video")
    owning = host.owning_groups((device.path for device in devices), root)
    return tuple(sorted({*named, *owning} - {0}))
