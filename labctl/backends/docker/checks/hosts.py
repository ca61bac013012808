"""Several hosts of one lab: reachable, a shared directory, free ports, room for the lab's files, the same versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from tempfile import NamedTemporaryFile

from labctl.backends.docker.checks.examination import GIB, UP, CheckContext, gib
from labctl.backends.docker.checks.host import largest
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import HostPortUser, elsewhere
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import HERE
from labctl.system import routing

HOME_SPACE = GIB // 64
"""What the lab's own files, keys and workloads of a usual size take."""


def unreachable(target: InventoryHost, failure: HostError) -> Finding:
    """The finding of a host that ssh does not reach, or where labctl cannot do anything."""
    impact = "its nodes cannot be created, used or examined; other hosts are not affected"
    fix = failure.hint or ssh_errors.command(target, "-v")
    return error("LAB-HOST-004", failure.message, impact, fix, node=target.name)


def shared_directory(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the host sees the shared directory: a file that is created here is looked for there."""
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
    """The port of the nodes' sshd, which is one of the host's own: free, or used by this lab's node."""
    lab, facts = ctx.lab, ctx.facts
    if lab.network != "host" or facts is None:
        return
    port, user = lab.ssh_port, facts.ports.get(lab.ssh_port)
    workers = [one for one in ctx.daemon.port_users() if one.port == port]
    foreign = next(filter(None, (other_lab(ctx, one) for one in workers)), "")
    if foreign:
        yield port_in_use(ctx, "LAB-PORT-002", "LAB_SSH_PORT", port, foreign)
    elif workers and user in (None, "root", facts.user):
        yield ok("LAB-PORT-002", f"port {port} is used by {workers[0].container.node}")
    elif user:
        yield port_in_use(ctx, "LAB-PORT-002", "LAB_SSH_PORT", port, f"a program of user {user}")
    else:
        yield ok("LAB-PORT-002", f"port {port} is free for sshd")


def other_lab(ctx: CheckContext, one: HostPortUser) -> str:
    """A node that is not this lab's, in words, with how to stop its lab where that is known; else empty."""
    found, lab = one.container, ctx.lab
    owner = elsewhere(found.directory, lab.directory, found.owner, lab.owner, found.host)
    whose = f" ({owner.name}; to stop it: {owner.remedy})" if owner else ""
    return f"{found.node} of lab `{one.lab}`{whose}" if owner or one.lab != lab.name else ""


def master_port(ctx: CheckContext) -> Iterator[Finding]:
    """The port where ranks meet, on the first host; that of a running lab is examined in the node."""
    lab, facts = ctx.lab, ctx.facts
    if lab.network != "host" or facts is None or ctx.name != lab.nodes[0].host or ctx.run_active:
        return
    user = facts.ports.get(lab.master_port)
    up = any(one.role == "worker" and one.state == "running" for one in ctx.observed.containers)
    if user and not (up and user == facts.user):
        yield port_in_use(ctx, "LAB-PORT-003", "LAB_MASTER_PORT", lab.master_port, f"a program of user {user}")
    elif not up:
        yield ok("LAB-PORT-003", f"port {lab.master_port} is free for the ranks of a run")


def port_in_use(ctx: CheckContext, code: str, key: str, port: int, owner: str) -> Finding:
    free = routing.free_port(port, {*ctx.used_ports, ctx.lab.ssh_port, ctx.lab.master_port})
    impact = "nodes on several hosts use the hosts' network, and two programs cannot listen on one port"
    fix = ctx.set_setting(key, str(free))
    return error(code, f"port {port} is in use by {owner}", impact, fix)


def home_space(ctx: CheckContext) -> Iterator[Finding]:
    """Disk for the files that are pushed to the host."""
    facts = ctx.facts
    if facts is None or not ctx.host.directory or facts.home_free is None:
        return
    summary = f"{gib(facts.home_free)} free at {facts.home}"
    if facts.home_free >= HOME_SPACE:
        yield ok("LAB-DISK-004", f"{summary} for the lab's files")
        return
    impact = "the lab's files and the records of runs are kept there"
    yield error("LAB-DISK-004", summary, impact, ctx.command(largest(facts.home)))


def differences(ctx: CheckContext) -> Iterator[Finding]:
    """Image, engine, driver and MTU, which the hosts of one lab should have in common."""
    hosts = {one.name: one for one in ctx.hosts}
    answering = [one for one in ctx.hosts if not one.engine_error]

    def typed(command: str) -> Callable[[str], str]:
        return lambda host: hosts[host].command(f"{command} everywhere")

    values = {one.name: one.observed.image for one in answering}
    impact = "ranks of one run would run different code"
    yield from differing("LAB-IMAGE-004", f"image {ctx.lab.image} is", values, impact, lambda _: UP)
    values = {one.name: str(one.info["ServerVersion"]) for one in answering}
    impact, fix = "what works on one host may not on another", typed("docker version  # have the same")
    yield from differing("LAB-HOST-005", "Docker Engine", values, impact, fix)
    values = {one.name: one.host.driver for one in ctx.hosts}
    impact, fix = "libraries of one run would meet different drivers", typed("uname -a  # have the same driver")
    yield from differing("LAB-HOST-006", "driver", values, impact, fix)
    if ctx.lab.network == "host":
        values = {one.name: one.read(f"sys/class/net/{one.host.interface}/mtu") for one in ctx.hosts}
        set_mtu = {
            one.name: one.as_root(f"ip link set dev {one.host.interface} mtu {common(values)}") for one in ctx.hosts
        }
        impact = "large packets from one host to another are lost: a run starts, and then stalls"
        yield from differing("LAB-NET-008", "MTU", values, impact, set_mtu.__getitem__)


def differing(
    code: str, what: str, values: Mapping[str, str | None], impact: str, fix: Callable[[str], str]
) -> Iterator[Finding]:
    """A warning for each host that differs from most; those without a value are left out."""
    found = {host: value for host, value in values.items() if value}
    usual = common(found)
    different = {host: value for host, value in found.items() if value != usual}
    for host, value in different.items():
        summary = f"{what} {short(value)}, and {short(usual)} on {len(found) - len(different)} of {len(found)} hosts"
        yield warn(code, summary, impact, fix(host), node=host)
    if len(found) > 1 and not different:
        yield ok(code, f"{what} {short(usual)} on all {len(found)} hosts")


def common(values: Mapping[str, str | None]) -> str:
    """The value that most have; of several, that of the first host."""
    return next((value for value, _ in Counter(values.values()).most_common(1) if value), "")


def short(value: str) -> str:
    return value.removeprefix("sha256:")[:12] if value.startswith("sha256:") else value
