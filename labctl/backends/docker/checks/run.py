"""The list of checks; all of them are run by `labctl doctor`, those that can stop a command as its preflight.

A check is a function in ``checks/`` that yields findings; adding one is adding a function and its line here. Functions
are named, not imported: `up` and `run` load only the checks that can stop them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.checks.examination import COUNT_SECONDS, LIMIT, SSH_SECONDS, TRAFFIC_SECONDS, CheckContext
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images import catalog
from labctl.backends.docker.lab.cluster import Cluster, connect, last_dump, load_lab, placement, read_inventory
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import Container
from labctl.config.context import Context, require_named
from labctl.errors import ConfigError, HostError, LabError, parsing
from labctl.model import HERE, Lab
from labctl.system.parallel import map_hosts, run_with_deadlines

ENGINE_SECONDS = 30.0
"""For what is asked of a host's engine before the checks, and for the preflight of a host."""
ANSWERING = 20
"""Seconds for one answer of an engine: it is slow while it stores a large image."""
SKEW = 30.0
"""Seconds between clocks that `up` warns of."""
VENDOR_TOOL_SECONDS = 20.0


class Check(Struct, frozen=True):
    """A check, and where it applies."""

    function: str
    """Module and function below ``labctl.backends.docker.checks``."""
    scope: Literal["machine", "host", "lab", "node"] = "host"
    """What it is called for: this machine, each host, all hosts as a whole, or each running container."""
    engine: bool = True
    """Whether it needs a Docker daemon that answers."""
    lab: bool = True
    """Whether it needs the lab's devices to be there."""
    stops: str = ""
    """The command that its errors stop, which calls it as preflight."""
    seconds: float = LIMIT

    @property
    def name(self) -> str:
        return self.function.partition(".")[2]

    def run(self, ctx: CheckContext, *container: Container) -> Iterator[Finding]:
        module, _, name = self.function.partition(".")
        findings: Iterator[Finding] = getattr(import_module(f"labctl.backends.docker.checks.{module}"), name)(
            ctx, *container
        )
        return findings


CHECKS: tuple[Check, ...] = (
    Check("host.cores", engine=False),
    Check("host.memory", engine=False),
    Check("host.shared_memory", "machine", engine=False, stops="up"),
    Check("hosts.shared_directory", engine=False, lab=False, stops="up"),
    Check("host.mounts", engine=False, stops="up"),
    Check("host.cache_space", engine=False, lab=False),
    Check("host.run_space", "machine", engine=False, lab=False, stops="run"),
    Check("host.proxies", "machine", engine=False, lab=False),
    Check("host.certificates", "machine", engine=False, lab=False),
    Check("devices.vendor_host", engine=False),
    Check("devices.permissions", engine=False, stops="up"),
    Check("devices.health", engine=False, seconds=VENDOR_TOOL_SECONDS),
    Check("devices.leases", engine=False),
    Check("engine.compose", "machine", engine=False, lab=False, stops="compose up"),
    Check("engine.buildx", "machine", engine=False, lab=False),
    Check("engine.version", lab=False, stops="up"),
    Check("hosts.ssh_port", stops="up"),
    Check("hosts.master_port", stops="up"),
    Check("hosts.home_space", engine=False, stops="up"),
    Check("hosts.differences", "lab"),
    Check("engine.cgroups"),
    Check("engine.clock", lab=False),
    Check("engine.space", lab=False),
    Check("engine.limits"),
    Check("devices.container_starts", seconds=VENDOR_TOOL_SECONDS),
    Check("files.lab_name", lab=False),
    Check("engine.image", lab=False),
    Check("engine.driver"),
    Check("network.address_pools", lab=False),
    Check("network.mtu", lab=False),
    Check("network.arp_table", engine=False),
    Check("files.keys", "lab"),
    Check("files.rendered", "lab"),
    Check("nodes.states"),
    Check("network.members"),
    Check("nodes.ssh", "lab", seconds=SSH_SECONDS),
    Check("network.traffic", "lab", seconds=TRAFFIC_SECONDS),
)
NODE_CHECKS = (
    Check("nodes.inside", "node"),
    Check("devices.framework_count", "node", seconds=COUNT_SECONDS),
)


