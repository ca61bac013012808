"""What a daemon's answers mean: its list of containers, and the innermost reason of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labctl.containers import Container, HostPortUser


def container_of(found: dict[str, Any], host: str) -> Container:
    labels = found["Labels"]
    status = found.get("Status", "")
    health = next(
        (word for word in ("unhealthy", "healthy", "starting") if f"({word}" in status or f": {word}" in status), None
    )
    return Container(
        id=found["Id"],
        name=found["Names"][0].lstrip("/") if found.get("Names") else found["Id"][:12],
        node=labels.get("labctl.node", "?"),
        host=host,
        role=labels.get("labctl.role", "?"),
        slots=int(labels.get("labctl.slots", 0)),
        state=found["State"],
        health=health,
        fingerprint=labels.get("labctl.render", ""),
        image=found["ImageID"],
        directory=labels.get("labctl.directory", ""),
        owner=labels.get("labctl.owner", ""),
        devices=tuple(filter(None, labels.get("labctl.devices", "").split(","))),
    )


def listener_of(found: dict[str, Any], environment: Mapping[str, str], host: str) -> HostPortUser:
    """By what the container was made with, where its sshd listens; port 0 where that is not to be told."""
    port = environment.get("LAB_SSH_PORT", "")
    container = container_of(found, host)
    return HostPortUser(
        port=int(port) if port.isdecimal() else 0, lab=found["Labels"]["labctl.lab"], container=container
    )


def node_order(container: Container) -> tuple[bool, str, int]:
    """The launcher first, then the workers by number."""
    stem, _, number = container.node.rpartition("-")
    return (container.role != "launcher", stem, int(number) if number.isdigit() else 0)


def root_cause(error: BaseException) -> str:
    """The innermost reason: requests and urllib3 wrap a refused connection three times."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(getattr(error, "strerror", None) or error)
