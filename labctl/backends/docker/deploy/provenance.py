"""Provenance of a run: images, packages, devices, drivers, commits of code, revisions of cached models and data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

from labctl import naming
from labctl.backends.docker.engine import connection_to
from labctl.backends.docker.hosts import sources
from labctl.backends.docker.hosts.sources import Kind, Sources
from labctl.backends.docker.hosts.ssh import LocalConnection
from labctl.backends.docker.images import sbom
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.spec import own_mounts
from labctl.backends.state import ObservedState
from labctl.errors import HostError
from labctl.hub.client import HUB, Hub
from labctl.jobs import inputs
from labctl.model import HERE, Cache, File, Host, Job, Lab, Node
from labctl.system import parallel

PACKAGES = ".lab/packages-of"
"""Cache of the packages of images by image id, relative to the lab directory; the packages of an id never change."""
LOOKING = 10
"""Time limit of reading commits and revisions on a host."""


def rendered(lab: Lab, job: Job, *, preview: bool) -> Iterator[File]:
    """Yield copies of the compose files of a run's containers for its record; missing ones only in a ``preview``."""
    # The launcher is in the first node's file.
    for name in dict.fromkeys((lab.nodes[0].name, *(node.name for node in job.nodes))):
        compose = lab.directory / naming.compose_path(name)
        if preview or compose.exists():
            path = f"rendered/{naming.compose_path(name).removeprefix('.lab/')}"
            yield File(path=path, content=compose.read_text() if compose.exists() else "")


def begin(lab: Lab, job: Job, cluster: Cluster, observed: ObservedState) -> Future[dict[str, Any]]:
    """Start collecting a run's provenance in a background thread; return the future of its result."""
    return parallel.begin(lambda: of_run(lab, job, cluster, observed))


def of_run(lab: Lab, job: Job, cluster: Cluster, observed: ObservedState) -> dict[str, Any]:
    """Return a run's image ids, packages (None if unlisted), devices, code commits and cached revisions.

    Hosts that do not answer are left out: the run itself reports their errors.
    """
    hosts = {host.name: host for host in map(lab.host_of, job.containers)}
    cached = repositories(job.workload.cache)
    asked = {name: [*code(lab, host), *snapshots(lab, host, cached)] for name, host in hosts.items()}
    # A replay copies code from the record of another run, which has the provenance.
    roots = {copy.root for copy in job.code} if not job.replays else ()
    asked[HERE] = [*asked.get(HERE, ()), *code_here(lab, roots)]
    sources_by_host, _ = read(cluster, asked)
    try:
        image = observed.on(lab.hosts[0].name).image
        packages = packages_of(lab, cluster, image) if image else None
    except HostError:
        packages = None
    images = {name: observed.on(name).image for name in hosts}
    devices_by_node = {node.name: devices(lab, node) for node in job.nodes}
    commits = list(chain.from_iterable(commits_of(*item) for item in sources_by_host.items()))
    return {
        "images": images,
        "packages": packages,
        "devices": devices_by_node,
        "code": commits,
        "cache": {name: revisions(lab, host, cached, sources_by_host.get(name, {})) for name, host in hosts.items()},
    }


def commits_of(host: str, values: Sources) -> Iterator[dict[str, Any]]:
    """Yield a dictionary per code folder of a host: its path, its commit, and if it has uncommitted changes."""
    for (kind, path), value in sorted(values.items()):
        if kind == "code":
            commit = commit_of(value)
            yield {"host": host, "path": path, "commit": commit, "dirty": value != commit}


def commit_of(value: str) -> str:
    """Return the commit id of a value, without the mark for uncommitted changes."""
    return value.removesuffix(sources.CHANGED)


def packages_of(lab: Lab, cluster: Cluster, image: str) -> dict[str, str] | None:
    """Return the package versions of an image on the first host, None without Docker. HostError if unlisted."""
    engine = cluster.daemons.get(lab.hosts[0].name)
    return sbom.versions(engine, image, lab.directory / PACKAGES) if engine else None


def devices(lab: Lab, node: Node) -> list[dict[str, str]]:
    """Return id, name, uuid, firmware and driver version of each device of a node."""
    driver = lab.host(node.host).driver
    return [
        {"id": device.id, "name": device.name, "uuid": device.uuid, "firmware": device.firmware, "driver": driver}
        for device in node.devices.devices
    ]


def read(
    cluster: Cluster, asked: Mapping[str, Iterable[tuple[Kind, str]]], seconds: float = LOOKING
) -> tuple[dict[str, Sources], dict[str, HostError]]:
    """Read commits, revisions and digests on all hosts at once; return them by host, and the hosts that failed."""

    def look(request: tuple[str, Iterable[tuple[Kind, str]]]) -> Sources:
        """Return the commits, revisions and digests asked of one host. HostError if they cannot be read."""
        host, paths = request
        # The lab directory is on this machine, also if this machine is not a host of the lab.
        connection = LocalConnection() if host == HERE else connection_to(cluster.engine, host)
        return sources.read(connection, paths, seconds)

    return parallel.map_hosts(look, {host: (host, paths) for host, paths in asked.items()})


# --- requests ------------------------------------------------------------------------------------------------


def code_here(lab: Lab, roots: Iterable[Path] = ()) -> list[tuple[Kind, str]]:
    """Return requests for code on this machine: workloads, other folders that a run copies, clones to push."""
    workloads = lab.directory / "workloads"
    others = (root for root in roots if not root.is_relative_to(workloads.resolve()))
    sent = dict(lab.clones) if any(map(naming.sent, lab.hosts)) else {}
    return [("code", str(path)) for path in dict.fromkeys((str(workloads), *map(str, others), *sent))]


def code(lab: Lab, host: Host) -> list[tuple[Kind, str]]:
    """Return requests for the folders that a host's nodes mount and that may be clones; not the lab's own mounts."""
    sent = dict(lab.clones) if naming.sent(host) else {}
    excluded = {*own_mounts(lab), inputs.cache_of(lab), *sent}
    places = (mount.source for mount in lab.mounts if mount.source not in excluded)
    return [("code", naming.path_on(lab, host, path)) for path in dict.fromkeys(places)]


def repositories(cache: Cache) -> dict[str, Path]:
    """Map ``model NAME`` and ``dataset NAME`` of those a workload declares to their paths below the shared cache."""
    hub = Hub(endpoint="", token=None, cache=Path(HUB))
    models = {f"model {name}": hub.folder("model", name) for name in cache.models}
    return models | {f"dataset {name}": hub.folder("dataset", name) for name in cache.datasets}


def snapshots(lab: Lab, host: Host, folders: Mapping[str, Path]) -> list[tuple[Kind, str]]:
    """Return requests for the snapshots of these repositories in a host's cache."""
    return [("snapshot", str(_cached(lab, host, path))) for path in folders.values()]


def revisions(lab: Lab, host: Host, folders: Mapping[str, Path], values: Sources) -> dict[str, str | None]:
    """Return each repository's newest revision in the host's cache, which runs use, by name; None if not cached."""
    return {name: values.get(("snapshot", str(_cached(lab, host, path)))) for name, path in folders.items()}


def _cached(lab: Lab, host: Host, path: Path) -> Path:
    return Path(naming.path_on(lab, host, inputs.cache_of(lab))) / path