def findings(context: Context, *, node: str = "") -> tuple[Finding, ...]:
    """Examine the hosts and the lab, or one node and its host."""
    from labctl.backends.docker.checks.hosts import unreachable

    settings = context.settings()
    require_named(context, settings)
    inventory = read_inventory(context.directory, settings)
    host = placement(settings, inventory).get(node)
    # The other hosts are needed too where their addresses are not known from before.
    known = all(last_dump(context.directory, one.name) for one in inventory)
    only = (host,) if host and known else ()
    with connect(context, settings, only, seconds=ANSWERING, demand=False) as cluster:
        failed = [unreachable(one, cluster.failed[one.name]) for one in cluster.inventory if one.name in cluster.failed]
        unreached = tuple(one for one in failed if one.node not in cluster.connections)
        try:
            # Its warnings are among the findings.
            lab, lacking = lab_to_examine(replace(context, emit=lambda _: None), cluster)
        except HostError as failure:
            if any(failure is one for one in cluster.failed.values()):
                first = cluster.inventory[0].name
                seen = f"is reachable; examined once {first} was reached"
                found = {name: ok("LAB-HOST-004", seen, name) for name in cluster.connections}
                found |= {one.node: one for one in failed}
                return tuple(found[target.name] for target in cluster.inventory if target.name in found)
            impact = "the lab cannot be placed on these hosts; further checks skipped"
            wrong = error("LAB-HOST-007", failure.message, impact, failure.hint, node=failure.node or HERE)
            return (*unreached, wrong)
        return (*unreached, *examine(check_context(context, cluster, lab, only=node), lacking))


def lab_to_examine(context: Context, cluster: Cluster) -> tuple[Lab, Mapping[str, LabError]]:
    """The lab, and the hosts that lack devices for it; where all of them do, the lab without devices."""
    try:
        lab, able = load_lab(context, cluster, ask=can_probe(cluster), refresh=True)
        return lab, {name: why for name, why in able.failed.items() if name not in cluster.failed}
    except (HostError, ConfigError) as lacking:
        settings = cluster.settings
        image = settings.text("LAB_IMAGE") or catalog.tag(settings.text("LAB_ACCELERATOR"))
        for key, value in (("LAB_IMAGE", image), ("LAB_ACCELERATOR", "cpu"), ("LAB_DEVICES", "")):
            settings = settings.with_value(key, value, origin="a host without devices")
        # An error that has nothing to do with devices is raised again.
        lab, _ = load_lab(context, replace(cluster, settings=settings), ask=False)
        return lab, dict.fromkeys((HERE, *(host.name for host in lab.hosts)), lacking)


def can_probe(cluster: Cluster) -> bool:
    """Whether every host has an engine, and the image to try limits with."""
    hosts = {one.name: one.name for one in cluster.hosts}
    found, failed = map_hosts(lambda name: cluster.engine.capabilities(name).image_id(cluster.image), hosts)
    return not failed and None not in found.values()


def check_context(context: Context, cluster: Cluster, lab: Lab, *, only: str = "") -> CheckContext:
    """The lab as a whole, and each host that ssh reaches."""
    whole = CheckContext(lab=lab, settings=cluster.settings, environ=context.environ, engine=cluster.engine, only=only)
    used = frozenset(port for one in cluster.facts.values() for port in one.ports)
    names = {host.name for host in lab.hosts}
    hosts = (
        replace(
            whole,
            engine=DockerEngine(cluster.connections[name], seconds=ANSWERING),
            connection=cluster.connections[name],
            facts=facts,
            used_ports=used,
            root=cluster.root(name),
        )
        for name, facts in cluster.facts.items()
        if name in names
    )
    return replace(whole, hosts=tuple(hosts))


def preflight(context: Context, lab: Lab, cluster: Cluster, command: str) -> Cluster:
    """Check what can stop a command, before it changes anything: the cluster without the hosts that fail.

    HostError for this machine, and where no host is left. A clock that is off is only warned of.
    """
    if not cluster.daemons:
        return cluster
    for name, facts in cluster.facts.items():
        if abs(facts.skew) > SKEW:
            way = "ahead" if facts.skew > 0 else "behind"
            context.warn(f"{name}: its clock is {abs(facts.skew):.0f} s {way}; `labctl doctor` says how to set it")
    ctx = check_context(context, cluster, lab)
    answering = tuple(host for host in ctx.hosts if host.name in cluster.engine.hosts)
    return cluster.excluding(failing_hosts(replace(ctx, hosts=answering), command))


def require_compose(context: Context, lab: Lab, cluster: Cluster) -> None:
    """HostError unless this machine's docker compose can create a lab's containers."""
    if cluster.daemons:
        failing_hosts(check_context(context, cluster, lab), "compose up")


def failing_hosts(whole: CheckContext, command: str) -> dict[str, HostError]:
    """The hosts that cannot take part in a command, and the first reason of each. HostError for this machine."""
    checks = [check for check in CHECKS if check.stops == command]
    for reason in stopping([check for check in checks if whole.local or check.scope != "host"], whole):
        raise reason
    host_checks = [check for check in checks if check.scope == "host"]

    def first_reason(host: CheckContext) -> list[HostError]:
        try:
            with parsing(host.name):
                return list(islice(stopping(host_checks, host), 1))
        except HostError as failure:
            return [failure]

    late = [HostError(f"preflight timed out after {ENGINE_SECONDS:.0f} s", hint="labctl doctor")]
    found = run_with_deadlines([(partial(first_reason, host), ENGINE_SECONDS) for host in whole.hosts])
    failed = {}
    for host, reasons in zip(whole.hosts, found, strict=True):
        for why in late if reasons is None else reasons:
            message = f"{host.name}: {why.message.removeprefix(f'{host.name}: ')}"
            failed[host.name] = HostError(message, hint=why.hint, node=host.name)
    return failed


