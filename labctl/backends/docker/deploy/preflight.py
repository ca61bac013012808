"""Requirements before a lab is changed, and reports about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from labctl import model
from labctl.backends.docker import agent
from labctl.backends.docker.engine import Engine
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import HERE, Lab
from labctl.records.active import since
from labctl.system import filelock, human

if TYPE_CHECKING:
    from labctl.backends.docker.lab.cluster import Cluster
    from labctl.backends.plan import Step
    from labctl.backends.state import ObservedState

SETTLED = 180.0
"""Seconds after which no more than a twentieth of a run is left in the load average of a minute (exp(-3))."""
BUSY = 0.5
"""Load average per core from which a run says that a host is busy."""


def warn_excluded_hosts(context: Context, failed: Mapping[str, HostError]) -> None:
    """Warn of hosts that a plan leaves out, with the reason."""
    for error in failed.values():
        context.warn(error.message)


def report_accelerator(context: Context, cluster: Cluster, lab: Lab) -> None:
    """Report the accelerator that `auto` chose; warn of devices that it ignored; nothing if one is set."""
    from labctl import accelerators
    from labctl.backends import spec

    if cluster.settings.text("LAB_ACCELERATOR") != "auto":
        return
    first = lab.hosts[0].name
    on_host = "" if first == HERE else f"{first}: "
    on_hosts = "" if first == HERE else f"{human.listed(host.name for host in lab.hosts)}: "
    unserved = tuple(f"{on_host}{remark}" for remark in accelerators.unserved(cluster.root(first)))
    tell = context.warn if unserved and lab.accelerator == "cpu" else context.notice
    tell(f"{on_hosts}accelerator {lab.accelerator} ({spec.choice(cluster.settings, cluster.root(first))[1]})")
    for remark in unserved if lab.accelerator != "cpu" else ():
        context.warn(remark)


def warn_small_arp_table(context: Context, cluster: Cluster, lab: Lab) -> None:
    """Warn if the first host's ARP table is too small for all nodes of a bridge network to connect."""
    from labctl.backends.docker.lab import capabilities

    root = cluster.root(lab.hosts[0].name)
    if lab.network == "bridge" and (short := capabilities.neighbours_lacking(lab, root)):
        table, needed = short
        context.warn(
            f"ARP table too small: gc_thresh3={table}, {len(lab.nodes)} nodes need {needed} entries: connections"
            " between them will time out; `labctl doctor` has the command that raises it"
        )


def note_busy_hosts(context: Context, cluster: Cluster) -> None:
    """Note hosts with a high load average, unless the lab has a run, or had one so lately that it may be the reason.

    Cores in use can only be read over time, for which a run does not wait, and in which its own preparation uses some.
    """
    from labctl.records import store
    from labctl.system import load, procfs

    busy = {}
    for host in cluster.connections:
        average, cores = procfs.load_average(cluster.root(host)), procfs.online(cluster.root(host))
        if cores and average >= BUSY * cores:
            busy[host] = f"load average {human.number(average, 3)} on {human.count(cores, 'core')}"
    if busy and not store.ran_within(context.directory, SETTLED):
        for host, how in busy.items():
            context.notice(load.busy_text(host, how))


def require_no_run(
    context: Context, engine: Engine, observed: ObservedState, steps: Iterable[Step], *, preview: bool = False
) -> None:
    """Raise HostError, or in a preview only note it, if steps remove or recreate containers of a run under way."""
    from labctl.backends.docker.deploy.steps import ApplyProject, RemoveContainers

    touched: set[str] = set()
    for step in steps:
        if isinstance(step, ApplyProject):
            touched |= {*step.changed}
        elif isinstance(step, RemoveContainers):
            touched |= {container.node for container in step.containers}
    if not touched:
        return
    try:
        require_idle(context, engine, observed, touched)
    except HostError as error:
        if not preview:
            raise
        context.notice(error.message)


def require_idle(context: Context, engine: Engine, observed: ObservedState, nodes: Collection[str] = ()) -> None:
    """Raise HostError if a run is under way: with ``nodes`` on any of these, without on any node."""
    if active := runs_under_way(context, engine, observed, nodes):
        hint = "wait for it, or end it with `labctl stop`: `labctl runs` lists them"
        raise HostError(f"cannot change the lab while {'; '.join(active)} is active", hint=hint)


def runs_under_way(
    context: Context, engine: Engine, observed: ObservedState, nodes: Collection[str] = ()
) -> tuple[str, ...]:
    """Return a text per run in the launcher, with ``nodes`` only on these, or begun or judged by this machine."""
    active = agent.active(engine, observed)
    held = {path.stem: filelock.holder(path) for path in filelock.held_below(context.directory / filelock.RUNS)}
    active_ids = {run.id for run in active}
    recorded_here = (holder for run_id, holder in held.items() if run_id not in active_ids)
    affected = (run for run in active if not nodes or {model.LAUNCHER, *run.nodes} & {*nodes})
    return (*(f"run {run.id} ({run.owner}, {since(run)})" for run in affected), *recorded_here)


def require_lab_owner(context: Context, name: str, observed: ObservedState) -> None:
    """Raise HostError if the observed containers are of another user's or directory's lab of this name."""
    from labctl.backends.owner import owner as caller

    owner = observed.owner_elsewhere(context.directory, caller())
    if owner:
        hint = f"set another LAB_NAME in .env, or: {owner.remedy}"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)


def observe(context: Context, cluster: Cluster) -> tuple[ObservedState, Cluster]:
    """Return the lab's state, and the cluster without silent or another's hosts. HostError if none is left."""
    name = cluster.settings.text("LAB_NAME")
    observed = cluster.engine.observe(name, cluster.image)
    foreign = find_foreign_labs(context, name, observed)
    return observed, cluster.excluding({**dict(observed.silent), **foreign})


def find_foreign_labs(context: Context, name: str, observed: ObservedState) -> dict[str, HostError]:
    """Return an error per host with another's lab of this name; for this machine raise it as HostError."""
    foreign = {}
    for host in observed.hosts:
        try:
            require_lab_owner(context, name, observed.on(host))
        except HostError as error:
            if host == HERE:
                raise
            foreign[host] = HostError(f"{host}: {error.message}", hint=error.hint, node=host)
    return foreign
