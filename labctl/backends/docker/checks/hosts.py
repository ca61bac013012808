"""Hosts of one lab: reachable, with the shared directory, free ports, disk for the lab, and equal versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from tempfile import NamedTemporaryFile

from labctl.backends.docker.checks.examination import GIB, UP, CheckContext
from labctl.backends.docker.checks.host import largest
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import HostPortUser, elsewhere
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import HERE
from labctl.system import human, routing

HOME_SPACE = GIB // 64
"""Disk that the lab's files, keys and workloads of a usual size take."""


def unreachable(target: InventoryHost, failure: HostError) -> Finding:
    """Return the error finding of a host that ssh cannot reach, or on which labctl cannot work."""
    impact = "its nodes cannot be created, used or examined; other hosts are not affected"
    fix = failure.hint or ssh_errors.command(target, "-v")
    return error("LAB-HOST-004", failure.message, impact, fix, node=target.name)


def shared_directory(ctx: CheckContext) -> Iterator[Finding]:
    """Create a file here and look for it on the host: ok, or an error if it does not see LAB_SHARED_DIR."""
    directory = ctx.settings.text("LAB_SHARED_DIR")
    if not directory or ctx.name == HERE:
        return
    with NamedTemporaryFile(dir=ctx.lab.directory, prefix=".seen-") as marker:
        seen = ctx.files((marker.name,))[marker.name].exists
    if seen:
        yield ok("LAB-HOST-008", f"sees {directory} as it is here")
        return
    impact = "LAB_SHARED_DIR must be the same directory on all hosts, as over NFS"
    fix = f"{ctx.unset_setting('LAB_SHARED_DIR')}  # the lab's files are then pushed; or mount it there"
    yield error("LAB-HOST-008", f"does not see {directory}", impact, fix)


