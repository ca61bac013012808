"""Devices of the lab's hosts, and the values that its settings resolve to on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat, starmap
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
from labctl.backends.docker.lab.cluster import (
    ANSWERING,
    Cluster,
    backend_here,
    base_image,
    connect,
    preview_lab,
    read_inventory,
)
from labctl.config import override
from labctl.config.context import Context
from labctl.config.settings import USUAL_NODES, Settings
from labctl.errors import HostError, LabError
from labctl.model import HERE, Device, Host, Node
from labctl.system import procfs
from labctl.system.hostpath import HostPath
from labctl.system.process import CompletedProcess
from labctl.system.procfs import ROOT


class EffectiveSetting(Struct, frozen=True):
    """A setting's displayed value and its origin."""

    key: str
    value: str
    origin: str


class ResolvedSetting(Struct, frozen=True):
    """A value that was decided: of a setting that is not set, or another that is detected; and the reason for it."""

    key: str
    value: str
    reason: str


class EffectiveSettings(Struct, frozen=True):
    """All settings as they are set, and the values that were decided."""

    settings: tuple[EffectiveSetting, ...]
    resolved: tuple[ResolvedSetting, ...]


def of_host(settings: Settings, directory: Path, root: HostPath = ROOT) -> HostDevices:
    """Return this machine's devices, and nodes if ``directory`` is a lab; an error of the lab is a warning in it."""
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
    """Return accelerator, devices, CPUs, memory and fabrics of a host below ``root``, and its share per node.

    ``run`` runs vendor tools there. Leases are read on this machine only.
    """
    accelerator, reason = spec.choice(settings, root)
    found_by_kind = accelerators.find_all(root)
    locks = procfs.lock_directory(root)
    owners = {device.path: node.name for node in nodes for device in node.devices.devices}

    def detected(kind: str, device: Device) -> DetectedDevice:
        """Return a device with its kind, the node that gets it and, on this machine, its lease's holder."""
        holder = leases.holder(locks, device) if name == HERE else ""
        return DetectedDevice(**asdict(device), kind=kind, node=owners.get(device.path), leased_by=holder)

    group_ids = groups(tuple(chain.from_iterable(found_by_kind.values())), root)
    described = {kind: describe(kind, devices, run) for kind, devices in found_by_kind.items()}
    kinds_and_devices = chain.from_iterable(zip(repeat(kind), devices) for kind, devices in described.items())
    return HostDevices(
        name=name,
        accelerator=accelerator,
        reason=reason,
        processor=procfs.processor(root),
        cpus=procfs.cpus(root),
        numa=procfs.numa_nodes(root),
        memory=procfs.memory(root),
        devices=tuple(starmap(detected, kinds_and_devices)),
        drivers=_drivers(found_by_kind, root),
        groups=group_ids,
        group_names={name: number for name, number in procfs.group_ids(root).items() if number in group_ids},
        infiniband=procfs.infiniband(root),
        fabrics=procfs.fabrics(root),
        nodes=_shares(nodes, root),
        warnings=(*accelerators.remarks(root), *filter(None, [problem])),
    )


def _drivers(kinds: Iterable[str], root: HostPath) -> dict[str, str]:
    """Return the version of each accelerator's kernel driver."""
    return {kind: accelerators.get(kind).driver(root) for kind in kinds}


def _shares(nodes: Iterable[Node], root: HostPath) -> tuple[NodeShare, ...]:
    """Return each node's share of the host; a node without a cpuset may use all cores."""
    shares = []
    for node in nodes:
        ids = tuple(device.id for device in node.devices.devices)
        cpus = node.cpuset or procfs.cpus(root)
        shares.append(NodeShare(name=node.name, slots=node.slots, cpus=cpus, devices=ids))
    return tuple(shares)


def devices(context: Context) -> DeviceReport:
    """Return the devices of each host, this one without LAB_HOSTS; warn of silent hosts. HostError if all are."""
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
    """Return each reachable host's devices and nodes, in inventory order; a lab that fails is its warning."""
    nodes: tuple[Node, ...] = ()
    try:
        lab, usable = preview_lab(cluster)
    except LabError as error:
        problems = dict.fromkeys(cluster.connections, error.message)
    else:
        problems = new_problems(usable, cluster)
        nodes = tuple(node for node in lab.nodes if node.host not in problems)
    hosts = []
    for name, connection in cluster.connections.items():
        placed = tuple(node for node in nodes if node.host == name)
        root, run = cluster.root(name), partial(run_on, connection)
        hosts.append(detect(cluster.settings, placed, problems.get(name, ""), name=name, root=root, run=run))
    return tuple(hosts)


