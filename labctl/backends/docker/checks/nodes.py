"""The lab's containers: running as configured, reachable from the launcher, and correct as seen from within."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from msgspec.structs import replace

from labctl import naming
from labctl.accelerators import leases
from labctl.backends.docker import agent
from labctl.backends.docker.checks.engine import judge_skew, skew
from labctl.backends.docker.checks.examination import RECREATE, SSH_SECONDS, UP, CheckContext
from labctl.backends.docker.deploy import applied, drift, plan
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.finding import LIMIT, Finding, error, ok, warn
from labctl.backends.state import Container, awaits_check, lost, not_running
from labctl.config import override
from labctl.config.settings import EXTRA
from labctl.errors import HostError
from labctl.model import LAUNCHER
from labctl.system import files, human
from labctl.system.process import ProcessTimeout

NEEDED = "a run needs every node"
FAILED = (1, 126, 127)
"""Exit codes of a node that ended by itself: others are of signals, or of an engine that was restarted."""
Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network
PATIENCE = 8
"""Seconds for a login from the launcher and for sending bytes: on busy cores a login takes several."""
SENT_BYTES = 1 << 20
"""Bytes sent through ssh to measure the rate."""
NO_USE_TO_RESTART = ("Could not resolve", "No route to host", "Network is unreachable", "Permission denied")
"""Words of ssh on a name, network or key, not on an sshd that hangs."""
NO_CLIENT = re.compile(r"failed to run command .ssh.")
"""Words of timeout(1) in an image without ssh."""
LEAST_SHARED = 0.1
"""Share of /dev/shm that is free if no run is under way."""
SLOW = 1e6
"""Bytes per second through ssh below which it is a warning; a laptop has a hundred times as much."""


def states(ctx: CheckContext) -> Iterator[Finding]:
    """Yield a finding per container on whether it exists, runs and is current, and a warning per surplus one."""
    lab, observed = ctx.lab, ctx.observed
    if not observed.containers:
        yield ok("LAB-NODE-001", f"lab {lab.name} is down")
        return
    content = {file.path: file.content for file in ctx.rendered}
    for name in ctx.names:
        owner = lab.nodes[0].name if name == LAUNCHER else name
        fingerprint = naming.fingerprint(content[naming.compose_path(owner)])
        yield state(ctx, name, observed.container(name), fingerprint)
    expected = replace(ctx, only="").names
    for container in observed.containers:
        if container.node not in expected and not ctx.only:
            impact = "the settings ask for fewer nodes; it uses cores and memory"
            yield warn("LAB-NODE-005", "not in the settings", impact, UP, node=container.node, auto_fixable=True)


def state(ctx: CheckContext, name: str, container: Container | None, fingerprint: str) -> Finding:
    """Return ok, warning or error by a container's state, health and fingerprint; None: the container is missing."""
    wrong = partial(error, node=name, auto_fixable=True)
    if container is None:
        return wrong("LAB-NODE-001", "is missing", NEEDED, UP)
    if finding := unusable(ctx, name, container):
        return finding
    image = ctx.observed.image
    if image and (reason := plan.why_not_current(container, fingerprint, image)):
        why = plan.named(reason, applied.changed(ctx.lab.directory, ctx.settings))
        return wrong("LAB-NODE-003", f"is out of date: {why}", "`labctl run` refuses a lab that is out of date", UP)
    if container.health == "unhealthy" and not awaits_check(container):
        summary, impact = f"is unhealthy: {container.reason}", "a machine that is too busy, or a node that hangs"
        return warn("LAB-NODE-006", summary, impact, restart(ctx, container), node=name, auto_fixable=True)
    health = {"healthy": " and is healthy"}.get(container.health or "", "")
    return ok("LAB-NODE-001", f"runs{health}", name)


