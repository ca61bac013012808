"""What a host has before its containers start: mounts, keys, secrets, caches; planned here, or pushed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from labctl import accelerators, naming
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.deploy import clones
from labctl.backends.docker.deploy.steps import (
    EmptyDirectories,
    MakeDirectories,
    ProbeEngines,
    RemoveState,
    WriteFiles,
    WriteKeys,
)
from labctl.backends.docker.hosts import push
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.lab import capabilities, device_requests
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.plan import Step
from labctl.backends.spec import own_mounts
from labctl.model import HERE, File, Host, Lab
from labctl.records import manifest
from labctl.system.files import outdated

WORKLOADS = "workloads"
# Seconds for the folders, and for the files of one host: workloads are small, a person's clone may not be.
MAKING = 30
MAKE = Path(__file__).with_name("provision.sh").read_text(encoding="utf-8")


def plan_local(lab: Lab, rendered: tuple[File, ...], image_id: str | None) -> tuple[tuple[Step, ...], tuple[File, ...]]:
    """What is to be made and removed below the lab directory, and the rendered files that change."""
    changed = outdated(lab.directory, rendered)
    own = (*secrets(lab), *cache_markers(lab, image_id))
    written = (*changed, *(file for file in own if not is_current(lab.directory / file.path, file)))
    here = f"{lab.directory}/"
    folders = tuple(source.removeprefix(here) for source in own_mounts(lab) if not Path(source).is_dir())
    keys = ssh_keys.outdated(lab)
    gone = tuple(str(path.relative_to(lab.directory)) for path in surplus(lab))
    found: list[Step] = []
    if gone:
        found.append(RemoveState(paths=gone, cause="no longer needed"))
    if stale := stale_caches(lab, image_id):
        found.append(EmptyDirectories(paths=stale, cause="filled by another image"))
    if folders:
        found.append(MakeDirectories(paths=folders, cause="mounted by nodes"))
    if keys:
        found.append(WriteKeys(paths=keys, cause="new or changed"))
    if written:
        found.append(WriteFiles(files=written, cause="new or changed"))
    return tuple(found), changed


def is_current(path: Path, file: File) -> bool:
    return not outdated(path.parent, (replace(file, path=path.name),)) and path.stat().st_mode & 0o777 == file.mode


def secrets(lab: Lab) -> tuple[File, ...]:
    """Each node's secrets as 0600 files that compose mounts under /run/secrets."""
    return tuple(
        File(path=f"{naming.node_directory(node.name)}/secrets/{name}", content=value.reveal())
        for node in lab.nodes
        for name, value in lab.secrets
    )


def cache_markers(lab: Lab, image_id: str | None) -> tuple[File, ...]:
    """In each node's own cache of compiled operators, the id of the image that fills it: they fit only their torch."""
    nodes = (node.name for node in lab.nodes if node.host == HERE)
    return tuple(File(path=f"{naming.cache_directory(name)}/image", content=image_id or "") for name in nodes)


def surplus(lab: Lab) -> Iterator[Path]:
    """What the lab directory has of removed nodes, secrets and device names."""
    names = {node.name for node in lab.nodes}
    for folder in (naming.node_directory(""), naming.cache_directory("")):
        yield from (path for path in (lab.directory / folder).glob("*") if path.name not in names)
    for node in lab.nodes:
        links = {name for name, _ in node.devices.links}
        found = (lab.directory / naming.node_directory(node.name) / "by-path").glob("*")
        yield from (path for path in found if path.name not in links)
    yield from stale_secrets(lab)


def stale_caches(lab: Lab, image_id: str | None) -> tuple[str, ...]:
    """The nodes' caches of compiled operators that another image filled."""
    paths = (naming.cache_directory(node.name) for node in lab.nodes if node.host == HERE)
    marker = (File(path="image", content=image_id or ""),)
    return tuple(path for path in paths if (lab.directory / path).is_dir() and outdated(lab.directory / path, marker))


def stale_secrets(lab: Lab) -> Iterator[Path]:
    """The files of secrets that are no longer set."""
    kept = {name for name, _ in lab.secrets}
    for node in lab.nodes:
        found = (lab.directory / naming.node_directory(node.name) / "secrets").glob("*")
        yield from (path for path in found if path.name not in kept)


def plan_probe(cluster: Cluster) -> tuple[ProbeEngines, ...]:
    """The engines that were never asked for the lab's limits, or for the way to request its devices."""
    names = tuple(host.name for host in cluster.hosts if is_unprobed(cluster, host))
    files = tuple(f"{capabilities.FILES}/{name}.json" for name in names)
    return (ProbeEngines(paths=files, cause="never probed"),) if names else ()


def is_unprobed(cluster: Cluster, host: Host) -> bool:
    engine = cluster.capabilities(host)
    if engine is None:
        return False
    known = capabilities.kept(cluster.directory, host.name, engine)
    open_choice = bool(host.devices) and accelerators.get(cluster.accelerator).engine.is_open
    return bool(capabilities.unprobed(cluster.settings, known)) or (open_choice and not known.get(device_requests.KEY))


def send(lab: Lab, host: Host, connection: Connection, image_id: str) -> None:
    """What is the host's, to the host: folders, then the files of its nodes, the workloads and clones, if they changed.

    No files where it sees the lab directory itself.
    HostError names the host, what is missing, and what came back.
    """
    nodes = [node for node in lab.nodes if node.host == host.name]
    caches = [naming.own_path(lab, host, naming.cache_directory(node.name)) for node in nodes]
    sources = [mount.source for mount in lab.mounts if mount.source in own_mounts(lab) or is_below(mount.source, lab)]
    pushed = {str(lab.directory / WORKLOADS), *dict(lab.clones)}
    mounts = [naming.path_on(lab, host, source) for source in sources if source not in pushed]
    locks = [str(naming.lease_path(host.locks, device)) for node in nodes for device in node.devices.devices]
    words = (image_id, str(len(caches)), " ".join(locks), *caches, *mounts)
    connection.run(MAKE, *words, timeout=MAKING)
    if not naming.sent(host):
        return
    wanted = manifests(lab, host, shared(lab))
    push.push(connection, host.directory, wanted, prune=naming.node_directory("").rstrip("/"))


def shared(lab: Lab) -> dict[str, manifest.Manifest]:
    """What every host gets, by where it lies below the lab's directory there: workloads and clones."""
    path = lab.directory / WORKLOADS
    workloads = manifest.scan(path) if path.is_dir() else manifest.Manifest(path, ())
    return {WORKLOADS: workloads, **clones.scan(lab)}


def manifests(lab: Lab, host: Host, shared: Mapping[str, manifest.Manifest]) -> dict[str, manifest.Manifest]:
    """What a host gets: what is ``shared`` by all, and the files of its nodes."""
    names = [node.name for node in lab.nodes if node.host == host.name]
    nodes = manifest.scan_nodes(lab.directory, names, launcher=lab.nodes[0].host == host.name)
    return {**shared, **nodes}


def is_below(source: str, lab: Lab) -> bool:
    """Whether a path is in the lab's directory, which is labctl's own on a host."""
    return Path(source).is_relative_to(lab.directory)
