"""Device leases: a device belongs to one lab at a time. A lease is a kernel lock on a file of the host.

The container that has the device holds the lock (``labnode.py``), not a labctl process: so no daemon is needed, and the
kernel frees the lock when the container ends, for any reason. This module reads who holds a lease, and serializes the
labs that assign devices.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from labctl.errors import HostError
from labctl.model import HERE, Device, Host, Lab
from labctl.naming import lease_path
from labctl.system import filelock

# Every user of the host may take a lock, whoever created its file.
SHARED = 0o666
GRANTING = "labctl-up.lock"


Lease = Mapping[str, str]
"""The description that the holder of a device's lock wrote of itself."""


def user_name(uid: str) -> str:
    """Return the name of a uid; ``user UID`` if it is unknown on this machine."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError, OverflowError):
        return f"user {uid}"


@contextlib.contextmanager
def granting(lab: Lab, *, wait: float, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold this host's lock for assigning devices, and create their lease files; do nothing for a lab without devices.

    Raises HostError if the lock stays held, or files cannot be created: without them, two labs would get the same
    device unnoticed.
    """
    locks = [lease_path(host.locks, device) for host, device in handed_out_here(lab)]
    if not locks:
        yield
        return
    path = Path(lab.hosts[0].locks) / GRANTING
    with filelock.held(path, f"labctl up of lab {lab.name}", wait=wait, notice=notice, mode=SHARED):
        for missing in locks:
            filelock.create(missing, SHARED)
        yield


def handed_out_here(lab: Lab) -> list[tuple[Host, Device]]:
    """Return the devices of this machine that the lab's nodes get; nodes on other hosts check the locks themselves."""
    local = [node for node in lab.nodes if node.host == HERE]
    return [(lab.host(node.host), device) for node in local for device in node.devices.devices]


def require_free(lab: Lab) -> None:
    """Raise HostError that names the holder of each device that the lab would get and another lab holds."""
    held = [(host, device, lease(host.locks, device)) for host, device in handed_out_here(lab)]
    taken = [(host, device, holder) for host, device, holder in held if is_foreign(lab, host, holder)]
    if taken:
        lines = (f"device {called(device)} is held by {in_words(holder)}" for _, device, holder in taken)
        host, _, holder = taken[0]
        raise HostError("\n".join(lines), hint=remedy(lab, host, holder))


def lease(locks: str, device: Device) -> Lease | None:
    """Return the lease of a device of this machine, by its folder of locks; None if the device is free."""
    path = lease_path(locks, device)
    return filelock.said(path) if filelock.is_held(path) else None


def holder(locks: str, device: Device) -> str:
    """Describe the holder of a device of this machine; empty if the device is free."""
    return in_words(lease(locks, device))


def in_words(held: Lease | None, named: Callable[[str], str] = user_name) -> str:
    """Describe the holder of a lease, its user by ``named(uid)``; "another lab" if incomplete, empty if None."""
    if held is None:
        return ""
    try:
        owner = named(held["uid"])
        return f"lab `{held['lab']}` of {owner} ({held['node']}, {held['directory']}, since {held['since']})"
    except KeyError:
        return "another lab"


def is_foreign(lab: Lab, host: Host, held: Lease | None) -> bool:
    """Tell if another lab holds a device; a lab whose directory was renamed is still the same."""
    if held is None:
        return False
    directory = held.get("directory", "")
    moved = held.get("uid") == str(host.uid) and not os.path.lexists(directory)
    return held.get("lab") != lab.name or not (directory == filelock.plain(str(lab.directory)) or moved)


def remedy(lab: Lab, host: Host, held: Lease | None) -> str:
    """Return a hint for a held device: end this user's other lab or ask its owner; or use free devices, if enough."""
    is_own = held and held.get("uid") == str(host.uid) and "directory" in held
    ways = [f"labctl down -C {shlex.quote(held['directory'])}" if held and is_own else "wait for it, or ask them"]
    if free := enough(lab, host):
        ways.append(f"set LAB_DEVICES={','.join(free)} in .env, which {'is' if len(free) == 1 else 'are'} free")
    return "; or ".join(ways)


def enough(lab: Lab, host: Host) -> tuple[str, ...]:
    """Return the ids of this host's devices that no other lab holds; empty if too few for all the lab's nodes."""
    free = tuple(device.id for device in host.devices if not is_foreign(lab, host, lease(host.locks, device)))
    needed = sum(len(node.devices.devices) for node in lab.nodes)
    return free if len(free) >= needed else ()


def called(device: Device) -> str:
    return f"{device.id} ({device.pci})" if device.pci else device.id
