"""Records which machines have nodes of this lab, so that hosts removed from the inventory are not forgotten.

A machine is known by its engine's identity: names and addresses come to mean another.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from msgspec import Struct

from labctl.backends.docker.lab.cluster import ANSWERING, THIS_MACHINE, Cluster, backend_here, read_inventory
from labctl.config import inventory
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.system.files import write

FILES = ".lab/hosts"
Listed = Mapping[str, str]
"""The hosts of a list and what machines they are; empty for one that did not answer."""


class DeployedHost(Struct, frozen=True, order=True):
    """A machine that got nodes, and its name then."""

    host: str
    machine: str

    @property
    def path(self) -> str:
        return f"{FILES}/{self.host}@{quote(self.machine, safe='')}"


def note(directory: Path, host: str, machine: str) -> None:
    """Record that a host has nodes of this lab."""
    write(directory / DeployedHost(host, machine).path, "")


def noted(directory: Path) -> tuple[DeployedHost, ...]:
    found = (path.name.partition("@") for path in (directory / FILES).glob("*@*"))
    return tuple(sorted(DeployedHost(host, unquote(machine)) for host, _, machine in found))


def moved(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """The machines that are no longer listed by the name that they had, as far as the listed ones answer."""
    return tuple(one for one in noted(directory) if listed.get(one.host) not in ("", one.machine))


def left_over(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """The machines that have nodes of the lab and are no longer listed by any name."""
    return tuple(one for one in moved(directory, listed) if one.machine not in listed.values())


def former(directory: Path, listed: Listed) -> dict[str, tuple[str, ...]]:
    """The names that listed hosts had before, when they got nodes."""
    names = moved(directory, listed)
    return {
        host: tuple(one.host for one in names if one.machine == machine) for host, machine in listed.items() if machine
    }


def machines(cluster: Cluster) -> dict[str, str]:
    """Engine id per inventory host, empty if unreachable; none where no machine is recorded, or no host is listed.

    What this machine was pushed as a listed host stays its record's until it is listed again.
    """
    listed = cluster.inventory if cluster.inventory != THIS_MACHINE and noted(cluster.directory) else ()
    names = [host.name for host in listed]
    engine = cluster.engine
    return {name: engine.capabilities(name).identity() if name in engine.hosts else "" for name in names}


def sent(context: Context, cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Where the lab's files lie on the hosts that answer, by their names now and those that they had."""
    names_before = former(context.directory, machines(cluster))
    sent_by = {host: (host, *names_before.get(host, ())) for host in cluster.sent}
    return {host: tuple(cluster.sent_to(host, name) for name in names) for host, names in sent_by.items()}


def records(directory: Path, machines: Listed) -> dict[str, tuple[str, ...]]:
    """The records of each of these hosts, under whatever name, relative to the lab directory."""
    found = noted(directory)
    return {host: tuple(one.path for one in found if one.machine == machine) for host, machine in machines.items()}


def warn_orphaned_hosts(context: Context, cluster: Cluster) -> None:
    """Warn of machines that still have nodes and are no longer listed, and of this one if others are listed now."""
    listed = machines(cluster)
    left = left_over(context.directory, listed)
    # An inventory that only Ansible can read takes it a second.
    any_drained = bool(inventory.drained(context.directory))
    every = read_inventory(context.directory, cluster.settings, drained=True) if any_drained else cluster.inventory
    drained = {host.name for host in every} - {host.name for host in cluster.inventory}
    for name in sorted(drained):
        still = " and still runs nodes: `labctl down` removes them" * any(one.host == name for one in left)
        context.notice(f"{name} is left out: {inventory.DRAINED} lists it{still}")
    names = tuple(dict.fromkeys(one.host for one in left if one.host not in {*listed, *drained}))
    if names:
        were, run, them = ("was", "runs", "it") if len(names) == 1 else ("were", "run", "them")
        context.warn(
            f"{', '.join(names)} {were} removed from LAB_HOSTS but still {run} nodes of this lab; "
            f"add {them} back and run `labctl down`"
        )
    for one in (one for one in left if one.host in listed):
        context.warn(
            f"{one.host} is now another machine than the one that still runs nodes of this lab: list that one, too, "
            f"by another name, and run `labctl down`; or, if it is gone for good, rm '{one.path}'"
        )
    if cluster.inventory != THIS_MACHINE:
        with suppress(HostError):
            here = backend_here(ANSWERING).observe(cluster.settings.text("LAB_NAME"))
            if any(container.directory == str(context.directory) for container in here.containers):
                context.warn("this machine still runs nodes of this lab: `labctl down -s LAB_HOSTS=` removes them")
