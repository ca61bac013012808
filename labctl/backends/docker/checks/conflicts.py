"""Names, networks and ports that the lab's containers need, and that others may have."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator

from labctl import naming
from labctl.backends.docker.checks.examination import CheckContext
from labctl.backends.finding import Finding, error, ok
from labctl.config.settings import split_port

ABSENT = "cannot be used: the host has no address"
ANY = frozenset(("", "0.0.0.0", "::"))  # noqa: S104 - compared, not listened on
LISTENER = re.compile(r'\(\("([^"]+)",pid=(\d+)')
"""Name and pid of a process in the output of ss(8)."""


def names(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error per container or network of others that has a name that the lab needs; ok if there is none."""
    lab, free = ctx.lab, True
    needed = {naming.container_name(lab, name): name for name in ctx.names}
    for name in ctx.daemon.foreign_containers(naming.project(lab), lab.name):
        if name in needed:
            summary = f"container {name} exists and is not of this lab"
            impact = "the node cannot be created beside it"
            fix = f"{ctx.command(f'docker rename {name} {name}-other')}  # or set another LAB_NAME in .env"
            yield error("LAB-NAME-002", summary, impact, fix, node=needed[name])
            free = False
    network = naming.project(lab)
    if lab.network == "bridge" and (used := ctx.daemon.foreign_network(network, lab.name)) is not None:
        fix = ctx.command(f"docker network rm {network}")
        if used:
            fix = ctx.set_setting("LAB_NAME", f"{lab.name[:36].rstrip('-')}-2")
        summary = f"network {network} exists and is not of this lab"
        yield error("LAB-NAME-002", summary, "the lab's network cannot be created beside it", fix)
        free = False
    if free:
        yield ok("LAB-NAME-002", f"the names of lab {lab.name} are free or its own")


def published_ports(ctx: CheckContext) -> Iterator[Finding]:
    """Yield, per port of LAB_PORTS, ok if it is free or the launcher's, else an error; nothing without LAB_PORTS."""
    if ctx.name != ctx.lab.nodes[0].host:
        return
    for address, port, target in ctx.lab.ports:
        reason = why_not_published(ctx, address, port)
        if not reason:
            yield ok("LAB-PORT-004", f"port {port} of {address} is free or the launcher's")
            continue
        # An address of another host does not become free on another port.
        usable = "127.0.0.1" if reason.startswith(ABSENT) else address
        numbers = (number for number in range(port, 1 << 16) if not why_not_published(ctx, usable, number))
        fix = "${EDITOR:-vi} .env  # set LAB_PORTS to a lower port of the host"
        if free := next(numbers, None):
            words = ctx.settings.text("LAB_PORTS").split()
            replaced = [f"{usable}:{free}:{target}" if split_port(word)[1] == port else word for word in words]
            fix = ctx.set_setting("LAB_PORTS", " ".join(replaced))
        impact = f"the launcher cannot publish its port {target} there"
        yield error("LAB-PORT-004", f"port {port} of {address} (LAB_PORTS) {reason}", impact, fix)


def why_not_published(ctx: CheckContext, address: str, port: int) -> str:
    """Return why the launcher cannot publish a port on its host, such as who uses it; empty if it can, or does."""
    for name, lab, published in ctx.daemon.publishers(port):
        if overlap(address, published):
            return "" if lab == ctx.lab.name else f"is in use by container {name}"
    if ctx.facts:
        in_use = any(overlap(address, other) for other in ctx.facts.listening.get(port, ()))
        return f"is in use by a program of user {ctx.facts.ports[port]}" if in_use else ""
    code = error_of_binding(address, port)
    if code == errno.EADDRNOTAVAIL:
        return f"{ABSENT} {address}"
    if code != errno.EADDRINUSE:
        return ""
    listening = LISTENER.search(ctx.script('ss -Hltnp "sport = :$1" 2> /dev/null || true', str(port)))
    return f"is in use by {listening[1]} (pid {listening[2]})" if listening else "is in use by another program"


def overlap(address: str, other: str) -> bool:
    """Return True if two programs cannot listen on a port of these addresses: equal ones, or one is any address."""
    return address == other or not ANY.isdisjoint((address, other))


def error_of_binding(address: str, port: int) -> int:
    """Return the error number of listening on a port of this machine; 0 if it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Docker does: connections that have ended do not keep a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as failure:
            return failure.errno or 0
    return 0