def unusable(ctx: CheckContext, name: str, container: Container) -> Finding | None:
    """Return the finding of a container that is paused, lost what a run needs, is stuck or not running; else None."""
    wrong = partial(error, node=name, auto_fixable=True)
    if container.state == "paused":
        fix = ctx.command(f"docker unpause {container.name}")
        return wrong("LAB-NODE-002", "is paused", "a run would wait for its processes for ever", fix)
    if cause := lost(container.reason):
        return wrong("LAB-NODE-004", f"is unhealthy: {container.reason}", f"a run on it would end with {cause}", UP)
    stuck = plan.why_stuck(ctx.lab, container, {})
    if stuck:
        return wrong("LAB-NODE-001", stuck, NEEDED, UP)
    return None if container.state == "running" else stopped(ctx, container)


def stopped(ctx: CheckContext, container: Container) -> Finding:
    """Return the error of a container that does not run, with the last words of a node that failed by itself."""
    node, summary = container.node, not_running(container)
    adds = f" in {override.FILE}" if node in dict(ctx.lab.override) else ""
    if container.exit_code in FAILED:
        fix = f"labctl logs {node}  # mend what it names{adds}, then: {UP}"
        return error("LAB-NODE-001", f"{summary}: {agent.last_line(ctx.lab, ctx.engine, node)}", NEEDED, fix, node=node)
    if container.reason and adds:
        fix = f"${{EDITOR:-vi}} {override.FILE}  # it adds to {node}; then: {UP}"
        return error("LAB-NODE-001", f"{summary}: {container.reason}", NEEDED, fix, node=node)
    summary = f"{summary}: {container.reason}" if container.reason else summary
    return error("LAB-NODE-001", summary, NEEDED, UP, node=node, auto_fixable=True)


def restart(ctx: CheckContext, container: Container) -> str:
    """Return the command that restarts a node: at its start it copies its host key and authorized keys."""
    return ctx.at(container.node).command(f"docker restart -t 1 {container.name}")


# --- from the launcher ---------------------------------------------------------------------------------------


def ssh(ctx: CheckContext) -> Iterator[Finding]:
    """Check each worker by ssh from the launcher: login, host key, rate; nothing if the launcher does not run."""
    workers = tuple(container for container in ctx.running if container.node != LAUNCHER)
    launcher = ctx.observed.container(LAUNCHER)
    if not workers or launcher is None or launcher.state != "running":
        return
    arguments = ("links", str(PATIENCE), str(SENT_BYTES), str(SLOW), *(worker.node for worker in workers))
    answers = {answer["node"]: answer for answer in ask(ctx, launcher, *arguments, limit=SSH_SECONDS - 1)}
    for worker in workers:
        answer = answers.get(worker.node, {"said": "the launcher gave no answer about it"})
        yield from link(ctx, worker, answer)


def link(ctx: CheckContext, worker: Container, answer: dict[str, Any]) -> Iterator[Finding]:
    """Yield ok or errors on a worker's ssh login and host key, and its throughput, from the launcher's answer."""
    if answer.get("name") != worker.node:
        stderr = str(answer["said"]) or f"no answer over ssh within {human.duration(PATIENCE)}"
        code, impact = "LAB-SSH-001", "launchers start ranks over ssh"
        summary = f"not reached from the launcher: {ssh_errors.ssh_reason(stderr)}"
        if "IDENTIFICATION HAS CHANGED" in stderr or "verification failed" in stderr:
            code, summary = "LAB-SSH-002", "its host key is not the one pinned for it"
            impact = "something else than the node created by `labctl up` may answer in its name; it is not trusted"
        fix, auto = way_out(ctx, worker, stderr)
        yield error(code, summary, impact, fix, node=worker.node, auto_fixable=auto)
        return
    yield ok("LAB-SSH-001", f"reached from the launcher in {human.duration(answer['seconds'])}", worker.node)
    rate = answer["rate"]
    if rate is None or rate < SLOW:
        summary = f"{human.size(rate)}/s" if rate else f"less than {human.size(SENT_BYTES / PATIENCE)}/s"
        impact = "ranks exchange data over the same network"
        yield warn("LAB-NET-005", f"{summary} from the launcher", impact, RECREATE, node=worker.node)
    else:
        yield ok("LAB-NET-005", f"{human.size(rate)}/s through ssh from the launcher", worker.node)


