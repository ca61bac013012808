"""Records which machines have nodes of this lab, so that hosts removed from the inventory are not forgotten.

A machine is identified by its engine's id: names and addresses may be given to another.
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
"""Engine id per listed host; empty if it did not answer."""


class DeployedHost(Struct, frozen=True, order=True):
    """A machine that got nodes, and its name at that time."""

    host: str
    machine: str

    @property
    def path(self) -> str:
        """Path of its record, relative to the lab directory."""
        return f"{FILES}/{self.host}@{quote(self.machine, safe='')}"


def note(directory: Path, host: str, machine: str) -> None:
    """Write an empty file in the lab directory which records that a host's engine has nodes of this lab."""
    write(directory / DeployedHost(host, machine).path, "")


def noted(directory: Path) -> tuple[DeployedHost, ...]:
    """Return the machines recorded to have nodes of the lab, sorted by host name."""
    names = (path.name.partition("@") for path in (directory / FILES).glob("*@*"))
    return tuple(sorted(DeployedHost(host, unquote(machine)) for host, _, machine in names))


def moved(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """Return the recorded machines that the host of their name is not; those of unreachable hosts are left out."""
    return tuple(deployed for deployed in noted(directory) if listed.get(deployed.host) not in ("", deployed.machine))


def left_over(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """Return the machines that have nodes of the lab and are no longer listed by any name."""
    return tuple(deployed for deployed in moved(directory, listed) if deployed.machine not in listed.values())


def former(directory: Path, listed: Listed) -> dict[str, tuple[str, ...]]:
    """Return the other names under which each listed host's machine is recorded; unreachable hosts are left out."""
    names_by_machine: dict[str, list[str]] = {}
    for deployed in moved(directory, listed):
        names_by_machine.setdefault(deployed.machine, []).append(deployed.host)
    return {host: tuple(names_by_machine.get(machine, ())) for host, machine in listed.items() if machine}


def machines(cluster: Cluster) -> dict[str, str]:
    """Return the engine id per inventory host, "" if unreachable; {} if no machine is recorded or no host listed.

    Files that this machine was sent as a listed host stay recorded until it is listed again.
    """
    listed = cluster.inventory if cluster.inventory != THIS_MACHINE and noted(cluster.directory) else ()
    names = [host.name for host in listed]
    engine = cluster.engine
    return {name: engine.capabilities(name).identity() if name in engine.hosts else "" for name in names}


def sent(context: Context, cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Return, per host that was sent files, the lab's directories there: under its own and its recorded names."""
    names_before = former(context.directory, machines(cluster))
    directories = {}
    for host in cluster.sent:
        names = (host, *names_before.get(host, ()))
        directories[host] = tuple(cluster.sent_to(host, name) for name in names)
    return directories


def records(directory: Path, machines: Listed) -> dict[str, tuple[str, ...]]:
    """Return the record files of each host's machine, under any name, as paths relative to the lab directory."""
    paths_by_machine: dict[str, list[str]] = {}
    for deployed in noted(directory):
        paths_by_machine.setdefault(deployed.machine, []).append(deployed.path)
    return {host: tuple(paths_by_machine.get(machine, ())) for host, machine in machines.items()}


def warn_orphaned_hosts(context: Context, cluster: Cluster) -> None:
    """Warn of machines, also this one, that still have nodes but are not listed; notice drained hosts."""
    listed = machines(cluster)
    left = left_over(context.directory, listed)
    drained = _drained(context, cluster)
    for name in sorted(drained):
        runs_nodes = any(deployed.host == name for deployed in left)
        still = " and still runs nodes: `labctl down` removes them" if runs_nodes else ""
        context.notice(f"{name} is left out: {inventory.DRAINED} lists it{still}")
    removed = tuple(dict.fromkeys(deployed.host for deployed in left if deployed.host not in {*listed, *drained}))
    if removed:
        were, run, them = ("was", "runs", "it") if len(removed) == 1 else ("were", "run", "them")
        context.warn(
            f"{', '.join(removed)} {were} removed from LAB_HOSTS but still {run} nodes of this lab; "
            f"add {them} back and run `labctl down`"
        )
    for deployed in left:
        if deployed.host in listed:
            context.warn(
                f"{deployed.host} is now another machine than the one that still runs nodes of this lab: list that one,"
                f" too, by another name, and run `labctl down`; or, if it is gone for good, rm '{deployed.path}'"
            )
    if cluster.inventory != THIS_MACHINE:
        _warn_nodes_here(context, cluster)


def _drained(context: Context, cluster: Cluster) -> set[str]:
    """Return the hosts of the inventory that the user has drained."""
    # Reading an inventory by Ansible takes a second: only if a host is drained.
    if not inventory.drained(context.directory):
        return set()
    every = read_inventory(context.directory, cluster.settings, drained=True)
    in_use = {host.name for host in cluster.inventory}
    return {host.name for host in every if host.name not in in_use}


def _warn_nodes_here(context: Context, cluster: Cluster) -> None:
    """Warn if this machine, which is not listed, runs nodes of this lab."""
    with suppress(HostError):
        here = backend_here(ANSWERING).observe(cluster.settings.text("LAB_NAME"))
        if any(container.directory == str(context.directory) for container in here.containers):
            context.warn("this machine still runs nodes of this lab: `labctl down -s LAB_HOSTS=` removes them")
