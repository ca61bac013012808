"""The lab's containers: running as configured, reachable from the launcher, and what they see themselves."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from labctl import naming
from labctl.accelerators import leases
from labctl.backends.docker import agent
from labctl.backends.docker.checks.engine import judge_skew, skew
from labctl.backends.docker.checks.examination import LIMIT, RECREATE, SSH_SECONDS, UP, CheckContext
from labctl.backends.docker.deploy import plan
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import Container, lost
from labctl.config.settings import EXTRA
from labctl.errors import HostError
from labctl.model import LAUNCHER
from labctl.system import files
from labctl.system.process import ProcessTimeout

Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network
PATIENCE = 8
"""Seconds for a login from the launcher and for the bytes that are sent then; on busy cores a login takes some."""
SENT_BYTES = 1 << 20
SLOW = 1e6
"""Bytes per second through ssh; two containers on a laptop have a hundred times as much."""


def states(ctx: CheckContext) -> Iterator[Finding]:
    """Whether each container exists, runs, and is up to date with the settings."""
    lab, observed = ctx.lab, ctx.observed
    if not observed.containers:
        yield ok("LAB-NODE-001", f"lab {lab.name} is down")
        return
    content = {file.path: file.content for file in ctx.rendered}
    for name in ctx.names:
        owner = lab.nodes[0].name if name == LAUNCHER else name
        fingerprint = naming.fingerprint(content[naming.compose_path(owner)])
        yield state(ctx, name, observed.container(name), fingerprint)
    wanted = replace(ctx, only="").names
    for one in observed.containers:
        if one.node not in wanted and not ctx.only:
            impact = "the settings ask for fewer nodes; it uses cores and memory"
            yield warn("LAB-NODE-005", "not in the settings", impact, UP, node=one.node, auto_fixable=True)


def state(ctx: CheckContext, name: str, one: Container | None, fingerprint: str) -> Finding:
    """One container, by what the engine says of it."""
    wrong = partial(error, node=name, auto_fixable=True)
    if one and one.state == "paused":
        fix = ctx.command(f"docker unpause {one.name}")
        return wrong("LAB-NODE-002", "is paused", "a run would wait for its processes for ever", fix)
    if one and (cause := lost(one.reason)):
        return wrong("LAB-NODE-004", f"is unhealthy: {one.reason}", f"a run on it would end with {cause}", UP)
    stuck = plan.why_stuck(ctx.lab, one, {}) if one else None
    if one is None or one.state != "running" or stuck:
        summary = stuck or (f"is {one.state}" if one else "is missing")
        return wrong("LAB-NODE-001", summary, "a run needs every node", UP)
    image = ctx.observed.image
    if image and (reason := plan.why_not_current(one, fingerprint, image)):
        return wrong("LAB-NODE-003", f"is out of date: {reason}", "`labctl run` refuses a lab that is out of date", UP)
    # A paused node is unhealthy until its next health check: then the last one said nothing.
    if one.health == "unhealthy" and one.reason:
        summary, impact = f"is unhealthy: {one.reason}", "a machine that is too busy, or a node that hangs"
        return warn("LAB-NODE-006", summary, impact, restart(ctx, one), node=name, auto_fixable=True)
    health = "health not known yet" if one.health == "unhealthy" else one.health
    return ok("LAB-NODE-001", f"runs, {health}" if health else "runs", name)


def restart(ctx: CheckContext, one: Container) -> str:
    """The command that restarts a node, which copies its host key and its authorized keys as it starts."""
    return ctx.at(one.node).command(f"docker restart -t 1 {one.name}")


# --- from the launcher ---------------------------------------------------------------------------------------


def ssh(ctx: CheckContext) -> Iterator[Finding]:
    """Each worker as the launcher reaches it: login, pinned host key, and throughput."""
    workers = tuple(one for one in ctx.running if one.node != LAUNCHER)
    launcher = ctx.observed.container(LAUNCHER)
    if not workers or launcher is None or launcher.state != "running":
        return
    words = ("links", str(PATIENCE), str(SENT_BYTES), str(SLOW), *(one.node for one in workers))
    answers = {answer["node"]: answer for answer in ask(ctx, launcher, *words, limit=SSH_SECONDS - 1)}
    for one in workers:
        answer = answers.get(one.node, {"said": "the launcher gave no answer about it"})
        yield from link(ctx, one, answer)


def link(ctx: CheckContext, one: Container, answer: dict[str, Any]) -> Iterator[Finding]:
    """One worker, by what the launcher says of it."""
    if answer.get("name") != one.node:
        stderr = str(answer["said"]) or f"no answer over ssh within {PATIENCE} s"
        code, impact = "LAB-SSH-001", "launchers start ranks over ssh"
        summary = f"not reached from the launcher: {ssh_errors.ssh_reason(stderr)}"
        if "IDENTIFICATION HAS CHANGED" in stderr or "verification failed" in stderr:
            code, summary = "LAB-SSH-002", "its host key is not the one pinned for it"
            impact = "something else than the node created by `labctl up` may answer in its name; it is not trusted"
        yield error(code, summary, impact, restart(ctx, one), node=one.node, auto_fixable=True)
        return
    yield ok("LAB-SSH-001", f"reached from the launcher in {answer['seconds']:.2f} s", one.node)
    rate = answer["rate"]
    if rate is None or rate < SLOW:
        summary = f"{rate / 1e6:.2f} MB/s" if rate else f"less than {SENT_BYTES / PATIENCE / 1e6:.1f} MB/s"
        impact = "ranks exchange data over the same network"
        yield warn("LAB-NET-005", f"{summary} from the launcher", impact, RECREATE, node=one.node)
    else:
        yield ok("LAB-NET-005", f"{rate / 1e6:.0f} MB/s through ssh from the launcher", one.node)


# --- from within ---------------------------------------------------------------------------------------------


def inside(ctx: CheckContext, one: Container) -> Iterator[Finding]:
    """A node as it sees itself: its clock, the interfaces of collectives, the master port."""
    before = time.time()
    (seen,) = ask(ctx, one, "look", str(ctx.lab.master_port))
    yield judge_skew(ctx, skew(seen["time"], before), "its clock")
    yield from interfaces(ctx, seen)
    if one.node == ctx.lab.nodes[0].name:
        yield master_port(ctx, one, seen["listener"])


def interfaces(ctx: CheckContext, seen: dict[str, Any]) -> Iterator[Finding]:
    """Whether each collective library is configured with an interface of the node that is on the lab's network."""
    network, addresses, on_hosts = ctx.network, seen["addresses"], ctx.lab.network == "host"
    ranges = [ctx.host.address] if on_hosts else [one["Subnet"] for one in network["IPAM"]["Config"]] if network else []
    subnets = [ipaddress.ip_network(one) for one in ranges]
    on_lab = [name for name, text in addresses.items() if any(ipaddress.ip_address(text) in net for net in subnets)]
    if on_hosts and not on_lab:
        now = ", ".join(f"{name} {text}" for name, text in addresses.items())
        summary = f"no longer has address {ctx.host.address}: {now}"
        yield error("LAB-NET-004", summary, "the other nodes connect to it there", UP)
    if not on_lab:
        # A node without a network has a finding of its own.
        return
    names = ", ".join(on_lab)
    wrong = {key: value for key, value in seen["variables"].items() if not chooses(key, value, on_lab, subnets)}
    for key, value in wrong.items():
        own = any(found.key == EXTRA + key for found in ctx.settings.extra)
        summary = f"{key}={value}, but the lab's network is on {names}"
        impact = "ranks would listen where no other node reaches them, and hang at their first collective"
        yield error("LAB-NET-004", summary, impact, f"{ctx.unset_setting(EXTRA + key)} && {UP}" if own else RECREATE)
    if not wrong:
        yield ok("LAB-NET-004", f"collectives use {names}, which is on the lab's network")


