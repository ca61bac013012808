"""Prepare a host for its containers: mounts, keys, secrets, caches; plan this machine's, push to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
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
# Time limit of making a host's folders, in seconds.
MAKING = 30
MAKE = Path(__file__).with_name("provision.sh").read_text(encoding="utf-8")


def plan_local(lab: Lab, rendered: tuple[File, ...], image_id: str | None) -> tuple[tuple[Step, ...], tuple[File, ...]]:
    """Plan changes in the lab directory: removals, folders, keys, files; return also rendered files that change."""
    changed = outdated(lab.directory, rendered)
    private = (*secrets(lab), *cache_markers(lab, image_id))
    written = (*changed, *(file for file in private if not is_current(lab.directory / file.path, file)))
    here = f"{lab.directory}/"
    folders = tuple(source.removeprefix(here) for source in own_mounts(lab) if not Path(source).is_dir())
    keys = ssh_keys.outdated(lab)
    gone = tuple(str(path.relative_to(lab.directory)) for path in surplus(lab))
    steps: list[Step] = []
    if gone:
        steps.append(RemoveState(paths=gone, cause="no longer needed"))
    if stale := stale_caches(lab, image_id):
        steps.append(EmptyDirectories(paths=stale, cause="filled by another image"))
    if folders:
        steps.append(MakeDirectories(paths=folders, cause="mounted by nodes"))
    if keys:
        steps.append(WriteKeys(paths=keys, cause="new or changed"))
    if written:
        steps.append(WriteFiles(files=written, cause="new or changed"))
    return tuple(steps), changed


def is_current(path: Path, file: File) -> bool:
    """Return True if a file exists with this content and these permissions."""
    return not outdated(path.parent, (replace(file, path=path.name),)) and path.stat().st_mode & 0o777 == file.mode


def secrets(lab: Lab) -> tuple[File, ...]:
    """Return a 0600 file per node and secret, which compose mounts under /run/secrets."""
    files = []
    for node in lab.nodes:
        folder = f"{naming.node_directory(node.name)}/secrets"
        files += [File(path=f"{folder}/{name}", content=value.reveal()) for name, value in lab.secrets]
    return tuple(files)


def cache_markers(lab: Lab, image_id: str | None) -> tuple[File, ...]:
    """Return a file with the image id per local node's cache of compiled operators, which only that image can use."""
    nodes = (node.name for node in lab.nodes if node.host == HERE)
    return tuple(File(path=f"{naming.cache_directory(name)}/image", content=image_id or "") for name in nodes)


def surplus(lab: Lab) -> Iterator[Path]:
    """Yield the paths in the lab directory that belong to removed nodes, secrets or device links."""
    names = {node.name for node in lab.nodes}
    for folder in (naming.node_directory(""), naming.cache_directory("")):
        yield from (path for path in (lab.directory / folder).glob("*") if path.name not in names)
    for node in lab.nodes:
        links = {name for name, _ in node.devices.links}
        paths = (lab.directory / naming.node_directory(node.name) / "by-path").glob("*")
        yield from (path for path in paths if path.name not in links)
    yield from stale_secrets(lab)


def stale_caches(lab: Lab, image_id: str | None) -> tuple[str, ...]:
    """Return the cache folders of this machine's nodes that an image other than ``image_id`` filled."""
    paths = (naming.cache_directory(node.name) for node in lab.nodes if node.host == HERE)
    marker = (File(path="image", content=image_id or ""),)
    return tuple(path for path in paths if (lab.directory / path).is_dir() and outdated(lab.directory / path, marker))


def stale_secrets(lab: Lab) -> Iterator[Path]:
    """Yield the files of secrets that are no longer set."""
    kept = {name for name, _ in lab.secrets}
    for node in lab.nodes:
        paths = (lab.directory / naming.node_directory(node.name) / "secrets").glob("*")
        yield from (path for path in paths if path.name not in kept)


def plan_probe(cluster: Cluster) -> tuple[ProbeEngines, ...]:
    """Return a step that probes the engines whose limits or way to request devices are unknown; () if none."""
    names = tuple(host.name for host in cluster.hosts if is_unprobed(cluster, host))
    files = tuple(f"{capabilities.FILES}/{name}.json" for name in names)
    return (ProbeEngines(paths=files, cause="never probed"),) if names else ()


def is_unprobed(cluster: Cluster, host: Host) -> bool:
    """Tell if the limits of a host's engine, or its way to request devices, are not known; False if it is silent."""
    engine = cluster.capabilities(host)
    if engine is None:
        return False
    kept = capabilities.kept(cluster.directory, host.name, engine)
    open_choice = bool(host.devices) and accelerators.get(cluster.accelerator).engine.is_open
    return bool(capabilities.unprobed(cluster.settings, kept)) or (open_choice and not kept.get(device_requests.KEY))


def send(lab: Lab, host: Host, connection: Connection, image_id: str) -> None:
    """Make a host's folders, empty caches of another image, push changed files. HostError if that fails.

    No files are pushed if the host sees the lab directory itself.
    """
    nodes = [node for node in lab.nodes if node.host == host.name]
    caches = [naming.own_path(lab, host, naming.cache_directory(node.name)) for node in nodes]
    sources = [mount.source for mount in lab.mounts if mount.source in own_mounts(lab) or is_below(mount.source, lab)]
    pushed = {str(lab.directory / WORKLOADS), *dict(lab.clones)}
    mounts = [naming.path_on(lab, host, source) for source in sources if source not in pushed]
    devices = chain.from_iterable(node.devices.devices for node in nodes)
    locks = [str(naming.lease_path(host.locks, device)) for device in devices]
    arguments = (image_id, str(len(caches)), " ".join(locks), *caches, *mounts)
    connection.run(MAKE, *arguments, timeout=MAKING)
    if not naming.sent(host):
        return
    contents = manifests(lab, host, shared(lab))
    push.push(connection, host.directory, contents, prune=naming.node_directory("").rstrip("/"))


def shared(lab: Lab) -> dict[str, manifest.Manifest]:
    """Return the manifests that every host gets, by path below the lab's directory there: workloads and clones."""
    path = lab.directory / WORKLOADS
    workloads = manifest.scan(path) if path.is_dir() else manifest.Manifest(path, ())
    return {WORKLOADS: workloads, **clones.scan(lab)}


def manifests(lab: Lab, host: Host, shared: Mapping[str, manifest.Manifest]) -> dict[str, manifest.Manifest]:
    """Return what is pushed to a host, by folder: the ``shared`` manifests, and those of its nodes' files."""
    names = [node.name for node in lab.nodes if node.host == host.name]
    nodes = manifest.scan_nodes(lab.directory, names, launcher=lab.nodes[0].host == host.name)
    return {**shared, **nodes}


def is_below(source: str, lab: Lab) -> bool:
    """Tell if a path is in the lab's directory, which on a host belongs to labctl."""
    return Path(source).is_relative_to(lab.directory)
