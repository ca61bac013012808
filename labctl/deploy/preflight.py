"""What a lab needs on this host before its containers start: image, mounts, keys, secrets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from labctl import accelerators
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy.plan import ComposeUp, Plan, RemoveContainers
from labctl.engines.state import ObservedState
from labctl.errors import ConfigError, HostError
from labctl.lab import capabilities, cluster, devices
from labctl.lab.cluster import Cluster
from labctl.model import HERE, Lab
from labctl.system import filelock


def tell_failed(context: Context, failed: Mapping[str, HostError]) -> None:
    """What a plan leaves out, and why."""
    for error in failed.values():
        context.warn(error.message)


def tell_accelerator(context: Context, where: Cluster, lab: Lab) -> None:
    """What `auto` took, and what it could not use."""
    if where.settings.text("LAB_ACCELERATOR") != "auto":
        return
    first = lab.hosts[0].name
    on_host = "" if first == HERE else f"{first}: "
    unserved = tuple(f"{on_host}{remark}" for remark in accelerators.unserved(where.root(first)))
    tell = context.warn if unserved and lab.accelerator == "cpu" else context.notice
    tell(f"accelerator {lab.accelerator} ({devices.choice(where.settings, where.root(first))[1]})")
    for remark in unserved if lab.accelerator != "cpu" else ():
        context.warn(remark)


def require_room(context: Context, where: Cluster, lab: Lab) -> None:
    """HostError for a lab that is too large for what its hosts allow; a warning where not all of its nodes can talk."""
    capabilities.require_files(lab)
    root = where.root(lab.hosts[0].name)
    if lab.network == "bridge" and (lacking := capabilities.neighbours_lacking(lab, root)):
        table, needed = lacking
        context.warn(
            f"this host remembers {table} neighbours, and {len(lab.nodes)} nodes that all talk to each other take"
            f" {needed}: connections between them will time out; `labctl doctor` says what raises it"
        )


def require_initialised(context: Context) -> None:
    """ConfigError in a directory that is no lab's: `up` there would make folders that nobody asked for."""
    if not (context.directory / ".env").exists():
        raise ConfigError(f"{context.directory} has no .env", hint=f"labctl init {shlex.quote(str(context.directory))}")


def require_named(context: Context, found: Settings) -> None:
    """ConfigError where nothing says which lab is meant: the default name would be somebody else's."""
    if found.origin("LAB_NAME") == "default" and not (context.directory / ".env").exists():
        hint = "cd into the lab's directory, or name it: -C DIRECTORY"
        raise ConfigError(f"{context.directory} has no .env, so it is no lab's directory", hint=hint)


def require_no_run(context: Context, steps: Plan) -> None:
    """HostError when a plan would take containers from under a run."""
    changing = any(isinstance(step, ComposeUp | RemoveContainers) for step in steps.steps)
    if changing and filelock.is_held(context.directory / filelock.RUN):
        holder = filelock.holder(context.directory / filelock.RUN)
        raise HostError(f"{holder} is active, and this would change its nodes", hint="wait for it, or stop it first")


def require_lab_owner(context: Context, name: str, observed: ObservedState) -> None:
    """HostError when these containers belong to a lab of the same name that another person or directory has."""
    owner = observed.owner_elsewhere(context.directory, cluster.owner())
    if owner:
        hint = f"set another LAB_NAME in .env, or: {owner.remedy}"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)


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


def exclude_foreign_hosts(context: Context, where: Cluster) -> Cluster:
    """A copy without the hosts that have another person's or directory's lab of this name.

    HostError as ``find_foreign_labs``. To be known before all else: such a lab holds the ports, too.
    """
    name = where.settings.text("LAB_NAME")
    return where.excluding(find_foreign_labs(context, name, where.engine.observe(name)))