def chooses(key: str, value: str, interfaces: list[str], subnets: Sequence[Subnet] = ()) -> bool:
    """Whether such a list of interfaces includes one of these; NCCL and its kin match names by prefix."""
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    by_prefix = key.startswith(("NCCL", "HCCL")) and not value.startswith(("=", "^="))
    taken = [one for one in interfaces if any(one == word or (by_prefix and one.startswith(word)) for word in words)]
    if value.startswith("^"):
        return len(taken) < len(interfaces)
    # Open MPI also takes networks, such as 172.18.0.0/16.
    return bool(taken) or any(covers(word, subnet) for word in words if "/" in word for subnet in subnets)


def covers(word: str, subnet: Subnet) -> bool:
    try:
        return ipaddress.ip_network(word, strict=False).overlaps(subnet)
    except (ValueError, TypeError):
        return False


def master_port(ctx: CheckContext, one: Container, listener: dict[str, Any] | None) -> Finding:
    """The first node's master port must be free for a run; on a bridge network none of the host's ports is used."""
    bridge, port, code = ctx.lab.network == "bridge", ctx.lab.master_port, "LAB-PORT-001"
    if listener is None:
        whose = "the lab's own, none of the host is used" if bridge else "free for the lab"
        return ok(code, f"ports {ctx.lab.ssh_port} (ssh) and {port} (master) are {whose}")
    if ctx.run_active:
        return ok(code, f"port {port} is in use by the active run")
    if listener["run"]:
        return ok(code, f"port {port} is in use by what run {listener['run']} left; the next run ends it")
    if pid := listener["pid"]:
        process, fix = f"pid {pid}: {listener['command']}", f"labctl exec --node {one.node} -- kill {pid}"
    else:
        process = "a process of another user"
        fix = RECREATE if bridge else ctx.set_setting("LAB_MASTER_PORT", str(port + 1))
    summary = f"port {port} is in use by {process} (user {leases.user_name(listener['uid'])})"
    return error(code, summary, "the ranks of a run meet there", fix)


def look_around(*words: str) -> tuple[str, ...]:
    """Arguments that run `lookaround.py` with a container's own Python, so that it works in any image."""
    program = files.path("docker", "lookaround.py").read_text(encoding="utf-8")
    return ("/usr/bin/python3", "-I", "-c", program, *words)


def ask(ctx: CheckContext, one: Container, *words: str, limit: float = LIMIT - 1) -> list[dict[str, Any]]:
    """What `lookaround.py` prints in a container; HostError when it fails."""
    user = agent.user(ctx.lab, one.node)
    try:
        done = ctx.engine.exec(one.name, look_around(*words), user=user, limit=limit)
    except ProcessTimeout as failure:
        # Its message would show the whole program.
        message = f"{words[0]}: timed out after {limit:.0f} s"
        raise HostError(message, hint=restart(ctx, one), node=one.node) from failure
    if done.code or not done.out:
        stderr = (done.err.strip() or "no answer").splitlines()[-1]
        raise HostError(f"cannot examine the node: {stderr}", hint=RECREATE, node=one.node)
    return [json.loads(line) for line in done.out.splitlines()]
