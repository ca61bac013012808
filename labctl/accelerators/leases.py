"""A device has one lab at a time: its lease is a kernel lock on a file of the host, held by the container that has it.

No process of labctl's holds it, so it needs no daemon; the kernel frees it when the container is gone, however it went.
The container takes it (``labnode.py``); what is here says who has it, and keeps two from being granted at once.
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

# Everyone on the host may take a lock, whoever was the first to need it.
SHARED = 0o666
GRANTING = "labctl-up.lock"


Lease = Mapping[str, str]
"""What the holder of a device's lock says of itself."""


def user_name(uid: str) -> str:
    """The name of a user's number; the number where nobody here has it."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError, OverflowError):
        return f"user {uid}"


@contextlib.contextmanager
def granting(lab: Lab, *, wait: float, notice: Callable[[str], None]) -> Iterator[None]:
    """Be the only one on this host that gives out devices; a lab without any does not wait.

    Raises HostError where another is not done in time, or the locks cannot be made: without them, two labs would get
    the same device and neither would know.
    """
    wanted = [lease_path(host.locks, device) for host, device in handed_out_here(lab)]
    if not wanted:
        yield
        return
    path = Path(lab.hosts[0].locks) / GRANTING
    with filelock.held(path, f"labctl up of lab {lab.name}", wait=wait, notice=notice, mode=SHARED):
        for missing in wanted:
            filelock.create(missing, SHARED)
        yield


def handed_out_here(lab: Lab) -> list[tuple[Host, Device]]:
    """The devices of this machine that the lab's nodes get; on other hosts the nodes themselves look at the locks."""
    return [(lab.host(node.host), device) for node in lab.nodes if node.host == HERE for device in node.devices.devices]


def require_free(lab: Lab) -> None:
    """HostError that names the holder of each device that the lab would get and another lab has."""
    held = [(host, device, lease(host.locks, device)) for host, device in handed_out_here(lab)]
    taken = [(host, device, found) for host, device, found in held if is_foreign(lab, host, found)]
    if taken:
        lines = (f"device {called(device)} is held by {in_words(found)}" for _, device, found in taken)
        host, _, found = taken[0]
        raise HostError("\n".join(lines), hint=remedy(lab, host, found))


def lease(locks: str, device: Device) -> Lease | None:
    """Of a device of this machine, whose locks lie in that folder; None where nobody holds it."""
    path = lease_path(locks, device)
    return filelock.said(path) if filelock.is_held(path) else None


def holder(locks: str, device: Device) -> str:
    """Who holds a device of this machine, in words; empty where nobody does."""
    return in_words(lease(locks, device))


def in_words(found: Lease | None, named: Callable[[str], str] = user_name) -> str:
    """Who holds it, with the name of a user's number as that host has it; empty where nobody does."""
    if found is None:
        return ""
    try:
        owner = named(found["uid"])
        return f"lab `{found['lab']}` of {owner} ({found['node']}, {found['directory']}, since {found['since']})"
    except KeyError:
        return "another lab"


def is_foreign(lab: Lab, host: Host, found: Lease | None) -> bool:
    """Whether it is another lab that holds a device; a lab whose directory was renamed is still the same."""
    if found is None:
        return False
    directory = found.get("directory", "")
    moved = found.get("uid") == str(host.uid) and not os.path.lexists(directory)
    return found.get("lab") != lab.name or not (directory == filelock.plain(str(lab.directory)) or moved)


def remedy(lab: Lab, host: Host, found: Lease | None) -> str:
    """What to type next: end the other lab where it is this person's own, or take what is free."""
    own = found and found.get("uid") == str(host.uid) and "directory" in found
    ways = [f"labctl down -C {shlex.quote(found['directory'])}" if found and own else "wait for it, or ask them"]
    if free := enough(lab, host):
        ways.append(f"set LAB_DEVICES={','.join(free)} in .env, which {'is' if len(free) == 1 else 'are'} free")
    return "; or ".join(ways)


def enough(lab: Lab, host: Host) -> tuple[str, ...]:
    """The devices of this machine that no other lab has, by id; none where they are fewer than the lab needs."""
    free = tuple(one.id for one in host.devices if not is_foreign(lab, host, lease(host.locks, one)))
    return free if len(free) >= sum(len(node.devices.devices) for node in lab.nodes) else ()


def called(device: Device) -> str:
    return f"{device.id} ({device.pci})" if device.pci else device.id
