"""Devices of the lab's hosts, and what its settings resolve to on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from labctl import accelerators, errors
from labctl.accelerators import groups, leases, observe
from labctl.accelerators.vendor_tools import Run, describe, run_here
from labctl.backends import spec
from labctl.backends.devices import DetectedDevice, DeviceReport, HostDevices, NodeShare
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.lab import device_requests
from labctl.backends.docker.lab.cluster import ANSWERING, Cluster, backend_here, connect, preview_lab
from labctl.config import override
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import HostError, LabError
from labctl.model import HERE, Node
from labctl.system import procfs
from labctl.system.hostpath import HostPath
from labctl.system.process import CompletedProcess
from labctl.system.procfs import ROOT


class EffectiveSetting(Struct, frozen=True):
    """A setting as it may be shown, and where it was set."""

    key: str
    value: str
    origin: str


class ResolvedSetting(Struct, frozen=True):
    """What follows from the settings on the lab's hosts, and why."""

    key: str
    value: str
    reason: str


class EffectiveSettings(Struct, frozen=True):
    """Every setting, and what they resolve to."""

    settings: tuple[EffectiveSetting, ...]
    resolved: tuple[ResolvedSetting, ...]


def of_host(settings: Settings, directory: Path, root: HostPath = ROOT) -> HostDevices:
    """The devices of this host, and the nodes of the lab in this directory if it is one."""
    accelerator, _ = spec.choice(settings, root)
    nodes: tuple[Node, ...] = ()
    problem = ""
    if accelerator and (directory / ".env").is_file():
        try:
            nodes = spec.nodes(settings, *observe(accelerator, root))
        except LabError as error:
            problem = error.message
    return detect(settings, nodes, problem, root=root)


def detect(
    settings: Settings,
    nodes: tuple[Node, ...],
    problem: str,
    *,
    name: str = HERE,
    root: HostPath = ROOT,
    run: Run = run_here,
) -> HostDevices:
    """The devices of a host whose files are below ``root``, and the lab's nodes on it or the ``problem`` with them.

    ``run`` runs vendor tools there. Leases are read on this machine only.
    """
    accelerator, reason = spec.choice(settings, root)
    found = accelerators.find_all(root)
    locks = procfs.lock_directory(root)
    owners = {device.path: node.name for node in nodes for device in node.devices.devices}
    return HostDevices(
        name=name,
        accelerator=accelerator,
        reason=reason,
        cpus=procfs.cpus(root),
        numa=procfs.numa_nodes(root),
        memory=procfs.memory(root),
        devices=tuple(
            DetectedDevice(
                **asdict(device),
                kind=kind,
                node=owners.get(device.path),
                leased_by=leases.holder(locks, device) if name == HERE else "",
            )
            for kind, devices in found.items()
            for device in describe(kind, devices, run)
        ),
        drivers={kind: accelerators.get(kind).driver(root) for kind in found},
        groups=groups(tuple(device for devices in found.values() for device in devices), root),
        infiniband=procfs.infiniband(root),
        fabrics=procfs.fabrics(root),
        nodes=tuple(
            NodeShare(
                name=node.name,
                slots=node.slots,
                cpus=node.cpuset or procfs.cpus(root),
                devices=tuple(device.id for device in node.devices.devices),
            )
            for node in nodes
        ),
        warnings=(*accelerators.remarks(root), *filter(None, [problem])),
    )


def devices(context: Context) -> DeviceReport:
    """The devices of each host; hosts that do not answer are left out, with a warning."""
    settings = context.settings()
    if not settings.text("LAB_HOSTS"):
        return DeviceReport((of_host(settings, context.directory),))
    with connect(context, settings, demand=False) as cluster:
        if not cluster.connections:
            errors.raise_all(cluster.failed)
        for error in cluster.failed.values():
            context.warn(error.message)
        return DeviceReport(of_cluster(cluster))


def of_cluster(cluster: Cluster) -> tuple[HostDevices, ...]:
    """The devices of each host that ssh reaches, in the order of the inventory."""
    nodes: tuple[Node, ...] = ()
    try:
        lab, able = preview_lab(cluster)
    except LabError as error:
        problems = dict.fromkeys(cluster.connections, error.message)
    else:
        problems = {name: error.message for name, error in able.failed.items() if name not in cluster.failed}
        nodes = tuple(node for node in lab.nodes if node.host not in problems)
    return tuple(
        detect(
            cluster.settings,
            tuple(node for node in nodes if node.host == name),
            problems.get(name, ""),
            name=name,
            root=cluster.root(name),
            run=partial(run_on, connection),
        )
        for name, connection in cluster.connections.items()
    )


def run_on(connection: Connection, argv: Sequence[str], seconds: float) -> CompletedProcess:
    """Run a vendor's tool on a host, whatever its exit code."""
    return connection.run('exec "$@"', *argv, timeout=seconds, check=False)


def effective_settings(context: Context) -> EffectiveSettings:
    """Every setting with its origin, and what is left to detection as it is resolved now."""
    settings = context.settings()
    rows = tuple(EffectiveSetting(*row) for row in settings.rows())
    return EffectiveSettings(rows, tuple(resolve(context, settings)))


def resolve(context: Context, settings: Settings) -> Iterator[ResolvedSetting]:
    """What is left to detection, and what a person adds to the compose files."""
    if added := override.services(context.directory):
        yield ResolvedSetting("override", ", ".join(added), override.FILE)
    if settings.text("LAB_HOSTS"):
        yield ResolvedSetting("accelerator", *on_hosts(context, settings))
        return
    accelerator, reason = spec.choice(settings)
    yield ResolvedSetting("accelerator", accelerator or "none", reason)
    if accelerator is None:
        return
    _, host = observe(accelerator)
    access = accelerators.get(accelerator).engine
    request, reason = "device files", f"accelerator {accelerator}"
    if access.is_open:
        engine = backend_here(ANSWERING).capabilities(HERE)
        request, reason = device_requests.foreseen(settings, accelerator, host, context.directory, engine)
    elif access.runtime:
        request = f"runtime {access.runtime}"
    elif accelerator == accelerators.CPU:
        request = "none"
    yield ResolvedSetting("device request", request, reason)


def on_hosts(context: Context, settings: Settings) -> tuple[str, str]:
    """The accelerator of the listed hosts and why, from what they answer now or answered when last reached."""
    wanted = settings.text("LAB_ACCELERATOR")
    with connect(context, settings, demand=False) as cluster:
        silent = [error.message for error in cluster.failed.values()]
        try:
            able = cluster.with_usable_hosts()
            problems = {name: error.message for name, error in able.failed.items() if name not in cluster.failed}
            names = [host.name for host in cluster.hosts if host.name not in problems]
            chosen: str = cluster.accelerator
        except HostError as error:
            if error not in cluster.failed.values():
                return "none", "; ".join((errors.about(error.node or "", error), *silent))
            problems, names, chosen = {}, [], "unknown" if wanted == "auto" else wanted
        reached = ", ".join(name for name in names if name in cluster.connections)
        earlier = ", ".join(name for name in names if name not in cluster.connections)
        parts = (
            f"on {reached}" if reached else "",
            f"on {earlier} when last reached" if earlier else "",
            *problems.values(),
            *silent,
            "run `labctl doctor`" if silent else "",
        )
        return chosen, f"{wanted}: {'; '.join(filter(None, parts))}"
