"""The lab's network: addresses, MTU, members, ARP table, and the interfaces that traffic between hosts takes."""

from __future__ import annotations

import json
import queue
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labctl import naming
from labctl.backends.docker import agent
from labctl.backends.docker.checks import engine
from labctl.backends.docker.checks.examination import RECREATE, TRAFFIC_SECONDS, CheckContext
from labctl.backends.docker.checks.nodes import ask, look_around
from labctl.backends.docker.lab import capabilities
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import Container
from labctl.errors import HostError
from labctl.system import human
from labctl.system.parallel import pool

MTU = "com.docker.network.driver.mtu"
POOLS = {"default-address-pools": [{"base": "10.200.0.0/16", "size": 24}]}
SYSCTL = "/etc/sysctl.d/90-labctl.conf"
EXHAUSTED = "address pool"
"""Part of Docker Engine's message "all predefined address pools have been fully subnetted"."""
SENT_BYTES = 4 << 20
"""Bytes that each node sends: far more than other traffic meanwhile."""
SECONDS = int(TRAFFIC_SECONDS / 3)
"""Time limit of a step of the measurement."""


def address_pools(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok if the network exists or a test one works, an error if addresses ran out; nothing for ``host``.

    HostError if a test network fails for another reason.
    """
    if ctx.lab.network == "host":
        return
    if ctx.network:
        yield ok("LAB-NET-003", f"network {ctx.network['Name']} exists")
        return
    reason = ctx.daemon.try_network(ctx.lab.name)
    if not reason:
        yield ok("LAB-NET-003", "address pool has room")
        return
    summary = f"the engine cannot create another network: {reason}"
    if EXHAUSTED not in reason:
        raise HostError(summary, hint="docker network ls")
    unused = ctx.daemon.unused_networks()
    of_labs = [name for name, lab in unused if lab]
    others = [name for name, lab in unused if not lab]
    impact = "a lab has a network of its own; by default an engine has addresses for about 30"
    # Networks of labs can be removed; of others the user must decide; if none is unused, the pools are too small.
    if of_labs:
        fix = f"docker network rm {shlex.join(of_labs)}"
    elif others:
        fix = f"docker network inspect {shlex.join(others)}  # and remove those that nobody needs"
    else:
        fix = f"{engine.configure(ctx, POOLS)} && {ctx.sudo}{engine.RESTART}"
        impact = f"{impact}; {engine.RESTART_ENDS}"
    if others:
        summary = f"{summary}; unused: {', '.join(others)}"
    yield error("LAB-NET-003", summary, impact, ctx.command(fix))


def mtu(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or a warning if the MTU of the lab's network exceeds the host's; nothing without a network."""
    if ctx.network is None:
        return
    host, lab = ctx.host.mtu, int((ctx.network["Options"] or {}).get(MTU, 1500))
    if lab <= host:
        yield ok("LAB-NET-002", f"MTU {lab} on the lab's network, {host} on this host's default route")
        return
    summary = f"the lab's network has MTU {lab}, the default route of this host {host}"
    impact = "large packets to other machines are lost: downloads start, and then stall"
    yield warn("LAB-NET-002", summary, impact, RECREATE)


def members(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error if a running lab's bridge network is missing, and for each running node not on it."""
    if ctx.network is None:
        if ctx.lab.network == "bridge" and ctx.running:
            summary, impact = f"network {naming.project(ctx.lab)} not found", "the nodes do not reach each other"
            yield error("LAB-NET-001", summary, impact, RECREATE, auto_fixable=True)
        return
    for container in ctx.running:
        if container.id not in (ctx.network["Containers"] or {}):
            # Not reconnected: its interface could get another name than the one in NCCL_SOCKET_IFNAME.
            fix = f"{ctx.command(f'docker rm --force {container.name}')} && labctl up"
            summary, impact = f"is not on the network {ctx.network['Name']}", "no other node reaches it"
            yield error("LAB-NET-001", summary, impact, fix, node=container.node, auto_fixable=True)


def arp_table(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or a warning if the kernel's ARP table is too small for all nodes to talk to each other."""
    lacking = capabilities.neighbours_lacking(ctx.lab, ctx.root)
    if not lacking:
        yield ok("LAB-NET-006", "ARP table is large enough")
        return
    has, needed = lacking
    # Room for another lab, and for entries about to expire: those above gc_thresh2 live for only five seconds.
    most = 1 << (2 * needed).bit_length()
    lines = f"net.ipv4.neigh.default.gc_thresh2={most // 2} net.ipv4.neigh.default.gc_thresh3={most}"
    summary = f"ARP table too small: gc_thresh3={has}, {len(ctx.lab.nodes)} nodes need {needed} entries"
    impact = "the kernel drops packets to nodes without an entry: connections between nodes time out"
    fix = f"printf '%s\\n' {lines} | {ctx.sudo}tee {SYSCTL} && {ctx.sudo}sysctl -p {SYSCTL}"
    yield warn("LAB-NET-006", summary, impact, ctx.command(fix))


# --- traffic -------------------------------------------------------------------------------------------------


def traffic(ctx: CheckContext) -> Iterator[Finding]:
    """Send bytes between hosts: ok per node if they take the configured interface, else errors; not during a run.

    The other nodes send bytes to the first over plain TCP from address to address, as collectives do.
    """
    lab = ctx.lab
    names = {node.name for node in lab.nodes}
    workers = tuple(container for container in ctx.running if container.node in names)
    if lab.network != "host" or ctx.run_active or len(workers) < 2 or ctx.only or workers[0].node != lab.nodes[0].name:
        return
    first, answers = workers[0].node, measure(ctx, workers)
    failed = {node: answer["said"] for node, answer in answers.items() if answer["said"]}
    for node, reason in failed.items():
        summary = f"no bytes get from it to {first} at {lab.host_of(first).address}: {reason}"
        impact = "ranks connect there, on ports that the kernel picks: a firewall, or no route"
        fix = f"{ctx.at(node).command('ip route')}  # and allow the hosts to reach each other on all ports"
        yield error("LAB-NET-007", summary, impact, fix, node=node)
    if failed:
        return
    for node, answer in answers.items():
        # Each interface has bytes received and sent: the first node received from all others.
        direction, expected = (0, SENT_BYTES * (len(workers) - 1)) if node == first else (1, SENT_BYTES)
        yield path_taken(ctx, node, answer, direction, expected)


def path_taken(ctx: CheckContext, node: str, answer: Mapping[str, Any], direction: int, expected: int) -> Finding:
    """Return ok if the host's interface took ``expected`` bytes, else an error; ``direction``: 0 received, 1 sent."""
    chosen = ctx.lab.host_of(node).interface
    through = {name: both[direction] for name, both in answer["through"].items()}
    others = astray(through, chosen, answer["kin"].get(chosen, []), expected)
    if not others:
        size = human.size(through[chosen])
        return ok("LAB-NET-007", f"{size} between the hosts went through {chosen}", node)
    summary = f"bytes between the hosts went through {', '.join(others)}, not through {chosen}"
    impact = f"collectives are configured with {chosen}: they would be slower, or not connect"
    fix = ctx.at(node).command("ip route  # and set iface= for each host in the inventory")
    return error("LAB-NET-007", summary, impact, fix, node=node)


def astray(through: Mapping[str, int], chosen: str, kin: Sequence[str], expected: int) -> list[str]:
    """Return the interfaces that took the bytes instead of the chosen one, ["none"] if unknown; [] if it has them."""
    if through.get(chosen, 0) >= expected:
        return []
    # A bridge or bond and its parts count the same bytes; less than half of them is other traffic.
    taken = [name for name, size in through.items() if size >= expected // 2 and name not in (chosen, *kin)]
    return taken or ["none"]


def measure(ctx: CheckContext, workers: tuple[Container, ...]) -> dict[str, dict[str, Any]]:
    """Send bytes from all other workers to the first; return interface counts by node. HostError if none arrive."""
    first, *others = workers
    address, limit = ctx.lab.host_of(first.node).address, SECONDS + 10
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def keep(texts: Sequence[str]) -> None:
        for text in texts:
            lines.put(text)

    def collect() -> int:
        """Receive bytes on the first node, its output lines into the queue; return the exit code."""
        argv = look_around("collect", address, str(len(others)), str(SENT_BYTES), str(SECONDS))
        user = agent.user(ctx.lab, first.node)
        return ctx.engine.stream(first.name, argv, keep, user=user, limit=limit)

    def send(worker: Container) -> dict[str, Any]:
        return ask(ctx, worker, "hand", address, str(port), str(SENT_BYTES), str(SECONDS), limit=limit)[0]

    def collected() -> Any:
        """Return the next line of the first node: its port, then its byte counts. HostError if there is none."""
        line = "no answer"
        try:
            line = lines.get(timeout=SECONDS).strip()
            return json.loads(line)
        except (queue.Empty, ValueError):
            message = f"cannot receive bytes from the other nodes: {line}"
            raise HostError(message, hint=f"labctl logs {first.node}") from None

    with pool(len(workers)) as threads:
        collecting = threads.submit(collect)
        port = collected()
        sent = list(threads.map(send, others))
        collecting.result()
    return dict(zip((worker.node for worker in workers), (collected(), *sent), strict=True))
