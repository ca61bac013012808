"""Registry of doctor's checks, and their execution: all of them by `labctl doctor`, some as preflight of a command.

A check is a function in ``checks/`` that yields findings, with a line in CHECKS. Functions are named, not imported:
`up` and `run` load only the checks that can stop them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, islice, product
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.checks.examination import (
    COUNT_SECONDS,
    HEALTH_SECONDS,
    SSH_SECONDS,
    TRAFFIC_SECONDS,
    CheckContext,
)
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images import catalog
from labctl.backends.docker.lab.cluster import Cluster, connect, last_dump, load_lab, placement, read_inventory
from labctl.backends.finding import LIMIT, Finding, Receiver, error, ignore, warn
from labctl.backends.state import Container
from labctl.config.context import Context, require_named
from labctl.errors import ConfigError, HostError, LabError, parsing
from labctl.model import HERE, Lab
from labctl.system import human, load
from labctl.system.parallel import map_hosts, run_with_deadlines

ENGINE_SECONDS = 30.0
"""Time limit of the requests to a host's engine before the checks, and of the preflight of a host."""
ANSWERING = 20
"""Time limit of one answer of an engine in seconds: it is slow while it stores a large image."""
SKEW = 30.0
"""Seconds between clocks above which `up` warns."""
VENDOR_TOOL_SECONDS = 20.0
LOAD_SECONDS = "0.3"
"""Time for which the load of a host is read."""


class Check(Struct, frozen=True):
    """A check, what it is called for, and what it needs."""

    function: str
    """Module and function below ``labctl.backends.docker.checks``."""
    scope: Literal["machine", "host", "lab", "node"] = "host"
    """Called for this machine, for each host, for the lab as a whole, or for each running container."""
    engine: bool = True
    """Needs a Docker daemon that answers."""
    lab: bool = True
    """Needs the lab's devices."""
    stops: str = ""
    """Command that runs it as preflight, and stops at its errors."""
    seconds: float = LIMIT
    machine: bool = False
    """Says something of this machine without a lab, too."""

    @property
    def name(self) -> str:
        return self.function.partition(".")[2]

    def run(self, ctx: CheckContext, *container: Container) -> Iterator[Finding]:
        """Import the function and call it; yield its findings."""
        module, _, name = self.function.partition(".")
        findings: Iterator[Finding] = getattr(import_module(f"labctl.backends.docker.checks.{module}"), name)(
            ctx, *container
        )
        return findings


