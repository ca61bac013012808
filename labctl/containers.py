"""What a daemon holds of one lab, as read back from labels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a lab as the daemon reports it; every field but state and health comes from labels or ids."""

    id: str
    name: str
    node: str
    role: str
    slots: int
    state: str
    """created, running, paused, restarting, exited, dead"""
    health: str | None
    """starting, healthy, unhealthy; None without a health check"""
    fingerprint: str
    image: str
    directory: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a daemon holds of one lab; ``image`` is the id of the image that the lab would use, None if absent."""

    containers: tuple[Container, ...] = ()
    probes: tuple[Container, ...] = ()
    """Throw-away containers that tried the kernel's limits, of a labctl at work or one that was killed."""
    networks: tuple[tuple[str, str], ...] = ()
    """Id and name."""
    image: str | None = None

    def container(self, node: str) -> Container | None:
        return next((container for container in self.containers if container.node == node), None)
