"""Leases of devices: whether another lab has one that this lab would get, on this machine and on hosts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from labctl.accelerators import leases
from labctl.accelerators.leases import Lease
from labctl.doctor.finding import Examination, Finding, error


def leased(examination: Examination) -> Iterator[Finding]:
    """Whether another lab has a device that this one would get."""
    here = examination.here
    wanted = {device: node.name for node in examination.nodes for device in node.devices.devices}
    for device, found in examination.place.leases(here.locks, tuple(wanted)).items():
        if leases.is_foreign(examination.lab, here, found):
            yield error(
                "LAB-DEVICE-005",
                f"{leases.called(device)} is held by {leases.in_words(found, partial(person, examination))}",
                why="a device has one lab at a time: two would crash, or slow each other down; `down` ends its run",
                fix=release(examination, found),
                node=wanted[device],
            )


def person(examination: Examination, uid: str) -> str:
    """The name of a user's number on the host that is looked at."""
    if examination.local:
        return leases.user_name(uid)
    people = (line.split(":") for line in examination.read("etc/passwd").splitlines())
    return next((fields[0] for fields in people if fields[2:3] == [uid]), f"user {uid}")


def release(examination: Examination, found: Lease) -> str:
    """The command that gets a device to this lab: end the lab that has it, if it is one's own, or take others."""
    own = found.get("uid") == str(examination.here.uid) and "directory" in found
    if own and (examination.local or Path(found["directory"]).is_dir()):
        return f"labctl down -C {shlex.quote(found['directory'])}"
    if not examination.local:
        # What LAB_DEVICES says is said of every host, and only this one was asked.
        label = shlex.quote(f"label=labctl.lab={found.get('lab', '')}")
        return examination.place.there(f"docker ps --filter {label}  # and ask its holder")
    free = leases.enough(examination.lab, examination.here)
    return examination.put("LAB_DEVICES", ",".join(free)) if free else "labctl devices  # and ask its holder"