CHECKS: tuple[Check, ...] = (
    Check("host.cores", engine=False, machine=True),
    Check("host.load", "lab", engine=False, lab=False, machine=True),
    Check("host.memory", engine=False),
    Check("host.shared_memory", "machine", engine=False, stops="up"),
    Check("hosts.shared_directory", engine=False, lab=False, stops="up"),
    Check("host.mounts", engine=False, stops="up"),
    Check("host.cache_space", engine=False, lab=False, machine=True),
    Check("host.run_space", "machine", engine=False, lab=False, stops="run"),
    Check("host.proxies", "machine", engine=False, lab=False, machine=True),
    Check("host.proxies_answer", "machine", engine=False, lab=False, machine=True),
    Check("host.certificates", "machine", engine=False, lab=False),
    Check("devices.vendor_host", engine=False, machine=True),
    Check("devices.permissions", engine=False, stops="up", machine=True),
    Check("devices.health", engine=False, seconds=VENDOR_TOOL_SECONDS, machine=True),
    Check("devices.leases", engine=False),
    Check("health.fit", "lab", engine=False, seconds=HEALTH_SECONDS, machine=True),
    Check("engine.compose", "machine", engine=False, lab=False, stops="compose up", machine=True),
    Check("engine.buildx", "machine", engine=False, lab=False, machine=True),
    Check("engine.user_mapping", lab=False, machine=True),
    Check("engine.version", lab=False, stops="up", machine=True),
    Check("hosts.ssh_port", stops="up"),
    Check("hosts.master_port", stops="up"),
    Check("hosts.home_space", engine=False, stops="up"),
    Check("hosts.differences", "lab"),
    Check("engine.cgroups", machine=True),
    Check("engine.clock", lab=False, machine=True),
    Check("engine.space", lab=False, machine=True),
    Check("engine.limits"),
    Check("devices.container_starts", seconds=VENDOR_TOOL_SECONDS),
    Check("files.lab_name", lab=False),
    Check("files.workloads", "machine", engine=False, lab=False),
    Check("files.override", "machine", engine=False, stops="compose up"),
    Check("conflicts.names", stops="compose up"),
    Check("conflicts.published_ports", lab=False, stops="compose up"),
    Check("engine.image", lab=False),
    Check("engine.image_fit", lab=False, stops="compose up"),
    Check("engine.driver"),
    Check("network.address_pools", lab=False, machine=True),
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


def findings(context: Context, receive: Receiver = ignore, *, node: str = "") -> tuple[Finding, ...]:
    """Connect to the hosts and run doctor's checks of hosts and lab, or of one node and its host; return findings.

    ``receive`` gets the findings of each check when it has ended.
    """
    settings = context.settings()
    require_named(context, settings)
    inventory = read_inventory(context.directory, settings)
    host = placement(settings, inventory).get(node)
    # The other hosts are connected too, unless their addresses are cached.
    cached = all(last_dump(context.directory, target.name) for target in inventory)
    only = (host,) if host and cached else ()
    with connect(context, settings, only, seconds=ANSWERING, demand=False) as cluster:
        return findings_on(context, cluster, receive, node=node)


def of_machine(context: Context, receive: Receiver = ignore) -> tuple[Finding, ...]:
    """Run the checks of this machine that need no lab, with the settings of the environment; change nothing."""
    # Hosts are those of a lab.
    settings = context.settings().with_value("LAB_HOSTS", "", origin="this machine")
    checks = tuple(check for check in CHECKS if check.machine)
    with connect(context, settings, seconds=ANSWERING, demand=False) as cluster:
        return findings_on(context, cluster, receive, checks=checks, ask=False)


def findings_on(
    context: Context,
    cluster: Cluster,
    receive: Receiver,
    *,
    node: str = "",
    checks: Sequence[Check] = (),
    ask: bool = True,
) -> tuple[Finding, ...]:
    """Run checks, all by default, on connected hosts; return findings, also of hosts or a lab that failed."""
    from labctl.backends.docker.checks.hosts import unreachable

    targets = [target for target in cluster.inventory if target.name in cluster.failed]
    failed = [unreachable(target, cluster.failed[target.name]) for target in targets]
    cluster = replace(cluster, unplaced=True)
    try:
        # Without its warnings, which are among the findings.
        lab, lacking = lab_to_examine(replace(context, emit=lambda _: None), cluster, ask=ask)
    except HostError as failure:
        unexamined = not_examined(cluster, failed, failure)
        receive(unexamined)
        return unexamined
    unreached = [finding for finding in failed if finding.node not in cluster.connections]
    receive(unreached)
    whole = check_context(context, cluster, lab, only=node)
    if lab.hosts[0].name not in (HERE, *cluster.dumps):
        # Nothing is known of the launcher's host, and so of the lab as a whole.
        checks = tuple(check for check in checks or (*CHECKS, *NODE_CHECKS) if check.scope != "lab")
    return (*unreached, *examine(whole, lacking, checks, receive=receive))


def not_examined(cluster: Cluster, failed: Iterable[Finding], failure: HostError) -> tuple[Finding, ...]:
    """Return findings of a lab that cannot be loaded: one per host if a host is why, else that error as well."""
    if any(failure is reason for reason in cluster.failed.values()):
        return tuple(failed)
    unreached = (finding for finding in failed if finding.node not in cluster.connections)
    impact = "the lab cannot be placed on these hosts; further checks skipped"
    return (*unreached, error("LAB-HOST-007", failure.message, impact, failure.hint, node=failure.node or HERE))


def lab_to_examine(context: Context, cluster: Cluster, *, ask: bool = True) -> tuple[Lab, Mapping[str, LabError]]:
    """Load the lab, as a CPU lab if that fails; return it and hosts' device errors, the failure for all if it did."""
    try:
        lab, capabilities = load_lab(context, cluster, ask=ask and can_probe(cluster), refresh=True)
        return lab, {name: why for name, why in capabilities.failed.items() if name not in cluster.failed}
    except (HostError, ConfigError) as lacking:
        settings = cluster.settings
        image = settings.text("LAB_IMAGE") or catalog.tag(settings.text("LAB_ACCELERATOR"))
        for key, value in (("LAB_IMAGE", image), ("LAB_ACCELERATOR", "cpu"), ("LAB_DEVICES", "")):
            settings = settings.with_value(key, value, origin="a host without devices")
        # Raises an error that is not about devices again.
        lab, _ = load_lab(context, replace(cluster, settings=settings), ask=False)
        return lab, dict.fromkeys((HERE, *(host.name for host in lab.hosts)), lacking)


def can_probe(cluster: Cluster) -> bool:
    """Tell if every host has an engine that answers, and the image to probe limits with."""
    hosts = {host.name: host.name for host in cluster.hosts}
    ids, failed = map_hosts(lambda name: cluster.engine.capabilities(name).image_id(cluster.image), hosts)
    return not failed and None not in ids.values()


def check_context(context: Context, cluster: Cluster, lab: Lab, *, only: str = "") -> CheckContext:
    """Return the context of the lab as a whole, with one of each host that ssh reached."""
    whole = CheckContext(lab=lab, settings=cluster.settings, environ=context.environ, engine=cluster.engine, only=only)
    used = frozenset(chain.from_iterable(facts.ports for facts in cluster.facts.values()))
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
    """Run a command's preflight; return the cluster without failing hosts. HostError if this machine or all fail.

    A clock that is off is only a warning.
    """
    if not cluster.daemons:
        return cluster
    for name, facts in cluster.facts.items():
        if abs(facts.skew) > SKEW:
            way = "ahead" if facts.skew > 0 else "behind"
            skew = human.duration(abs(facts.skew))
            context.warn(f"{name}: its clock is {skew} {way}; `labctl doctor` has the command that sets it")
    ctx = check_context(context, cluster, lab)
    answering = tuple(host for host in ctx.hosts if host.name in cluster.engine.hosts)
    return cluster.excluding(failing_hosts(replace(ctx, hosts=answering), command))


def able_to_create(context: Context, lab: Lab, cluster: Cluster) -> Cluster:
    """Return the cluster without hosts where the lab's containers cannot be created. HostError if this machine can't.

    HostError also if all hosts cannot.
    """
    if not cluster.daemons:
        return cluster
    ctx = check_context(context, cluster, lab)
    answering = tuple(host for host in ctx.hosts if host.name in cluster.engine.hosts)
    return cluster.excluding(failing_hosts(replace(ctx, hosts=answering), "compose up"))


def failing_hosts(whole: CheckContext, command: str) -> dict[str, HostError]:
    """Run the checks that stop a command; return an error per failing host; raise that of this machine or lab."""
    checks = [check for check in CHECKS if check.stops == command]
    for reason in stopping([check for check in checks if whole.local or check.scope != "host"], whole):
        raise reason
    host_checks = [check for check in checks if check.scope == "host"]

    def first_reason(host: CheckContext) -> list[HostError]:
        """Return the first error of the checks on a host, at most one."""
        try:
            with parsing(host.name):
                return list(islice(stopping(host_checks, host), 1))
        except HostError as failure:
            return [failure]

    late = [HostError(f"preflight timed out after {human.duration(ENGINE_SECONDS)}", hint="labctl doctor")]
    reasons_by_host = run_with_deadlines([(partial(first_reason, host), ENGINE_SECONDS) for host in whole.hosts])
    failed = {}
    for host, reasons in zip(whole.hosts, reasons_by_host, strict=True):
        for why in late if reasons is None else reasons:
            message = f"{host.name}: {why.message.removeprefix(f'{host.name}: ')}"
            failed[host.name] = HostError(message, hint=why.hint, node=host.name)
    return failed


def stopping(checks: Iterable[Check], ctx: CheckContext) -> Iterator[HostError]:
    """Run checks in turn; yield a HostError for each finding that is an error."""
    for check in checks:
        for finding in check.run(ctx):
            if finding.level == "error":
                message = f"{finding.summary} ({finding.code}): {finding.impact}"
                yield HostError(message, hint=finding.fix, node=None if finding.node == HERE else finding.node)


def examine(
    whole: CheckContext,
    lacking: Mapping[str, LabError] | None = None,
    checks: Sequence[Check] = (),
    *,
    receive: Receiver = ignore,
) -> tuple[Finding, ...]:
    """Run checks, all by default, each with its time limit; return findings in order. ConfigError for unknown nodes.

    They run at once. On hosts that are ``lacking`` the lab's devices, checks that need them are not run. ``receive``
    gets the findings of each check when it has ended.
    """
    from labctl.backends.docker.checks import engine

    if whole.only and not whole.names:
        nodes = ", ".join(node.name for node in whole.lab.nodes)
        raise ConfigError(f"lab {whole.lab.name} has no node `{whole.only}`", hint=f"it has launcher, {nodes}")
    lacking = lacking or {}
    whole, hosts = with_engines(whole)
    silent = [engine.silent(host, host.engine_error) for host in hosts if host.engine_error]
    unable = without_devices(hosts, lacking)
    receive([*unable, *silent])
    checks = checks or (*CHECKS, *NODE_CHECKS)
    tasks = [*host_tasks(checks, whole, hosts, lacking), *node_tasks(checks, hosts, lacking)]
    names = (HERE, *(host.name for host in hosts))
    by_task: dict[int, list[Finding]] = {}

    def done(number: int, result: list[Finding] | None) -> None:
        """Keep and pass on the findings of a check; with a single node, only its own and those of its host."""
        yielded = [tasks[number].timed_out()] if result is None else result
        by_task[number] = [each for each in yielded if each.node in names or whole.only in ("", each.node)]
        receive(by_task[number])

    run_with_deadlines([(task.findings, task.check.seconds) for task in tasks], done=done)
    in_order = (by_task[number] for number in range(len(tasks)))
    return (*unable, *silent, *chain.from_iterable(in_order))


def with_engines(whole: CheckContext) -> tuple[CheckContext, tuple[CheckContext, ...]]:
    """Ask the engines of all hosts; return the whole and its hosts, each with its answers or ``engine_error``."""
    hosts = (whole,) if whole.local else whole.hosts
    late = HostError(f"Docker Engine does not answer within {human.duration(ENGINE_SECONDS)}")
    asked = run_with_deadlines([(partial(ask_engine, host), ENGINE_SECONDS) for host in hosts])
    hosts = tuple(new or replace(old, engine_error=late) for old, new in zip(hosts, asked, strict=True))
    if whole.local:
        return hosts[0], hosts
    all_silent = late if all(host.engine_error for host in hosts) else None
    return replace(whole, hosts=hosts, engine_error=all_silent), hosts


def without_devices(hosts: tuple[CheckContext, ...], lacking: Mapping[str, LabError]) -> list[Finding]:
    """Return an error finding for each distinct reason why hosts lack the lab's devices."""
    from labctl.backends.docker.checks import devices

    by_name = {host.name: host for host in hosts}
    findings = []
    for reason in dict.fromkeys(lacking.values()):
        if hosts and reason.node in (None, HERE, *by_name):
            ctx = by_name.get(reason.node or HERE, hosts[0])
            findings.append(replace(devices.missing(ctx, reason), node=reason.node or HERE))
    return findings


def host_tasks(
    checks: Sequence[Check], whole: CheckContext, hosts: tuple[CheckContext, ...], lacking: Mapping[str, LabError]
) -> Iterator[CheckTask]:
    """Yield those checks, of hosts and of the lab as a whole, whose needs are met."""
    outside_nodes = [check for check in checks if check.scope != "node"]
    for check in outside_nodes:
        for ctx in hosts if check.scope == "host" else (whole,):
            no_devices = check.lab and ctx.name in lacking
            no_engine = check.engine and ctx.engine_error
            if not no_devices and not no_engine:
                yield CheckTask(check, ctx)


def node_tasks(
    checks: Sequence[Check], hosts: tuple[CheckContext, ...], lacking: Mapping[str, LabError]
) -> Iterator[CheckTask]:
    """Yield those checks of the running containers, on hosts with an engine and devices."""
    of_nodes = [check for check in checks if check.scope == "node"]
    for host in hosts if of_nodes else ():
        if host.name not in lacking and not host.engine_error:
            for container, check in product(host.running, of_nodes):
                yield CheckTask(check, host, container)


def ask_engine(ctx: CheckContext) -> CheckContext:
    """Return the context with its host's load and the engine's answers cached, or with ``engine_error``."""
    # Before anything else, as the checks use cores, too.
    with suppress(HostError):
        ctx = replace(ctx, load=load.read(ctx.script(load.SCRIPT, LOAD_SECONDS)))
    try:
        with parsing(ctx.name):
            _ = ctx.info, ctx.observed, ctx.network
    except HostError as failure:
        return replace(ctx, engine_error=failure)
    return ctx


class CheckTask(Struct, frozen=True):
    """A check of one host or container."""

    check: Check
    ctx: CheckContext
    container: Container | None = None

    @property
    def node(self) -> str:
        return self.container.node if self.container else self.ctx.name

    def findings(self) -> list[Finding]:
        """Run the check; return its findings, with a warning as the last if it fails half-way."""
        findings: list[Finding] = []
        try:
            with parsing(self.ctx.name):
                # extend() keeps the findings before a failure.
                findings.extend(self.check.run(self.ctx, *filter(None, (self.container,))))
        except LabError as failure:
            fix = "" if failure.hint == "labctl doctor" else failure.hint
            findings.append(self.failed(failure.message, "the check got no answer", fix, node=failure.node or HERE))
        except (OSError, ValueError) as failure:
            # A file that may not be read, or an answer in an unknown format.
            path = getattr(failure, "filename", None)
            fix = f"ls -ld {shlex.quote(str(path))}" if path else ""
            findings.append(self.failed(str(failure), "the check could not read what it examines", fix))
        return [replace(finding, node=self.node) if finding.node == HERE else finding for finding in findings]

    def timed_out(self) -> Finding:
        """Return the warning about a check that did not end within its time limit."""
        text = f"timed out after {human.duration(self.check.seconds)}"
        impact = "the host, a disk, the engine or the node hangs"
        return replace(self.failed(text, impact, node=self.node), code="LAB-CHECK-002")

    def failed(self, text: str, impact: str, fix: str = "", node: str = HERE) -> Finding:
        """Return the warning about a check that could not finish; without ``fix`` it names a log to read."""
        log = self.ctx.as_root("journalctl -u docker -n 50" if self.check.engine else "dmesg | tail -n 50")
        if self.container:
            log = f"labctl logs {self.container.node}"
        return warn("LAB-CHECK-001", f"{self.check.name}: {text}", impact, fix or log, node=node)
