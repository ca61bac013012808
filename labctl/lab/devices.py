"""What the hosts of a lab have for it, and what its settings come to on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from labctl import accelerators, errors
from labctl.accelerators import leases
from labctl.accelerators.detect import groups, observe
from labctl.accelerators.vendor_tools import Run, describe, run_here
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.engines.docker import DockerEngine
from labctl.errors import HostError, LabError
from labctl.hosts.ssh import Connection
from labctl.lab import device_requests, spec
from labctl.lab.cluster import Cluster, connect, preview_lab
from labctl.model import HERE, Node
from labctl.system import procfs
from labctl.system.hostpath import HostPath
from labctl.system.process import CompletedProcess
from labctl.system.procfs import ROOT


def of_host(found: Settings, directory: Path, root: HostPath = ROOT) -> dict[str, Any]:
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
    root: HostPath = ROOT,
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
        "groups": groups(every, root),
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


def choice(found: Settings, root: HostPath = ROOT) -> tuple[str | None, str]:
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


def nodes_of(found: Settings, directory: Path, root: HostPath) -> tuple[tuple[Node, ...], str]:
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
    with connect(context, found, demand=False) as cluster:
        if not cluster.connections:
            errors.raise_all(cluster.failed)
        for error in cluster.failed.values():
            context.warn(error.message)
        return each(cluster)


def each(cluster: Cluster) -> list[dict[str, Any]]:
    """Those that ssh reaches, in the order of the list."""
    nodes, troubles = nodes_by_host(cluster)
    return [
        described(
            cluster.settings,
            tuple(node for node in nodes if node.host == name),
            troubles.get(name, ""),
            name=name,
            root=cluster.root(name),
            run=partial(run_on, connection),
        )
        for name, connection in cluster.connections.items()
    ]


def nodes_by_host(cluster: Cluster) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The lab's nodes, and on which hosts there can be none and why."""
    try:
        lab, able = preview_lab(cluster)
    except LabError as error:
        return (), dict.fromkeys(cluster.connections, error.message)
    troubles = {name: error.message for name, error in able.failed.items() if name not in cluster.failed}
    return tuple(node for node in lab.nodes if node.host not in troubles), troubles


def run_on(connection: Connection, argv: Sequence[str], seconds: float) -> CompletedProcess:
    """Run a vendor's tool on a host, whatever its exit code."""
    return connection.run('exec "$@"', *argv, timeout=seconds, check=False)


def decided(context: Context) -> Rows:
    """What the settings leave to be found out, and the reason."""
    found = context.settings()
    if found.text("LAB_HOSTS"):
        return (("accelerator", *on_hosts(context, found)),)
    accelerator, why = choice(found)
    if accelerator is None:
        return (("accelerator", "none", why),)
    chosen, here = observe(accelerator)
    request = device_requests.described(found, chosen, here, context.directory, DockerEngine())
    return ("accelerator", accelerator, why), ("device request", *request)


def on_hosts(context: Context, found: Settings) -> tuple[str, str]:
    """The accelerator of the hosts that are listed, as far as they answer or did when they were last reached."""
    wanted = found.text("LAB_ACCELERATOR")
    with connect(context, found, demand=False) as cluster:
        silent = [one.message for one in cluster.failed.values()]
        try:
            able = cluster.with_usable_hosts()
            names = [host.name for host in cluster.hosts if host.name not in able.failed or host.name in cluster.failed]
            lacking = [one.message for name, one in able.failed.items() if name not in cluster.failed]
            chosen: str = cluster.accelerator
        except HostError as error:
            if error not in cluster.failed.values():
                return "none", "; ".join((errors.about(error.node or "", error), *silent))
            names, lacking, chosen = [], [], "unknown" if wanted == "auto" else wanted
        heard = ", ".join(name for name in names if name in cluster.connections)
        before = ", ".join(name for name in names if name not in cluster.connections)
        parts = (
            f"on {heard}" if heard else "",
            f"on {before} when last reached" if before else "",
            *lacking,
            *silent,
            "`labctl doctor` says what to type" if silent else "",
        )
        return chosen, f"{wanted}: {'; '.join(filter(None, parts))}"