def way_out(ctx: CheckContext, worker: Container, stderr: str) -> tuple[str, bool]:
    """Return what mends a worker that ssh does not reach, and whether doctor may do it."""
    if NO_CLIENT.search(stderr):
        return f"docker run --rm {ctx.lab.image} ssh -V  # install an ssh client in this image, then: {UP}", False
    # The launcher has a wrong address of it, or none, or a wrong key: another start of the worker changes nothing.
    recreate = any(words in stderr for words in NO_USE_TO_RESTART)
    return RECREATE if recreate else restart(ctx, worker), True


# --- from within ---------------------------------------------------------------------------------------------


def inside(ctx: CheckContext, container: Container) -> Iterator[Finding]:
    """Look at a node from within; yield findings on its mounts, clock, interfaces and, on the first, master port."""
    for why in drift.replaced(ctx.lab, ctx.engine, (container,)).values():
        impact = "the node sees the old directory, and `labctl run` the new one"
        yield error("LAB-NODE-003", f"is out of date: {why}", impact, UP, auto_fixable=True)
    before = time.time()
    (seen,) = ask(ctx, container, "look", str(ctx.lab.master_port))
    yield judge_skew(ctx, skew(seen["time"], before), "its clock")
    yield from interfaces(ctx, seen)
    yield from shared_memory(ctx, container, *seen["shared_memory"])
    if container.node == ctx.lab.nodes[0].name:
        yield master_port(ctx, container, seen["listener"])


def shared_memory(ctx: CheckContext, container: Container, free: int, size: int) -> Iterator[Finding]:
    """Yield ok, or an error if /dev/shm of a node is nearly full; nothing during a run, which uses it."""
    if ctx.run_active:
        return
    summary = f"{human.memory(free)} of {human.memory(size)} free in /dev/shm"
    if free >= size * LEAST_SHARED:
        yield ok("LAB-SHM-002", summary)
        return
    impact = "ranks and data loaders exchange data there, and die of SIGBUS when it is full"
    # A restart empties it, also of files of other users; not auto-fixable, as it ends what the user runs there.
    fix = f"{restart(ctx, container)}  # ends notebooks and commands in it"
    yield error("LAB-SHM-002", summary, impact, fix)


def interfaces(ctx: CheckContext, seen: dict[str, Any]) -> Iterator[Finding]:
    """Yield an error per collective library configured with an interface off the lab's network; ok if none."""
    addresses, subnets = seen["addresses"], subnets_of(ctx)
    on_lab = [name for name, text in addresses.items() if is_within(text, subnets)]
    if ctx.lab.network == "host" and not on_lab:
        now = ", ".join(f"{name} {text}" for name, text in addresses.items())
        summary = f"no longer has address {ctx.host.address}: {now}"
        yield error("LAB-NET-004", summary, "the other nodes connect to it there", UP)
    if not on_lab:
        # Another check has a finding about a node without a network.
        return
    names = ", ".join(on_lab)
    wrong = {key: value for key, value in seen["variables"].items() if not chooses(key, value, on_lab, subnets)}
    for key, value in wrong.items():
        by_user = any(setting.key == EXTRA + key for setting in ctx.settings.extra)
        summary = f"{key}={value}, but the lab's network is on {names}"
        impact = "ranks would listen where no other node reaches them, and hang at their first collective"
        yield error(
            "LAB-NET-004", summary, impact, f"{ctx.unset_setting(EXTRA + key)} && {UP}" if by_user else RECREATE
        )
    if not wrong:
        yield ok("LAB-NET-004", f"collectives use {names}, which is on the lab's network")


