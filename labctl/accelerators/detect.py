"""A host as the lab sees it: accelerator, devices, cores, memory, network, and the person who called."""

from __future__ import annotations

import os

from labctl import accelerators
from labctl.model import Device, Host
from labctl.system import procfs
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT


def observe(wanted: str, root: HostPath = ROOT) -> tuple[str, Host]:
    """The accelerator that the setting asks for (``auto`` takes what is there) and the host whose files are below root.

    Paths are as that host knows them. Raises HostError when there is no device of the wanted kind.
    """
    choice = accelerators.choose(wanted, root)
    module = accelerators.get(choice.name)
    return choice.name, Host(
        name="local",
        cpus=procfs.cpus(root),
        memory=procfs.memory(root),
        mtu=procfs.default_mtu(root),
        uid=os.getuid(),
        gid=os.getgid(),
        bf16=procfs.has_bf16(root),
        devices=choice.devices,
        driver=module.driver(root),
        groups=groups(choice.devices, root),
        numa=procfs.numa_nodes(root),
        infiniband=procfs.infiniband(root),
        files=tuple(path for path in module.present if (root / path.lstrip("/")).is_file()),
        locks=f"/{procfs.lock_directory(root).removeprefix(str(root)).lstrip('/')}",
    )


def groups(devices: tuple[Device, ...], root: HostPath) -> tuple[int, ...]:
    """The groups that may open these devices, and ``render`` and ``video`` where the host names them; never root's.

    Who opens a device is decided by the number of its group.
    """
    named = procfs.groups("render", "video", root=root)
    owning = (procfs.group_of(device.path, root) for device in devices)
    return tuple(sorted({*named, *owning} - {0}))
