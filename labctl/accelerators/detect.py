"""A host as the lab sees it: accelerator, devices, cores, memory, network, and the person who called."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labctl import accelerators
from labctl.model import Device, Host
from labctl.system import procfs

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Person:
    """Who calls, by the numbers of the host that is looked at; ``group_of`` is the owning group of a file there."""

    uid: int
    gid: int
    group_of: Callable[[str], int]


def caller(root: Path = ROOT) -> Person:
    """Whoever runs this process."""
    return Person(os.getuid(), os.getgid(), lambda path: procfs.group_of(path, root))


def observe(wanted: str, root: Path = ROOT, person: Person | None = None) -> tuple[str, Host]:
    """The accelerator that the setting asks for (``auto`` takes what is there) and the host whose files are below root.

    Paths are as that host knows them. Raises HostError when there is no device of the wanted kind.
    """
    person = person or caller(root)
    choice = accelerators.choose(wanted, root)
    module = accelerators.get(choice.name)
    return choice.name, Host(
        name="local",
        cpus=procfs.cpus(root),
        memory=procfs.memory(root),
        mtu=procfs.default_mtu(root),
        uid=person.uid,
        gid=person.gid,
        devices=choice.devices,
        driver=module.driver(root),
        groups=groups(choice.devices, root, person),
        numa=procfs.numa_nodes(root),
        infiniband=procfs.infiniband(root),
        files=tuple(path for path in module.present if (root / path.lstrip("/")).is_file()),
        locks=f"/{Path(procfs.lock_directory(root)).relative_to(root)}",
    )


def groups(devices: tuple[Device, ...], root: Path, person: Person | None = None) -> tuple[int, ...]:
    """The groups that may open these devices, and ``render`` and ``video`` where the host names them; never root's.

    Who opens a device is decided by the number of its group.
    """
    person = person or caller(root)
    named = procfs.groups("render", "video", root=root)
    owning = (person.group_of(device.path) for device in devices)
    return tuple(sorted({*named, *owning} - {0}))
