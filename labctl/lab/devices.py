"""What the hosts of a lab have for it, and what its settings come to on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from labctl import accelerators, errors
from labctl.accelerators import leases
from labctl.accelerators.detect import ROOT, Person, groups, observe
from labctl.accelerators.vendor_tools import Run, describe, run_here
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import HostError, LabError
from labctl.hosts import facts
from labctl.lab import cluster, device_requests, spec
from labctl.lab.cluster import Cluster
from labctl.model import HERE, Node
from labctl.system import files, procfs


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
    locks = procfs.lock_directory(root)
    owners = {device.path: node.name for node in nodes for device in node.devices.devices}
    every = tuple(device for devices in everything.values() for device in devices)
    return {
        "name": name,
        "accelerator": accelerator,
        "why": why,
        "cpus": procfs.cpus(root),
        "numa": procfs.numa_nodes(root),
        "memory": procfs.memory(root),
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
        "infiniband": procfs.infiniband(root),
        "fabrics": [asdict(fabric) for fabric in procfs.fabrics(root)],
        "nodes": [
            {
                "name": node.name,
                "slots": node.slots,
                "cpus": node.cpuset or procfs.cpus(root),
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
        return spec.nodes(found, accelerator, here), ""
    except LabError as error:
        return (), error.message


Rows = tuple[tuple[str, str, str], ...]


def devices(context: Context) -> list[dict[str, Any]]:
    """Each host in the form that scripts rely on; those that do not answer are left out, with a warning."""
    found = context.settings()
    if not found.text("LAB_HOSTS"):
        return [of_host(found, context.directory)]
    with cluster.opened(context, found, demand=False) as where:
        if not where.connections:
            errors.raise_all(where.failed)
        for error in where.failed.values():
            context.warn(error.message)
        return each(where)


def each(where: Cluster) -> list[dict[str, Any]]:
    """Those that ssh reaches, in the order of the list."""
    nodes, troubles = nodes_by_host(where)
    with files.scratch() as scratch:
        return [
            described(
                where.settings,
                tuple(node for node in nodes if node.host == name),
                troubles.get(name, ""),
                name=name,
                root=facts.lay_out(where.told[name], scratch / str(number)),
                person=facts.person_of(where.told[name]),
                run=tool_on(where, name),
            )
            for number, name in enumerate(where.connections)
        ]


def nodes_by_host(where: Cluster) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The lab's nodes, and on which hosts there can be none and why."""
    try:
        lab, able = cluster.foresee_lab(where)
    except LabError as error:
        return (), dict.fromkeys(where.connections, error.message)
    troubles = {name: error.message for name, error in able.failed.items() if name not in where.failed}
    return tuple(node for node in lab.nodes if node.host not in troubles), troubles


def tool_on(where: Cluster, name: str) -> Run:
    """Runs a maker's tool on a host."""
    connection = where.connections[name]
    return lambda argv, seconds: connection.run('exec "$@"', *argv, timeout=seconds, check=False)


def decided(context: Context) -> Rows:
    """What the settings leave to be found out, and the reason."""
    found = context.settings()
    if found.text("LAB_HOSTS"):
        return (("accelerator", *on_hosts(context, found)),)
    accelerator, why = choice(found)
    if accelerator is None:
        return (("accelerator", "none", why),)
    chosen, here = observe(accelerator)
    engine = cluster.backend_here(cluster.ANSWERING).capabilities(HERE)
    request = device_requests.described(found, chosen, here, context.directory, engine)
    return ("accelerator", accelerator, why), ("device request", *request)


def on_hosts(context: Context, found: Settings) -> tuple[str, str]:
    """The accelerator of the hosts that are listed, as far as they answer or did when they were last reached."""
    wanted = found.text("LAB_ACCELERATOR")
    with cluster.opened(context, found, demand=False) as where:
        silent = [one.message for one in where.failed.values()]
        try:
            able = where.equipped()
            names = [host.name for host in where.hosts if host.name not in able.failed or host.name in where.failed]
            lacking = [one.message for name, one in able.failed.items() if name not in where.failed]
            chosen: str = where.accelerator
        except HostError as error:
            if error not in where.failed.values():
                return "none", "; ".join((errors.about(error.node or "", error), *silent))
            names, lacking, chosen = [], [], "unknown" if wanted == "auto" else wanted
        heard = ", ".join(name for name in names if name in where.connections)
        before = ", ".join(name for name in names if name not in where.connections)
        parts = (
            f"on {heard}" if heard else "",
            f"on {before} when last reached" if before else "",
            *lacking,
            *silent,
            "`labctl doctor` says what to type" if silent else "",
        )
        return chosen, f"{wanted}: {'; '.join(filter(None, parts))}"
