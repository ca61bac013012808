"""What a lab is just now, in the form that scripts rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from labctl import model
from labctl.config.context import Context
from labctl.engines.state import ObservedState, elsewhere
from labctl.errors import HostError
from labctl.lab.cluster import THIS_MACHINE, Cluster, owner


def status_of(context: Context, cluster: Cluster, observed: ObservedState | None = None) -> dict[str, Any]:
    """The lab's state and nodes; nodes of a host that does not answer are ``unreachable``.

    Where nothing of it was seen and a host does not answer, its state is ``unknown``. ``observed``: read just before.
    """
    name = cluster.settings.text("LAB_NAME")
    observed = observed or cluster.engine.observe(name)
    if cluster.inventory != THIS_MACHINE:
        observed = ours(context, observed, owner())
    silent = {**cluster.failed, **dict(observed.silent)}
    unreachable = unheard(cluster, silent)
    up_now = {container.node for container in observed.containers if container.state == "running"}
    there = {container.node for container in observed.containers}
    nothing = "unknown" if silent else "down"
    state = nothing if not there else "up" if up_now == set(cluster.placement) == there else "partial"
    nodes = [
        {
            "name": container.node,
            "role": container.role,
            "host": container.host,
            "state": container.state,
            "health": container.health,
            "reason": container.reason,
            "slots": container.slots,
            "devices": list(container.devices),
        }
        for container in observed.containers
    ]
    place = {node: number for number, node in enumerate(cluster.placement)}
    return {
        "lab": name,
        "state": state,
        "nodes": sorted((*nodes, *unreachable), key=lambda node: place.get(node["name"], len(place))),
        "unreachable": [{"host": host, "message": error.message, "hint": error.hint} for host, error in silent.items()],
    }


def ours(context: Context, observed: ObservedState, caller: str) -> ObservedState:
    """What was observed, less what somebody else or another directory made under the same name; who is said."""
    theirs = {
        container.id: found
        for container in observed.containers
        if (found := elsewhere(container.directory, context.directory, container.owner, caller, container.host))
    }
    for host, found in {one.host: theirs[one.id] for one in observed.containers if one.id in theirs}.items():
        context.warn(f"{host} has a lab of this name that is not yours: {found.name}")
    return replace(observed, containers=tuple(one for one in observed.containers if one.id not in theirs))


def unheard(cluster: Cluster, silent: Mapping[str, HostError]) -> list[dict[str, Any]]:
    """What should be on hosts that do not answer."""
    return [
        {
            "name": name,
            "role": "launcher" if name == model.LAUNCHER else "worker",
            "host": host,
            "state": "unreachable",
            "health": None,
            "reason": silent[host].message,
            "slots": 0,
            "devices": [],
        }
        for name, host in cluster.placement.items()
        if host in silent
    ]
