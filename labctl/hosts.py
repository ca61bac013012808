"""The inventory: which machines a lab runs on and how ssh reaches them. The first is the master."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A host as the inventory names it; what is empty or 0 is left to the person's own ssh config and to the host."""

    name: str
    address: str = ""
    """What ssh is asked for instead of the name: an IP address, a DNS name or an alias of the ssh config."""
    user: str = ""
    port: int = 0
    key: str = ""
    """Path of a private key on this machine."""
    slots: int = 0
    iface: str = ""
    """Network interface for collectives."""
    docker: str = "/var/run/docker.sock"
    """Path of the engine's socket on the host."""
    where: str = ""
    """``file:line``."""


def read(path: Path, shown: str = "") -> tuple[Target, ...]:
    """The hosts of an inventory file, called ``shown`` in errors; ConfigError, ``file:line: reason``."""
    raise NotImplementedError(path, shown)
