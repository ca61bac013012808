"""Reads the status of a lab from its engines."""

from __future__ import annotations

from msgspec.structs import replace

from labctl import model
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.owner import owner
from labctl.backends.state import Container, ObservedState, altered, elsewhere
from labctl.backends.status import LabStatus, NodeStatus
from labctl.config.context import Context
from labctl.model import HostFailure


def status_of(context: Context, cluster: Cluster, observed: ObservedState | None = None) -> LabStatus:
    """Return the lab's state and nodes, also those on silent hosts as unreachable; warn of another's lab.

    ``observed`` is the engines' state if it was read just before.
    """
    name = cluster.settings.text("LAB_NAME")
    observed = observed or cluster.engine.observe(name)
    observed = own_containers(context, observed, owner())
    silent = {**cluster.failed, **dict(observed.silent)}
    nodes = list(map(_node_status, observed.containers))
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
        state=_lab_state(observed.containers, set(cluster.placement), is_complete=not silent),
        nodes=tuple(sorted(nodes, key=lambda node: place.get(node.name, len(place)))),
        unreachable=tuple(HostFailure(host, error.message, error.hint) for host, error in silent.items()),
    )


def _node_status(container: Container) -> NodeStatus:
    """Return the status of a container, with the reason of its state, or that it was changed by hand."""
    return NodeStatus(
        name=container.node,
        role=container.role,
        host=container.host,
        state=container.state,
        health=container.health,
        reason=container.reason or altered(container),
        slots=container.slots,
        devices=tuple(container.devices),
    )


def _lab_state(containers: tuple[Container, ...], expected: set[str], *, is_complete: bool) -> str:
    """Return ``up`` if exactly the expected nodes run unaltered, else ``partial``; ``down``, ``unknown`` if none."""
    if not containers:
        return "down" if is_complete else "unknown"
    usable = [container for container in containers if container.state == "running" and not altered(container)]
    running = {container.node for container in usable}
    return "up" if running == expected == {container.node for container in containers} else "partial"


def own_containers(context: Context, observed: ObservedState, caller: str) -> ObservedState:
    """Return the state without others' containers on remote hosts; warn of each host with another's lab.

    This machine's containers stay: a name belongs to a single lab on it.
    """
    included, hosts = [], {}
    for container in observed.containers:
        if lab := elsewhere(container.directory, context.directory, container.owner, caller, container.host):
            hosts[container.host] = lab
        if not lab or container.host == model.HERE:
            included.append(container)
    for host, lab in hosts.items():
        where = "this machine" if host == model.HERE else host
        context.warn(f"{where} has a lab of this name that is not yours: {lab.name}")
    return replace(observed, containers=tuple(included))
