"""Find hosts whose files are out of date, and containers that this breaks; hosts are asked, not changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from labctl import naming
from labctl.backends.docker import agent
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.deploy import provision
from labctl.backends.docker.deploy.provision import WORKLOADS
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.hosts import push
from labctl.backends.docker.hosts.push import SyncState
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import Container
from labctl.errors import HostError
from labctl.model import HERE, LAUNCHER, File, Host, Lab
from labctl.system.parallel import map_hosts

LOST: dict[SyncState, str] = {"stale": "has other files", "missing": "its files are gone"}


class Drift(Struct, frozen=True):
    """Hosts and containers that are out of date."""

    hosts: frozenset[str]
    """Hosts whose files are out of date."""
    containers: Mapping[str, str]
    """Containers whose mounts are broken, each with the reason."""


def find(
    lab: Lab, connections: Mapping[str, Connection], changed: tuple[File, ...], failed: Collection[str]
) -> tuple[Drift, dict[str, HostError]]:
    """Return hosts with outdated files and containers that lost files or keys; also the errors of silent hosts.

    ``changed``: files that are yet to be written.
    """
    keyless = ssh_keys.missing(lab)
    renewed = {node.name for node in lab.nodes if has_any(node.name, changed)}
    hosts = {host.name: host for host in lab.hosts if naming.sent(host) and host.name not in failed}
    shared = provision.shared(lab) if hosts else {}

    def states(host: Host) -> dict[str, SyncState]:
        """Return the state of a host's folders; empty if a node of it has no keys: then all are replaced."""
        if not keyless.isdisjoint(lab.containers_on(host.name)):
            return {}
        return push.sync_states(connections[host.name], host.directory, provision.manifests(lab, host, shared))

    states_by_host, silent = map_hosts(states, hosts)
    # The launcher has the public keys of all nodes.
    touched = {lab.host_of(node).name for node in (*renewed, *([LAUNCHER] if keyless else ()))}
    stale = set()
    lost: dict[str, str] = {}
    for name, folders in states_by_host.items():
        if name in touched or set(folders.values()) != {"current"}:
            stale.add(name)
        lost |= {node: reason for node, reason in broken(lab, name, folders) if node not in renewed}
    return Drift(frozenset(stale), {**lost, **dict.fromkeys(keyless, "its keys are gone")}), silent


def renewed_keys(lab: Lab) -> dict[str, str]:
    """Return the containers whose key files are to be written, each with the reason: they are read only at the start.

    The launcher's own key has been replaced if no worker admits it.
    """
    files = ssh_keys.outdated(lab)
    admitting = {f"{naming.node_directory(node.name)}/ssh/authorized_keys" for node in lab.nodes}

    def has_renewed(node: str) -> bool:
        """Return True if one of the files is among the node's keys."""
        folder = f"{naming.node_directory(node)}/ssh/"
        return any(path.startswith(folder) for path in files)

    nodes = [*filter(has_renewed, (node.name for node in lab.nodes))]
    launcher = [LAUNCHER] if admitting.issubset(files) else []
    return dict.fromkeys([*launcher, *nodes], "its key files were edited")


def replaced(lab: Lab, engine: Engine, containers: Iterable[Container]) -> dict[str, str]:
    """Return the running containers of this machine that mount a directory replaced since, each with the reason.

    A container keeps the directory that had the path when it started, also if that was moved or removed.
    """
    here = lab.containers_on(HERE)
    examined = (container for container in containers if container.state == "running" and container.node in here)
    sources = {container.node: replaced_source(lab, engine, container) for container in examined}
    return {node: f"{source} changed: moved, removed or recreated" for node, source in sources.items() if source}


def replaced_source(lab: Lab, engine: Engine, container: Container) -> str:
    """Return the first path that a container mounts, and that is gone or another directory now; empty if none."""
    sources = touched(container)
    if gone := next((source for source in sources.values() if not Path(source).exists()), ""):
        return gone
    if not sources:
        return ""
    look = ("stat", "-c", "%i %n", *sources)
    printed = engine.exec(container.name, look, user=agent.user(lab, container.node)).out
    lines = (line.partition(" ") for line in printed.splitlines())
    seen = {target: int(inode) for inode, _, target in lines}
    others = (sources[target] for target, inode in seen.items() if inode != Path(sources[target]).stat().st_ino)
    return next(others, "")


def may_be_replaced(container: Container | None) -> bool:
    """Return True if a running container of this machine mounts what may have been replaced; ask no engine."""
    if container is None or container.host != HERE or container.state != "running":
        return False
    return bool(touched(container))


def touched(container: Container) -> dict[str, str]:
    """Return the sources, by target, of a container of this machine that may have been replaced since it started."""
    return {target: source for source, target in container.mounts if changed_since(source, container.created)}


def changed_since(source: str, when: float) -> bool:
    """Return True if a path is gone, or a directory whose entries or name changed since, as those of a new one did."""
    path = Path(source)
    return not path.exists() or (path.is_dir() and path.stat().st_ctime >= when)


def has_any(node: str, changed: tuple[File, ...]) -> bool:
    """Tell if any of these files is in the node's directory."""
    return any(file.path.startswith(f"{naming.node_directory(node)}/") for file in changed)


def broken(lab: Lab, host: str, states: Mapping[str, SyncState]) -> Iterator[tuple[str, str]]:
    """Yield each container of a host that would not see newly pushed files, with the reason.

    Containers mount a folder of workloads or a clone as a whole, so they see files pushed into it unless it was
    removed. Of a node's own directory they mount parts, which keep their content.
    """
    first = lab.nodes[0].name
    whole = (WORKLOADS, *dict(lab.clones).values())
    mounting = {naming.node_directory(first): (first, LAUNCHER), **dict.fromkeys(whole, lab.containers_on(host))}
    for folder, state in states.items():
        name = PurePosixPath(folder).name
        if state == "missing" or (state == "stale" and folder not in whole and name != LAUNCHER):
            yield from ((node, LOST[state]) for node in mounting.get(folder, (name,)))
