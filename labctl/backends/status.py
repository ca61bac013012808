"""State of the lab: its nodes and their health, by host."""

from __future__ import annotations

from msgspec import Struct

from labctl.model import HostFailure


class NodeStatus(Struct, frozen=True, kw_only=True):
    """State of a node.

    ``role``: launcher or worker; ``state``: ``running``, another state of its container as Docker has it, or
    ``unreachable`` as its host.
    """

    name: str
    role: str
    host: str
    state: str
    health: str | None = None
    reason: str = ""
    slots: int = 0
    devices: tuple[str, ...] = ()
    fitness: str = ""
    """Age of its host's last good verdict, and what changed since; empty if it was never examined."""


class RunState(Struct, frozen=True):
    """A run and its state: done, running or orphaned."""

    run_id: str
    state: str


class LabStatus(Struct, frozen=True, kw_only=True):
    """State of a lab: ``state`` is up, partial, down, or unknown if no container was found and a host is silent."""

    lab: str
    state: str
    nodes: tuple[NodeStatus, ...]
    unreachable: tuple[HostFailure, ...]
    runs: tuple[RunState, ...] = ()
