"""State of the lab: its nodes and their health, by host."""

from __future__ import annotations

from msgspec import Struct

from labctl.model import HostFailure


class NodeStatus(Struct, frozen=True, kw_only=True):
    """State of a node.

    ``role``: launcher or worker; ``state``: ``running``, another state of its container as Docker has it,
    ``missing`` without a container, or ``unreachable`` as its host.
    """

    name: str
    role: str
    host: str
    state: str
    health: str | None = None
    reached: bool = False
    """The launcher has just reached it over ssh; asked only until its first health check."""
    reason: str = ""
    slots: int = 0
    devices: tuple[str, ...] = ()
    age: float | None = None
    """Seconds since its container was created; None if that is not known."""
    image: str = ""
    run: str = ""
    """Id of the latest run that uses it."""
    fitness: str = ""
    """Age of its host's last good verdict, and what changed since; empty if it was never examined."""


class RunState(Struct, frozen=True):
    """A run and its state: done, running or orphaned, and its nodes while it is under way."""

    run_id: str
    state: str
    short_id: str = ""
    nodes: tuple[str, ...] = ()


class LabStatus(Struct, frozen=True, kw_only=True):
    """State of a lab: ``state`` is up, partial, down, or unknown if no container was found and a host is silent."""

    lab: str
    state: str
    nodes: tuple[NodeStatus, ...]
    unreachable: tuple[HostFailure, ...]
    runs: tuple[RunState, ...] = ()
    out_of_date: str = ""
    """Reason why `up` would change its nodes, as far as settings changed; empty if none did."""
    hint: str = ""
    """Command that brings it up, such as a run of a lab in a cluster; empty if it is up."""
