"""Reads the status of a lab from what its engines hold."""

from __future__ import annotations

from msgspec.structs import replace

from labctl import model
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.owner import owner
from labctl.backends.state import ObservedState, altered, elsewhere
from labctl.backends.status import LabStatus, NodeStatus
from labctl.config.context import Context
from labctl.model import HostFailure


def status_of(context: Context, cluster: Cluster, observed: ObservedState | None = None) -> LabStatus:
    """The state of the lab on its hosts, without its runs; ``observed`` is what was read just before."""
    name = cluster.settings.text("LAB_NAME")
    observed = observed or cluster.engine.observe(name)
    observed = own_containers(context, observed, owner())
    silent = {**cluster.failed, **dict(observed.silent)}
    usable = (one for one in observed.containers if one.state == "running" and not altered(one))
    running = {container.node for container in usable}
    found = {container.node for container in observed.containers}
    missing = "unknown" if silent else "down"
    nodes = [
        NodeStatus(
            name=container.node,
            role=container.role,
            host=container.host,
            state=container.state,
            health=container.health,
            reason=container.reason or altered(container),
            slots=container.slots,
            devices=tuple(container.devices),
        )
        for container in observed.containers
    ]
    nodes += [
        NodeStatus(
            name=node,
            role="launcher" if node == model.LAUNCHER else "worker",
            host=host,
            state="unreachable",
            reason=silent[host].message,
        )
        for node, host in cluster.placement.items()
        if host in silent
    ]
    place = {node: number for number, node in enumerate(cluster.placement)}
    return LabStatus(
        lab=name,
        state=missing if not found else "up" if running == set(cluster.placement) == found else "partial",
        nodes=tuple(sorted(nodes, key=lambda node: place.get(node.name, len(place)))),
        unreachable=tuple(HostFailure(host, error.message, error.hint) for host, error in silent.items()),
    )


def own_containers(context: Context, observed: ObservedState, caller: str) -> ObservedState:
    """Exclude containers of another user's or directory's lab with the same name, with a warning per host.

    Those of this machine are shown: that lab is the only one here that can have the name.
    """
    own, hosts = [], {}
    for one in observed.containers:
        if lab := elsewhere(one.directory, context.directory, one.owner, caller, one.host):
            hosts[one.host] = lab
        if not lab or one.host == model.HERE:
            own.append(one)
    for host, lab in hosts.items():
        where = "this machine" if host == model.HERE else host
        context.warn(f"{where} has a lab of this name that is not yours: {lab.name}")
    return replace(observed, containers=tuple(own))