def new_problems(usable: Cluster, cluster: Cluster) -> dict[str, str]:
    """Return the error message of each host that failed in ``usable`` but not in ``cluster``."""
    return {name: error.message for name, error in usable.failed.items() if name not in cluster.failed}


def run_on(connection: Connection, argv: Sequence[str], seconds: float) -> CompletedProcess:
    """Run a vendor's tool on a host; return its output and exit code, also if that is not zero."""
    return connection.run('exec "$@"', *argv, timeout=seconds, check=False)


def effective_settings(context: Context) -> EffectiveSettings:
    """Return every setting with its origin, and the detected values."""
    settings = context.settings()
    rows = tuple(EffectiveSetting(*row) for row in settings.rows())
    return EffectiveSettings(rows, tuple(resolve(context, settings)))


def resolve(context: Context, settings: Settings) -> Iterator[ResolvedSetting]:
    """Yield override services, accelerator and, without LAB_HOSTS, devices, nodes and image, with reasons."""
    if added := override.services(context.directory):
        yield ResolvedSetting("override", ", ".join(added), override.FILE)
    if settings.text("LAB_HOSTS"):
        yield ResolvedSetting("accelerator", *on_hosts(context, settings))
        hosts = read_inventory(context.directory, settings)
        if len(hosts) > 1:
            yield ResolvedSetting("LAB_NODES", str(len(hosts)), f"one per host of {settings.text('LAB_HOSTS')}")
        return
    accelerator, reason = spec.choice(settings)
    yield ResolvedSetting("accelerator", accelerator or "none", reason)
    if accelerator is None:
        return
    _, host = observe(accelerator)
    yield from decided(settings, accelerator, host)
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


def decided(settings: Settings, accelerator: str, host: Host) -> Iterator[ResolvedSetting]:
    """Yield nodes, slots, devices and image of a lab on this machine, as far as no setting says them."""
    if settings.text("LAB_ENGINE") != "docker":
        return
    try:
        nodes = spec.nodes(settings, accelerator, host)
        image = image_of(settings, accelerator)
    except LabError:
        # `devices` has the reason.
        return
    on_cpu = accelerator == accelerators.CPU
    usual = "default on one host" if len(nodes) == USUAL_NODES else f"{host.name} has devices for one node"
    devices = () if on_cpu else host.devices
    values = {
        "LAB_NODES": (str(len(nodes)), usual),
        "LAB_SLOTS": (str(nodes[0].slots), "one per node" if on_cpu else "one per device"),
        "LAB_DEVICES": (",".join(device.id for device in devices), "all that were found"),
        "LAB_IMAGE": image,
    }
    for key, (value, reason) in values.items():
        if value and not settings.text(key):
            yield ResolvedSetting(key, value, reason)


def image_of(settings: Settings, accelerator: str) -> tuple[str, str]:
    """Return the image of a lab's nodes, and why it is that one."""
    from labctl.backends.docker.images import packages

    base = base_image(settings, lambda: accelerator)
    image = packages.tag(base, packages.of(settings))
    return image, f"for accelerator {accelerator}" if image == base else f"{base} with the packages of the lab"


def on_hosts(context: Context, settings: Settings) -> tuple[str, str]:
    """Return the accelerator, as set or found, and why; ``none`` if hosts lack it, ``unknown`` if unreachable."""
    configured = settings.text("LAB_ACCELERATOR")
    with connect(context, settings, demand=False) as cluster:
        silent = [error.message for error in cluster.failed.values()]
        try:
            problems = new_problems(cluster.with_usable_hosts(), cluster)
            names = [host.name for host in cluster.hosts if host.name not in problems]
            chosen: str = cluster.accelerator
        except HostError as error:
            if error not in cluster.failed.values():
                return "none", "; ".join((errors.about(error.node or "", error), *silent))
            problems, names, chosen = {}, [], "unknown" if configured == "auto" else configured
        reasons = (*_reached(names, cluster), *problems.values(), *silent)
        advice = ("run `labctl doctor`",) if silent else ()
        return chosen, f"{configured}: {'; '.join((*reasons, *advice))}"


def _reached(names: Iterable[str], cluster: Cluster) -> Iterator[str]:
    """Yield text on the hosts whose facts are current, and on those whose facts are of an earlier connection."""
    listed = list(names)
    current = [name for name in listed if name in cluster.connections]
    earlier = [name for name in listed if name not in cluster.connections]
    if current:
        yield f"on {', '.join(current)}"
    if earlier:
        yield f"on {', '.join(earlier)} when last reached"