def subnets_of(ctx: CheckContext) -> list[Subnet]:
    """Return the subnets of the lab's network; on the hosts' network, the host's address; [] without a network."""
    ranges = []
    if ctx.lab.network == "host":
        ranges = [ctx.host.address]
    elif ctx.network:
        ranges = [config["Subnet"] for config in ctx.network["IPAM"]["Config"]]
    return [ipaddress.ip_network(text) for text in ranges]


def is_within(address: str, subnets: Sequence[Subnet]) -> bool:
    """Tell if an address is in one of the subnets."""
    return any(ipaddress.ip_address(address) in subnet for subnet in subnets)


def chooses(key: str, value: str, interfaces: list[str], subnets: Sequence[Subnet] = ()) -> bool:
    """Return True if a library takes one of these interfaces by its list, or ``^`` and a list of excluded ones."""
    entries = [entry.strip() for entry in value.lstrip("^=").split(",") if entry.strip()]
    by_prefix = key.startswith(("NCCL", "HCCL")) and not value.startswith(("=", "^="))
    if by_prefix:
        taken = [name for name in interfaces if name.startswith(tuple(entries))]
    else:
        taken = [name for name in interfaces if name in entries]
    if value.startswith("^"):
        return len(taken) < len(interfaces)
    # Open MPI also takes networks, such as 172.18.0.0/16.
    networks = [entry for entry in entries if "/" in entry]
    return bool(taken) or any(covers(network, subnet) for network, subnet in product(networks, subnets))


def covers(network: str, subnet: Subnet) -> bool:
    """Tell if a network such as ``172.18.0.0/16`` overlaps a subnet; False if it cannot be parsed."""
    try:
        return ipaddress.ip_network(network, strict=False).overlaps(subnet)
    except (ValueError, TypeError):
        return False


def master_port(ctx: CheckContext, container: Container, listener: dict[str, Any] | None) -> Finding:
    """Return the finding about the first node's master port: ok if free or a run's, else an error with its user."""
    bridge, port, code = ctx.lab.network == "bridge", ctx.lab.master_port, "LAB-PORT-001"
    if listener is None:
        whose = "the lab's own, none of the host is used" if bridge else "free for the lab"
        return ok(code, f"ports {ctx.lab.ssh_port} (ssh) and {port} (master) are {whose}")
    if ctx.run_active:
        return ok(code, f"port {port} is in use by the active run")
    if listener["run"]:
        return ok(code, f"port {port} is in use by what run {listener['run']} left; the next run ends it")
    if pid := listener["pid"]:
        process, fix = f"pid {pid}: {listener['command']}", f"labctl exec --node {container.node} -- kill {pid}"
    else:
        process = "a process of another user"
        fix = RECREATE if bridge else ctx.set_setting("LAB_MASTER_PORT", str(port + 1))
    summary = f"port {port} is in use by {process} (user {leases.user_name(listener['uid'])})"
    return error(code, summary, "the ranks of a run meet there", fix)


def look_around(*arguments: str) -> tuple[str, ...]:
    """Return the command that runs `lookaround.py` by a container's own Python, so that it works in any image."""
    program = files.path("docker", "lookaround.py").read_text(encoding="utf-8")
    return ("/usr/bin/python3", "-I", "-c", program, *arguments)


def ask(ctx: CheckContext, container: Container, *arguments: str, limit: float = LIMIT - 1) -> list[dict[str, Any]]:
    """Run `lookaround.py` in a container; return its lines of JSON. HostError if it fails or times out."""
    user = agent.user(ctx.lab, container.node)
    try:
        done = ctx.engine.exec(container.name, look_around(*arguments), user=user, limit=limit)
    except ProcessTimeout as failure:
        # Its own message would show the whole program.
        message = f"{arguments[0]}: timed out after {human.duration(limit)}"
        raise HostError(message, hint=restart(ctx, container), node=container.node) from failure
    if done.code or not done.out:
        stderr = (done.err.strip() or "no answer").splitlines()[-1]
        raise HostError(f"cannot examine the node: {stderr}", hint=RECREATE, node=container.node)
    return [json.loads(line) for line in done.out.splitlines()]
