"""Which machines a lab was laid over: one that is not listed any more keeps its nodes until somebody says so.

A machine is known by its engine's identity: names and addresses come to mean another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from labctl.config.context import Context
from labctl.engines.docker import DockerEngine
from labctl.errors import HostError
from labctl.lab.cluster import THIS_MACHINE, Cluster
from labctl.system.files import write

FILES = ".lab/hosts"
Listed = Mapping[str, str]
"""The hosts of a list and what machines they are; empty for one that did not answer."""


@dataclass(frozen=True, slots=True, order=True)
class DeployedHost:
    """A machine that has got nodes, and its name then."""

    host: str
    machine: str

    @property
    def path(self) -> str:
        return f"{FILES}/{self.host}@{quote(self.machine, safe='')}"


def note(directory: Path, host: str, machine: str) -> None:
    """A host has got nodes of this lab."""
    write(directory / DeployedHost(host, machine).path, "")


def forget(directory: Path, machines: Collection[str]) -> None:
    """These machines have nothing of it any more."""
    for one in noted(directory):
        if one.machine in machines:
            (directory / one.path).unlink(missing_ok=True)


def noted(directory: Path) -> tuple[DeployedHost, ...]:
    found = (path.name.partition("@") for path in (directory / FILES).glob("*@*"))
    return tuple(sorted(DeployedHost(host, unquote(machine)) for host, _, machine in found))


def moved(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """The machines that are not listed any more by the name that they had, as far as those answer that are."""
    return tuple(one for one in noted(directory) if listed.get(one.host) not in ("", one.machine))


def left_over(directory: Path, listed: Listed) -> tuple[DeployedHost, ...]:
    """The machines that have nodes of it and are not listed any more by any name."""
    return tuple(one for one in moved(directory, listed) if one.machine not in listed.values())


def former(directory: Path, listed: Listed) -> dict[str, tuple[str, ...]]:
    """The names that listed hosts had before, when they got nodes."""
    names = moved(directory, listed)
    return {
        host: tuple(one.host for one in names if one.machine == machine) for host, machine in listed.items() if machine
    }


def machines(where: Cluster) -> dict[str, str]:
    """Engine id per inventory host, empty if unreachable; none where no machine is recorded."""
    names = [host.name for host in where.inventory] if noted(where.directory) else []
    return {name: where.engine.on(name).identity() if name in where.engine.hosts else "" for name in names}


def sent(context: Context, where: Cluster) -> dict[str, tuple[str, ...]]:
    """Where the lab's files lie on the hosts that answer, by their names now and those that they had."""
    names_before = former(context.directory, machines(where))
    sent_by = {host: (host, *names_before.get(host, ())) for host in where.sent}
    return {host: tuple(where.sent_to(host, name) for name in names) for host, names in sent_by.items()}


def tell_left_over(context: Context, where: Cluster) -> None:
    """Hosts that are not listed any more, and this machine where others are listed now, keep what they got."""
    listed = machines(where)
    left = left_over(context.directory, listed)
    names = tuple(dict.fromkeys(one.host for one in left if one.host not in listed))
    if names:
        context.warn(
            f"{', '.join(names)} still {'has' if len(names) == 1 else 'have'} nodes of this lab and "
            f"{'is' if len(names) == 1 else 'are'} not in LAB_HOSTS any more: list them again and `labctl down` first"
        )
    for one in (one for one in left if one.host in listed):
        context.warn(
            f"{one.host} is another machine than the one of this name that still has nodes of this lab: list that one,"
            f" too, by another name, and `labctl down`; or, where it is gone for good, rm '{one.path}'"
        )
    if where.inventory != THIS_MACHINE:
        with suppress(HostError):
            here = DockerEngine().observe(where.settings.text("LAB_NAME"))
            if any(container.directory == str(context.directory) for container in here.containers):
                context.warn("this machine still has nodes of this lab: `labctl down -s LAB_HOSTS=` removes them")
