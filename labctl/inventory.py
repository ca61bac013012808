"""What a host has for a lab, of every accelerator: as the kernel shows it, and the makers' tools' words.

No engine is asked.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from labctl import accelerators, host, lab, leases
from labctl.errors import HostError, LabError
from labctl.hardware import HERE
from labctl.model import Node
from labctl.observe import ROOT, Person, groups, observe
from labctl.settings import Settings
from labctl.vendor_tools import Run, describe, run_here


def of_host(found: Settings, directory: Path, root: Path = ROOT) -> dict[str, Any]:
    """This host in the form that scripts rely on, with the nodes of the lab in this directory, if one is there.

    ``accelerator`` is null where none of the wanted kind is here. Memory in bytes.
    """
    accelerator, _ = choice(found, root)
    nodes, trouble = nodes_of(found, directory, root) if accelerator else ((), "")
    return described(found, nodes, trouble, root=root)


def described(
    found: Settings,
    nodes: tuple[Node, ...],
    trouble: str,
    *,
    name: str = HERE,
    root: Path = ROOT,
    person: Person | None = None,
    run: Run = run_here,
) -> dict[str, Any]:
    """A host whose files are below ``root``, and the lab's ``nodes`` on it; ``trouble`` is why there are none.

    ``run`` runs the makers' tools there. Who holds a device is told of this machine's alone.
    """
    accelerator, why = choice(found, root)
    everything = accelerators.find_all(root)
    locks = host.lock_directory(root)
    owners = {device.path: node.name for node in nodes for device in node.devices.devices}
    every = tuple(device for devices in everything.values() for device in devices)
    return {
        "name": name,
        "accelerator": accelerator,
        "why": why,
        "cpus": host.cpus(root),
        "numa": host.numa_nodes(root),
        "memory": host.memory(root),
        "devices": [
            {
                "accelerator": kind,
                **asdict(device),
                "node": owners.get(device.path),
                "holder": leases.holder(locks, device) if name == HERE else "",
            }
            for kind, devices in everything.items()
            for device in describe(kind, devices, run)
        ],
        "drivers": {kind: accelerators.get(kind).driver(root) for kind in everything},
        "groups": groups(every, root, person),
        "infiniband": host.infiniband(root),
        "fabrics": [asdict(fabric) for fabric in host.fabrics(root)],
        "nodes": [
            {
                "name": node.name,
                "slots": node.slots,
                "cpus": node.cpuset or host.cpus(root),
                "devices": [device.id for device in node.devices.devices],
            }
            for node in nodes
        ],
        "notes": [*accelerators.remarks(root), *filter(None, [trouble])],
    }


def choice(found: Settings, root: Path = ROOT) -> tuple[str | None, str]:
    """The accelerator that a lab with these settings gets here, and why; None where there is none of that kind."""
    wanted = found.text("LAB_ACCELERATOR")
    try:
        chosen = accelerators.choose(wanted, root)
    except HostError as error:
        return None, error.message
    if wanted != "auto":
        return chosen.name, chosen.why
    missed = accelerators.unserved(root) if chosen.name == "cpu" else ()
    return chosen.name, f"auto: {'; '.join((chosen.why, *missed))}"


def nodes_of(found: Settings, directory: Path, root: Path) -> tuple[tuple[Node, ...], str]:
    """The nodes of the lab in this directory, or why there can be none; nothing of either where no lab is here."""
    if not (directory / ".env").is_file():
        return (), ""
    accelerator, here = observe(found.text("LAB_ACCELERATOR"), root)
    try:
        return lab.nodes(found, accelerator, here), ""
    except LabError as error:
        return (), error.message