def ssh_port(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok if the nodes' sshd port is free on the host or this lab's, else an error; nothing on a bridge."""
    lab, facts = ctx.lab, ctx.facts
    if lab.network != "host" or facts is None:
        return
    port, user = lab.ssh_port, facts.ports.get(lab.ssh_port)
    workers = [worker for worker in ctx.daemon.port_users() if worker.port == port]
    foreign = next(filter(None, (other_lab(ctx, worker) for worker in workers)), "")
    if foreign:
        yield port_in_use(ctx, "LAB-PORT-002", "LAB_SSH_PORT", port, foreign)
    elif workers and user in (None, "root", facts.user):
        yield ok("LAB-PORT-002", f"port {port} is used by {workers[0].container.node}")
    elif user:
        yield port_in_use(ctx, "LAB-PORT-002", "LAB_SSH_PORT", port, f"a program of user {user}")
    else:
        yield ok("LAB-PORT-002", f"port {port} is free for sshd")


def other_lab(ctx: CheckContext, user: HostPortUser) -> str:
    """Describe another lab's node that uses a port, with how to stop it if known; "" for a node of this lab."""
    container, lab = user.container, ctx.lab
    owner = elsewhere(container.directory, lab.directory, container.owner, lab.owner, container.host)
    whose = f" ({owner.name}; to stop it: {owner.remedy})" if owner else ""
    return f"{container.node} of lab `{user.lab}`{whose}" if owner or user.lab != lab.name else ""


def master_port(ctx: CheckContext) -> Iterator[Finding]:
    """Check that the master port is free on the first host; nothing during a run or on a bridge.

    A warning if another lab's run may have it, which ends, else an error.
    """
    lab, facts = ctx.lab, ctx.facts
    if lab.network != "host" or facts is None or ctx.name != lab.nodes[0].host or ctx.run_active:
        return
    user = facts.ports.get(lab.master_port)
    up = any(container.role == "worker" and container.state == "running" for container in ctx.observed.containers)
    if not user and not up:
        yield ok("LAB-PORT-003", f"port {lab.master_port} is free for the ranks of a run")
    if not user or (up and user == facts.user):
        return
    owner = f"a program of user {user}"
    in_use = port_in_use(ctx, "LAB-PORT-003", "LAB_MASTER_PORT", lab.master_port, owner)
    others = filter(None, (other_lab(ctx, worker) for worker in ctx.daemon.port_users()))
    if other := next(others, ""):
        summary, impact = f"{in_use.summary}, perhaps a run of {other}", "a run of this lab cannot begin before it ends"
        in_use = warn("LAB-PORT-003", summary, impact, in_use.fix)
    yield in_use


def port_in_use(ctx: CheckContext, code: str, key: str, port: int, owner: str) -> Finding:
    """Return the error about a port, with the command that sets a free one."""
    free = routing.free_port(port, {*ctx.used_ports, ctx.lab.ssh_port, ctx.lab.master_port})
    impact = "nodes on several hosts use the hosts' network, and two programs cannot listen on one port"
    fix = ctx.set_setting(key, str(free))
    return error(code, f"port {port} is in use by {owner}", impact, fix)


def home_space(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or an error if a host that is sent files has less than HOME_SPACE free at its home."""
    facts = ctx.facts
    if facts is None or not ctx.host.directory or facts.home_free is None:
        return
    summary = f"{human.memory(facts.home_free)} free at {facts.home}"
    if facts.home_free >= HOME_SPACE:
        yield ok("LAB-DISK-004", f"{summary} for the lab's files")
        return
    impact = "the lab's files and the records of runs are kept there"
    yield error("LAB-DISK-004", summary, impact, ctx.command(largest(facts.home)))


def differences(ctx: CheckContext) -> Iterator[Finding]:
    """Yield a warning per host whose image, engine, driver or MTU differs from the most common; else ok for each."""
    hosts = {each.name: each for each in ctx.hosts}
    answering = [each for each in ctx.hosts if not each.engine_error]

    def typed(command: str) -> Callable[[str], str]:
        """Return a function from a host to the command line that a user types here for it."""
        return lambda name: hosts[name].command(f"{command} everywhere")

    values = {each.name: each.observed.image for each in answering}
    impact = "ranks of one run would run different code"
    yield from differing("LAB-IMAGE-004", f"image {ctx.lab.image} is", values, impact, lambda _: UP)
    values = {each.name: str(each.info["ServerVersion"]) for each in answering}
    impact, fix = "what works on one host may not on another", typed("docker version  # have the same")
    yield from differing("LAB-HOST-005", "Docker Engine", values, impact, fix)
    values = {each.name: each.host.driver for each in ctx.hosts}
    impact, fix = "libraries of one run would meet different drivers", typed("uname -a  # have the same driver")
    yield from differing("LAB-HOST-006", "driver", values, impact, fix)
    if ctx.lab.network == "host":
        values = {each.name: each.read(f"sys/class/net/{each.host.interface}/mtu") for each in ctx.hosts}
        set_mtu = {
            each.name: each.as_root(f"ip link set dev {each.host.interface} mtu {common(values)}") for each in ctx.hosts
        }
        impact = "large packets from one host to another are lost: a run starts, and then stalls"
        yield from differing("LAB-NET-008", "MTU", values, impact, set_mtu.__getitem__)


def differing(
    code: str, subject: str, values: Mapping[str, str | None], impact: str, fix: Callable[[str], str]
) -> Iterator[Finding]:
    """Yield a warning per host whose value is not the most common one, or ok if all of two or more hosts agree."""
    given = {host: value for host, value in values.items() if value}
    usual = common(given)
    different = {host: value for host, value in given.items() if value != usual}
    for host, value in different.items():
        summary = f"{subject} {short(value)}, and {short(usual)} on {len(given) - len(different)} of {len(given)} hosts"
        yield warn(code, summary, impact, fix(host), node=host)
    if len(given) > 1 and not different:
        yield ok(code, f"{subject} {short(usual)} on all {len(given)} hosts")


def common(values: Mapping[str, str | None]) -> str:
    """Return the most common value, on a tie the first; empty if most hosts have none."""
    return next((value for value, _ in Counter(values.values()).most_common(1) if value), "")


def short(value: str) -> str:
    """Return the first 12 digits of a ``sha256:`` id; any other value unchanged."""
    return value.removeprefix("sha256:")[:12] if value.startswith("sha256:") else value
