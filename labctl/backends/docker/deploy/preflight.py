"""What must hold before a lab is changed, and what is reported of it first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from labctl import model
from labctl.backends.docker import agent
from labctl.backends.docker.engine import Backend
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import HERE, Lab
from labctl.records.active import since
from labctl.system import filelock

if TYPE_CHECKING:
    from labctl.backends.docker.lab.cluster import Cluster
    from labctl.backends.plan import Step
    from labctl.backends.state import ObservedState


def warn_excluded_hosts(context: Context, failed: Mapping[str, HostError]) -> None:
    """What a plan leaves out, and why."""
    for error in failed.values():
        context.warn(error.message)


def report_accelerator(context: Context, cluster: Cluster, lab: Lab) -> None:
    """What `auto` chose, and what it ignored."""
    from labctl import accelerators
    from labctl.backends import spec

    if cluster.settings.text("LAB_ACCELERATOR") != "auto":
        return
    first = lab.hosts[0].name
    on_host = "" if first == HERE else f"{first}: "
    unserved = tuple(f"{on_host}{remark}" for remark in accelerators.unserved(cluster.root(first)))
    tell = context.warn if unserved and lab.accelerator == "cpu" else context.notice
    tell(f"accelerator {lab.accelerator} ({spec.choice(cluster.settings, cluster.root(first))[1]})")
    for remark in unserved if lab.accelerator != "cpu" else ():
        context.warn(remark)


def warn_small_arp_table(context: Context, cluster: Cluster, lab: Lab) -> None:
    """Warn if the host's ARP table is too small for all nodes to talk to each other."""
    from labctl.backends.docker.lab import capabilities

    root = cluster.root(lab.hosts[0].name)
    if lab.network == "bridge" and (short := capabilities.neighbours_lacking(lab, root)):
        table, needed = short
        context.warn(
            f"ARP table too small: gc_thresh3={table}, {len(lab.nodes)} nodes need {needed} entries: connections"
            " between them will time out; `labctl doctor` says what raises it"
        )


def require_no_run(context: Context, engine: Backend, observed: ObservedState, steps: Iterable[Step]) -> None:
    """HostError if a plan would take containers from under a run."""
    from labctl.backends.docker.deploy.steps import ApplyProject, RemoveContainers

    touched: set[str] = set()
    for step in steps:
        if isinstance(step, ApplyProject):
            touched |= {*step.changed}
        elif isinstance(step, RemoveContainers):
            touched |= {container.node for container in step.containers}
    if touched:
        require_idle(context, engine, observed, touched)


def require_idle(context: Context, engine: Backend, observed: ObservedState, nodes: Collection[str] = ()) -> None:
    """HostError if a run is under way, on one of these nodes or on any."""
    if words := runs_under_way(context, engine, observed, nodes):
        hint = "wait for it, or end it with `labctl stop`: `labctl runs` lists them"
        raise HostError(f"cannot change the lab while {'; '.join(words)} is active", hint=hint)


def runs_under_way(
    context: Context, engine: Backend, observed: ObservedState, nodes: Collection[str] = ()
) -> tuple[str, ...]:
    """The runs that are under way, in words: those in the launcher, and those that this machine begins or judges.

    With ``nodes``, a run that has none of them is left out.
    """
    active = agent.active(engine, observed)
    held = {path.stem: filelock.holder(path) for path in filelock.held_below(context.directory / filelock.RUNS)}
    here = [words for run_id, words in held.items() if run_id not in {run.id for run in active}]
    there = [run for run in active if not nodes or {model.LAUNCHER, *run.nodes} & {*nodes}]
    return (*(f"run {run.id} ({run.owner}, {since(run)})" for run in there), *here)


def require_lab_owner(context: Context, name: str, observed: ObservedState) -> None:
    """HostError if these containers belong to a lab of the same name that another person or directory has."""
    from labctl.backends.owner import owner as caller

    owner = observed.owner_elsewhere(context.directory, caller())
    if owner:
        hint = f"set another LAB_NAME in .env, or: {owner.remedy}"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)


def observe(context: Context, cluster: Cluster) -> tuple[ObservedState, Cluster]:
    """What the daemons hold; the cluster without those that are silent or have another's lab of this name."""
    name = cluster.settings.text("LAB_NAME")
    observed = cluster.engine.observe(name, cluster.image)
    foreign = find_foreign_labs(context, name, observed)
    return observed, cluster.excluding({**dict(observed.silent), **foreign})


def find_foreign_labs(context: Context, name: str, observed: ObservedState) -> dict[str, HostError]:
    """The hosts that have another person's lab of this name; on this machine, HostError."""
    found = {}
    for host in observed.hosts:
        try:
            require_lab_owner(context, name, observed.on(host))
        except HostError as error:
            if host == HERE:
                raise
            found[host] = HostError(f"{host}: {error.message}", hint=error.hint, node=host)
    return found
