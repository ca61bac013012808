"""Drift: hosts whose files are out of date, and the containers that this breaks; hosts are asked, not changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from msgspec import Struct

from labctl import naming
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.deploy import provision
from labctl.backends.docker.deploy.provision import WORKLOADS
from labctl.backends.docker.hosts import push
from labctl.backends.docker.hosts.push import SyncState
from labctl.backends.docker.hosts.ssh import Connection
from labctl.errors import HostError
from labctl.model import LAUNCHER, File, Host, Lab
from labctl.system.parallel import map_hosts

LOST: dict[SyncState, str] = {"stale": "has other files", "missing": "its files are gone"}


class Drift(Struct, frozen=True):
    """What is out of date, and what it means for containers."""

    hosts: frozenset[str]
    """Those whose files are out of date."""
    containers: Mapping[str, str]
    """Those whose mounts are broken, each with the reason."""


def find(
    lab: Lab, connections: Mapping[str, Connection], changed: tuple[File, ...], failed: Collection[str]
) -> tuple[Drift, dict[str, HostError]]:
    """The drift of hosts that have not ``failed``, and why some gave none; ``changed`` files are yet to be written."""
    keyless = ssh_keys.missing(lab)
    renewed = {node.name for node in lab.nodes if any(is_of(node.name, file) for file in changed)}
    hosts = {host.name: host for host in lab.hosts if naming.sent(host) and host.name not in failed}
    shared = provision.shared(lab) if hosts else {}

    def states(host: Host) -> dict[str, SyncState]:
        """Nothing of a host whose nodes have no keys: both will be replaced."""
        if not keyless.isdisjoint(lab.containers_on(host.name)):
            return {}
        return push.sync_states(connections[host.name], host.directory, provision.manifests(lab, host, shared))

    found, silent = map_hosts(states, hosts)
    # The launcher knows the keys of all.
    touched = {lab.host_of(node).name for node in (*renewed, *([LAUNCHER] if keyless else ()))}
    stale = frozenset(name for name, of in found.items() if name in touched or set(of.values()) != {"current"})
    lost = {node: why for name, of in found.items() for node, why in broken(lab, name, of) if node not in renewed}
    return Drift(stale, {**lost, **dict.fromkeys(keyless, "its keys are gone")}), silent


def is_of(node: str, file: File) -> bool:
    return file.path.startswith(f"{naming.node_directory(node)}/")


def broken(lab: Lab, host: str, states: Mapping[str, SyncState]) -> Iterator[tuple[str, str]]:
    """The containers of a host that would not see what is pushed now, and why.

    A directory that a container has mounted as a whole shows what is pushed into it, as long as nobody removed it. Of a
    node's own directory containers have mounted parts, which stay what they were.
    """
    first = lab.nodes[0].name
    whole = (WORKLOADS, *dict(lab.clones).values())
    mounting = {naming.node_directory(first): (first, LAUNCHER), **dict.fromkeys(whole, lab.containers_on(host))}
    for folder, state in states.items():
        name = PurePosixPath(folder).name
        if state == "missing" or (state == "stale" and folder not in whole and name != LAUNCHER):
            yield from ((node, LOST[state]) for node in mounting.get(folder, (name,)))
