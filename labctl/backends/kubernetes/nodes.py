"""Nodes of a cluster as the nodes of a lab: named in hostfiles, chosen for a run, or out of use."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from labctl.backends.kubernetes import capacity, pods
from labctl.backends.kubernetes.api import node_of
from labctl.backends.kubernetes.capacity import Amounts, ClusterNode, amount, request_of
from labctl.backends.kubernetes.job import Placement, lab_of_pods
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import seconds_of
from labctl.backends.kubernetes.target import Target
from labctl.backends.owner import owner
from labctl.errors import ConfigError, HostError
from labctl.jobs import job
from labctl.jobs.request import RunOptions, entries
from labctl.model import LAUNCHER, Lab, Node
from labctl.records.active import ActiveRun, in_use


def lab_of_nodes(lab: ClusterLab, target: Target, cluster_nodes: tuple[ClusterNode, ...]) -> Lab:
    """Return the lab of the nodes that are made for a worker, in use or not. HostError with reasons if none is."""
    shape = lab_of_pods(lab.settings, lab.directory, lab.settings.text("LAB_ACCELERATOR"), target, lab.name)
    slots = shape.nodes[0].slots
    request = request_of(target, slots)
    fitting = [node for node in cluster_nodes if node.is_made_for(request)]
    if not fitting:
        reasons = capacity.hindrances(cluster_nodes, request) or "the cluster has no nodes"
        raise HostError(f"no node can hold a worker: {reasons}", hint="labctl devices")
    hosts = tuple(replace(shape.hosts[0], name=node.name, address=node.address) for node in fitting)
    return replace(shape, hosts=hosts, nodes=tuple(Node(name=host.name, host=host.name, slots=slots) for host in hosts))


def unusable(cluster_nodes: tuple[ClusterNode, ...], request: Amounts) -> dict[str, str]:
    """Return the nodes that cannot hold a worker now, each with the reason: ``cordoned``, or too little free."""
    reasons = {node.name: ", ".join(node.passing) or _taken(node, request) for node in cluster_nodes}
    return {name: reason for name, reason in reasons.items() if reason}


def _taken(node: ClusterNode, request: Amounts) -> str:
    """Return the first resource of which a node has too little free, with amounts; empty if a worker fits."""
    for name, many in request.items():
        if (free := node.room(name, now=True)) < many:
            return f"{amount(name, free)} of {name} free, not {amount(name, many)}"
    return ""


def placement(of: Lab, hostnames: Mapping[str, str], options: RunOptions) -> Placement:
    """Return the nodes that options name, or with --exclude alone those to avoid. ConfigError for unequal slots.

    ``of`` is the lab of nodes, ``hostnames`` has their labels. ConfigError for slots by number, and for nodes with
    different slots.
    """
    source = str(options.hostfile or "the cluster")
    chosen = job.choose(of, entries(options), source, include=options.include, exclude=options.exclude)
    names = tuple(node.name for node, _ in chosen)
    numbers = {slots for _, slots in chosen}
    if any(slots != tuple(range(len(slots))) for slots in numbers):
        raise ConfigError(
            f"{options.include or options.exclude} chooses slots by number",
            hint="name only nodes: a cluster decides which devices a pod gets",
        )
    if len(numbers) > 1:
        raise ConfigError(
            f"{source}: all workers of a job must have the same number of slots", hint="write the same slots=N for each"
        )
    if options.exclude and not options.hostfile:
        return Placement(without=tuple(label for name, label in hostnames.items() if name not in names))
    (slots,) = numbers
    return Placement(nodes=names, hostnames=tuple(hostnames[name] for name in names), slots=len(slots))


def is_placed(options: RunOptions) -> bool:
    """Tell if a run's options name nodes; else the cluster chooses them."""
    return bool(options.hostfile or options.include or options.exclude)


def require_free(lab: ClusterLab, placed: Placement, cluster_nodes: tuple[ClusterNode, ...], request: Amounts) -> None:
    """Raise InUse if other runs have workers on a named node, HostError if one is out of use or full."""
    if users := _users(lab, placed):
        raise in_use(users)
    for name, reason in unusable(cluster_nodes, request).items():
        if name in placed.nodes:
            raise HostError(
                f"{name} is out of use: {reason}", hint="labctl devices; `labctl run --wait` waits for it", node=name
            )


def _users(lab: ClusterLab, placed: Placement) -> list[ActiveRun]:
    """Return the lab's runs that have workers, not ended or leaving, on these nodes."""
    runs: dict[str, ActiveRun] = {}
    for pod in lab.engine.pods(lab.name):
        node, metadata = pod["spec"].get("nodeName", ""), pod["metadata"]
        ends = pods.has_ended(pod) or "deletionTimestamp" in metadata
        if node not in placed.nodes or node_of(pod) == LAUNCHER or ends:
            continue
        began, run_id = seconds_of(metadata["creationTimestamp"]), metadata["labels"]["labctl.run"]
        first = runs.setdefault(run_id, ActiveRun(id=run_id, nodes=(), state="running", order=began, owner=owner()))
        runs[run_id] = replace(first, nodes=(*first.nodes, node))
    return list(runs.values())
