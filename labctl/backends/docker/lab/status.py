"""Reads the status of a lab from its engines."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from msgspec.structs import replace

from labctl import model
from labctl.backends import spec
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.owner import owner
from labctl.backends.state import Container, ObservedState, altered, awaits_check, elsewhere
from labctl.backends.status import LabStatus, NodeStatus
from labctl.config.context import Context
from labctl.errors import Failures, LabError
from labctl.model import HostFailure

AWAITS_CHECK = "was paused; unhealthy until its next health check"


def status_of(
    context: Context, cluster: Cluster, observed: ObservedState | None = None, reached: Collection[str] | None = None
) -> LabStatus:
    """Return the lab's state and nodes, also missing ones and those on silent hosts; warn of another's lab.

    ``observed`` is the engines' state if it was read just before, and ``reached`` are the workers that the launcher
    has just reached over ssh.
    """
    name = cluster.settings.text("LAB_NAME")
    observed = observed or cluster.engine.observe(name)
    observed = own_containers(context, observed, owner())
    silent = {**cluster.failed, **dict(observed.silent)}
    reached = reachable(cluster, observed) if reached is None else reached
    nodes = [_node_status(container, reached) for container in observed.containers]
    expected = expected_nodes(cluster, {node.name for node in nodes})
    nodes += absent_nodes(observed, expected, silent)
    place = {node: number for number, node in enumerate(expected)}
    return LabStatus(
        lab=name,
        state=_lab_state(observed.containers, set(expected), is_complete=not silent),
        nodes=tuple(sorted(nodes, key=lambda node: place.get(node.name, len(place)))),
        unreachable=tuple(HostFailure(host, error.message, error.hint) for host, error in silent.items()),
    )


def reachable(cluster: Cluster, observed: ObservedState) -> frozenset[str]:
    """Return the workers that the launcher reaches over ssh; asked only if one awaits its first health check."""
    if not any(container.health == "starting" for container in observed.containers):
        return frozenset()
    early = cluster.begin_reach(observed)
    return frozenset(node for node in early.nodes if early.passed((node,))) if early else frozenset()


def expected_nodes(cluster: Cluster, existing: Collection[str]) -> dict[str, str]:
    """Return the containers that the lab is to have, with their hosts; ``existing`` are those that it has."""
    placement = cluster.placement
    is_decided = cluster.network == "host" or cluster.settings.number("LAB_NODES")
    if is_decided or set(existing) == set(placement):
        return placement
    # The number depends on the host's devices, which are read only now.
    try:
        count = spec.usual_nodes(cluster.settings, cluster.accelerator, cluster.hosts[0])
    except LabError:
        return placement
    return dict(islice(placement.items(), 1 + count))


def absent_nodes(observed: ObservedState, expected: Mapping[str, str], silent: Failures) -> Iterator[NodeStatus]:
    """Yield the status of nodes on silent hosts, and, unless the lab is surely down, of those without a container."""
    for node, host in expected.items():
        role = "launcher" if node == model.LAUNCHER else "worker"
        if host in silent:
            yield NodeStatus(name=node, role=role, host=host, state="unreachable", reason=silent[host].message)
        elif (observed.containers or silent) and not observed.container(node):
            yield NodeStatus(name=node, role=role, host=host, state="missing")


def _node_status(container: Container, reached: Collection[str]) -> NodeStatus:
    """Return the status of a container, with the reason of its state, or that it was changed by hand."""
    return NodeStatus(
        name=container.node,
        role=container.role,
        host=container.host,
        state=container.state,
        health=container.health,
        reached=container.node in reached,
        reason=AWAITS_CHECK if awaits_check(container) else container.reason or altered(container),
        slots=container.slots,
        devices=tuple(container.devices),
        age=max(0.0, time.time() - container.created) if container.created else None,
        image=container.image_name,
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
