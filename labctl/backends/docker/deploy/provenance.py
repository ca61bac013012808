"""What a run is on and of: images, packages, devices and drivers, commits of code, revisions of what is cached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
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
from labctl.model import HERE, Cache, Host, Job, Lab, Node
from labctl.system import parallel

PACKAGES = ".lab/packages-of"
"""The packages of each image by its id, relative to the lab directory: an id never comes to mean another image."""
LOOKING = 10
"""Seconds for hosts to say of what commits a run's code is."""


def begin(lab: Lab, job: Job, cluster: Cluster, observed: ObservedState) -> Future[dict[str, Any]]:
    """Find it out for a run's record, beside what follows; what cannot be found out is left out."""
    return parallel.begin(lambda: of_run(lab, job, cluster, observed))


def of_run(lab: Lab, job: Job, cluster: Cluster, observed: ObservedState) -> dict[str, Any]:
    """What the record has of it. A host that does not say is left out: the run itself tells what is wrong there."""
    hosts = {host.name: host for host in map(lab.host_of, job.containers)}
    cached = repositories(job.workload.cache)
    asked = {name: [*code(lab, host), *snapshots(lab, host, cached)] for name, host in hosts.items()}
    # A replay has its code from the record of another run, which says where it came from.
    roots = {copy.root for copy in job.code} if not job.replays else ()
    asked[HERE] = [*asked.get(HERE, ()), *code_here(lab, roots)]
    found, _ = read(cluster, asked)
    try:
        image = observed.on(lab.hosts[0].name).image
        packages = packages_of(lab, cluster, image) if image else None
    except HostError:
        packages = None
    return {
        "images": {name: observed.on(name).image for name in hosts},
        "packages": packages,
        "devices": {node.name: devices(lab, node) for node in job.nodes},
        "code": [
            {"host": host, "path": path, "commit": commit_of(value), "dirty": value != commit_of(value)}
            for host, values in found.items()
            for (kind, path), value in sorted(values.items())
            if kind == "code"
        ],
        "cache": {name: revisions(lab, host, cached, found.get(name, {})) for name, host in hosts.items()},
    }


def commit_of(value: str) -> str:
    return value.removesuffix(sources.CHANGED)


def packages_of(lab: Lab, cluster: Cluster, image: str) -> dict[str, str] | None:
    """The packages of an image, by its id, that the launcher's host has. HostError if it does not list them."""
    engine = cluster.daemons.get(lab.hosts[0].name)
    return sbom.versions(engine, image, lab.directory / PACKAGES) if engine else None


def devices(lab: Lab, node: Node) -> list[dict[str, str]]:
    """Those of a node, with the version of their driver."""
    driver = lab.host(node.host).driver
    fields = ("id", "name", "uuid", "firmware")
    return [{**{key: getattr(one, key) for key in fields}, "driver": driver} for one in node.devices.devices]


def read(
    cluster: Cluster, asked: Mapping[str, Iterable[tuple[Kind, str]]], seconds: float = LOOKING
) -> tuple[dict[str, Sources], dict[str, HostError]]:
    """What each host has of what it is asked for, all at once, and what failed on which."""

    def look(wanted: tuple[str, Iterable[tuple[Kind, str]]]) -> Sources:
        host, words = wanted
        # The lab's directory is on this machine, whether or not it is one of the lab's hosts.
        connection = LocalConnection() if host == HERE else connection_to(cluster.engine, host)
        return sources.read(connection, words, seconds)

    return parallel.map_hosts(look, {host: (host, words) for host, words in asked.items()})


# --- what to ask for -----------------------------------------------------------------------------------------


def code_here(lab: Lab, roots: Iterable[Path] = ()) -> list[tuple[Kind, str]]:
    """The lab's workloads, what else a run copies, and the clones that hosts are sent."""
    workloads = lab.directory / "workloads"
    others = (root for root in roots if not root.is_relative_to(workloads.resolve()))
    sent = dict(lab.clones) if any(map(naming.sent, lab.hosts)) else {}
    return [("code", str(path)) for path in dict.fromkeys((str(workloads), *map(str, others), *sent))]


def code(lab: Lab, host: Host) -> list[tuple[Kind, str]]:
    """What a host's nodes mount of it that is not the lab's own: clones, as far as they are any."""
    sent = dict(lab.clones) if naming.sent(host) else {}
    own = {*own_mounts(lab), inputs.cache_of(lab), *sent}
    places = (mount.source for mount in lab.mounts if mount.source not in own)
    return [("code", naming.path_on(lab, host, path)) for path in dict.fromkeys(places)]


def repositories(cache: Cache) -> dict[str, Path]:
    """Where models and datasets lie below the shared cache, by what they are called."""
    hub = Hub(endpoint="", token=None, cache=Path(HUB))
    models = {f"model {name}": hub.folder("model", name) for name in cache.models}
    return models | {f"dataset {name}": hub.folder("dataset", name) for name in cache.datasets}


def snapshots(lab: Lab, host: Host, wanted: Mapping[str, Path]) -> list[tuple[Kind, str]]:
    return [("snapshot", str(_cached(lab, host, path))) for path in wanted.values()]


def revisions(lab: Lab, host: Host, wanted: Mapping[str, Path], found: Sources) -> dict[str, str | None]:
    """The newest revision of each in the host's cache, which is the one that runs read; None of what is not there."""
    return {name: found.get(("snapshot", str(_cached(lab, host, path)))) for name, path in wanted.items()}


def _cached(lab: Lab, host: Host, path: Path) -> Path:
    return Path(naming.path_on(lab, host, inputs.cache_of(lab))) / path