def stopping(checks: Iterable[Check], ctx: CheckContext) -> Iterator[HostError]:
    """The errors that the checks find, one by one."""
    for check in checks:
        for one in check.run(ctx):
            if one.level == "error":
                message = f"{one.summary} ({one.code}): {one.impact}"
                yield HostError(message, hint=one.fix, node=None if one.node == HERE else one.node)


def examine(whole: CheckContext, lacking: Mapping[str, LabError] | None = None) -> tuple[Finding, ...]:
    """Run all checks concurrently, each with its time limit; findings are in the order of the checks.

    On hosts ``lacking`` the lab's devices only checks that do not need them are run. ConfigError where the one node to
    examine is not part of the lab.
    """
    from labctl.backends.docker.checks import devices, engine

    if whole.only and not whole.names:
        known = ", ".join(node.name for node in whole.lab.nodes)
        raise ConfigError(f"lab {whole.lab.name} has no node `{whole.only}`", hint=f"it has launcher, {known}")
    lacking = lacking or {}
    hosts = (whole,) if whole.local else whole.hosts
    late = HostError(f"Docker Engine does not answer within {ENGINE_SECONDS:.0f} s")
    asked = run_with_deadlines([(partial(ask_engine, host), ENGINE_SECONDS) for host in hosts])
    hosts = tuple(new or replace(old, engine_error=late) for old, new in zip(hosts, asked, strict=True))
    silent = [engine.silent(host, host.engine_error) for host in hosts if host.engine_error]
    all_silent = late if len(silent) == len(hosts) else None
    whole = hosts[0] if whole.local else replace(whole, hosts=hosts, engine_error=all_silent)
    by_name = {host.name: host for host in hosts}
    unable = [
        replace(devices.missing(by_name.get(why.node or HERE, hosts[0]), why), node=why.node or HERE)
        for why in dict.fromkeys(lacking.values())
        if hosts and why.node in (None, HERE, *by_name)
    ]
    tasks = [
        CheckTask(check, ctx)
        for check in CHECKS
        for ctx in (hosts if check.scope == "host" else (whole,))
        if not (check.lab and ctx.name in lacking) and not (check.engine and ctx.engine_error)
    ]
    tasks += [
        CheckTask(check, host, container)
        for host in hosts
        if not (host.name in lacking or host.engine_error)
        for container in host.running
        for check in NODE_CHECKS
    ]
    results = run_with_deadlines([(task.findings, task.check.seconds) for task in tasks])
    found: list[Finding] = []
    for task, result in zip(tasks, results, strict=True):
        found += [task.timed_out()] if result is None else result
    # Nothing more is reported of a host that does not answer.
    shown = [one for one in found if one.node in (HERE, *by_name) or whole.only in ("", one.node)]
    return (*unable, *silent, *shown)


def ask_engine(ctx: CheckContext) -> CheckContext:
    """The same context with what many checks need of the engine; a copy with the error where it does not answer."""
    try:
        with parsing(ctx.name):
            _ = ctx.info, ctx.observed, ctx.network
    except HostError as failure:
        return replace(ctx, engine_error=failure)
    return ctx


class CheckTask(Struct, frozen=True):
    """One check of one host or container."""

    check: Check
    ctx: CheckContext
    container: Container | None = None

    @property
    def node(self) -> str:
        return self.container.node if self.container else self.ctx.name

    def findings(self) -> list[Finding]:
        """What the check finds; a check that fails is a finding too."""
        found: list[Finding] = []
        try:
            with parsing(self.ctx.name):
                # One by one: those before a failure stay.
                found.extend(self.check.run(self.ctx, *filter(None, (self.container,))))
        except LabError as failure:
            fix = "" if failure.hint == "labctl doctor" else failure.hint
            found.append(self.failed(failure.message, "the check got no answer", fix, node=failure.node or HERE))
        except (OSError, ValueError) as failure:
            # A file that may not be read, or an answer in an unknown format.
            path = getattr(failure, "filename", None)
            fix = f"ls -ld {shlex.quote(str(path))}" if path else ""
            found.append(self.failed(str(failure), "the check could not read what it examines", fix))
        return [replace(one, node=self.node) if one.node == HERE else one for one in found]

    def timed_out(self) -> Finding:
        text, impact = f"timed out after {self.check.seconds:.0f} s", "the host, a disk, the engine or the node hangs"
        return replace(self.failed(text, impact, node=self.node), code="LAB-CHECK-002")

    def failed(self, text: str, impact: str, fix: str = "", node: str = HERE) -> Finding:
        """Fixed by looking at the log of what is examined where nothing else is known."""
        log = self.ctx.as_root("journalctl -u docker -n 50" if self.check.engine else "dmesg | tail -n 50")
        if self.container:
            log = f"labctl logs {self.container.node}"
        return warn("LAB-CHECK-001", f"{self.check.name}: {text}", impact, fix or log, node=node)
