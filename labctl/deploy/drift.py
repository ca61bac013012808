"""What the hosts of a lab lack of its files, found before anything is done about it: they are asked, not changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from labctl import naming
from labctl.compose import ssh_keys
from labctl.deploy.provision import WORKLOADS, trees
from labctl.errors import HostError
from labctl.hosts import manifest, push
from labctl.hosts.push import Shown
from labctl.hosts.ssh import Connection
from labctl.model import LAUNCHER, File, Host, Lab
from labctl.system.parallel import attempt

LOST: dict[Shown, str] = {"other": "has other files", "gone": "its files are gone"}


@dataclass(frozen=True, slots=True)
class Drift:
    """What files are to be sent, and what it means for containers."""

    hosts: frozenset[str]
    """Those that do not show the lab's files as they are to be."""
    containers: Mapping[str, str]
    """Those that have lost files which they mounted when they started, each with the reason."""


def find(
    lab: Lab, connections: Mapping[str, Connection], changed: tuple[File, ...], failed: Collection[str]
) -> tuple[Drift, dict[str, HostError]]:
    """What hosts lack that have not ``failed``, and why some do not say it; ``changed`` files are not written yet."""
    keyless = ssh_keys.missing(lab)
    renewed = {node.name for node in lab.nodes if any(is_of(node.name, file) for file in changed)}
    hosts = {host.name: host for host in lab.hosts if naming.sent(host) and host.name not in failed}
    path = lab.directory / WORKLOADS
    workloads = manifest.of(path) if hosts and path.is_dir() else manifest.Tree(path, ())

    def look(host: Host) -> dict[str, Shown]:
        """Nothing of a host whose nodes lack keys: those are made anew, and so are the nodes."""
        if not keyless.isdisjoint(lab.containers_on(host.name)):
            return {}
        return push.shown(connections[host.name], host.directory, trees(lab, host, workloads))

    shown, mute = attempt(look, hosts)
    # The launcher knows the keys of all.
    touched = {lab.host_of(node).name for node in (*renewed, *([LAUNCHER] if keyless else ()))}
    unsent = frozenset(name for name, found in shown.items() if name in touched or set(found.values()) != {"same"})
    lost = {node: why for name, found in shown.items() for node, why in bereft(lab, name, found) if node not in renewed}
    return Drift(unsent, {**lost, **dict.fromkeys(keyless, "its keys are gone")}), mute


def is_of(node: str, file: File) -> bool:
    return file.path.startswith(f"{naming.node_directory(node)}/")


def bereft(lab: Lab, host: str, shown: Mapping[str, Shown]) -> Iterator[tuple[str, str]]:
    """The containers of a host that would not see what is sent now, and why.

    A directory that a container has mounted as a whole shows what is sent into it, as long as nobody removed it. Of a
    node's own directory containers have mounted parts, which stay what they were.
    """
    first = lab.nodes[0].name
    mounting = {WORKLOADS: lab.containers_on(host), first: (first, LAUNCHER)}
    for folder, what in shown.items():
        name = PurePosixPath(folder).name
        if what == "gone" or (what == "other" and name not in (WORKLOADS, LAUNCHER)):
            yield from ((node, LOST[what]) for node in mounting.get(name, (name,)))
