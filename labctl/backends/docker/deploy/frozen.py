"""The facts of a lab on Docker hosts, as `labctl freeze` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from labctl import launchers, naming
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import provenance
from labctl.backends.docker.hosts.sources import Kind
from labctl.backends.docker.images import catalog, package_sources
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.errors import HostError, raise_all
from labctl.jobs import inputs
from labctl.model import HERE, LAUNCHER, Cache, Host, Lab, Workload
from labctl.records import manifest, store
from labctl.system import files
from labctl.system.parallel import map_hosts
from labctl.workloads import external, loader

SCHEMA = 1
HASHING = 24 * 3600
"""Seconds for a host to read its data."""
# How a script that takes a seed declares what that is unless it is given.
SEED = re.compile(r"""["']--seed["'].*\bdefault\s*=\s*(\d+)""")


def of(context: Context, cluster: Cluster, lab: Lab) -> dict[str, Any]:
    """What the lab is now. HostError for a host that does not say, or has no image of the lab."""
    observed = cluster.engine.observe(lab.name, cluster.image)
    raise_all(dict(observed.silent))
    for host in lab.hosts:
        if not observed.on(host.name).image:
            raise HostError(f"{host.name} has no image {lab.image}", hint="labctl up", node=host.name)
    workloads = tuple(_workloads(context, lab))
    cached = provenance.repositories(_cache(workloads))
    first = cluster.daemons[lab.hosts[0].name]
    data = _data(lab, workloads)
    image = str(observed.on(lab.hosts[0].name).image)
    return {
        "schema": SCHEMA,
        "labctl": metadata.version("labctl"),
        "image": _image(first, lab),
        "packages": provenance.packages_of(lab, cluster, image),
        "pinned": _pinned(lab.image, cluster.base_image),
        "settings": {key: value for key, value, origin in cluster.settings.rows() if value and origin != "default"},
        "files": _files(lab),
        "seeds": {one.name: found for one in workloads if (found := seed(one))},
        "hosts": _hosts(cluster, lab, observed, cached, data),
        "nodes": _nodes(lab, observed),
    }


def _workloads(context: Context, lab: Lab) -> Iterator[Workload]:
    """Those of the lab that can be read; a broken one is named, and its file is frozen all the same."""
    declared, errors = loader.list_all(lab.directory / "workloads", launchers.known())
    for error in errors:
        context.warn(error.message)
    yield from (one for one in declared if one.name not in external.FAMILIES)


def _cache(workloads: tuple[Workload, ...]) -> Cache:
    return Cache(
        models=tuple(model for one in workloads for model in one.cache.models),
        datasets=tuple(name for one in workloads for name in one.cache.datasets),
    )


def _image(engine: DockerEngine, lab: Lab) -> dict[str, str | None]:
    """The image and the one it is built on, by which digest a registry or else the engine knows that."""
    base = engine.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    found = (engine.image(base) if base else None) or {}
    digests = found.get("RepoDigests") or ()
    return {
        "name": lab.image,
        "base": base,
        "base_digest": digests[0].rpartition("@")[2] if digests else found.get("Id"),
    }


def _pinned(image: str, base: str) -> dict[str, dict[str, str | None]]:
    """The versions that labctl's own image is built of, by its lock; none of anyone's."""
    own = catalog.name_of(image) or catalog.name_of(base)
    lock = catalog.file(own, "lock") if own else None
    return {own: package_sources.pins(lock.read_text(encoding="utf-8"))} if own and lock and lock.is_file() else {}


def _files(lab: Lab) -> dict[str, str]:
    """SHA-256 of each file of the workloads: declarations, scripts, configurations."""
    root = lab.directory / "workloads"
    found = manifest.scan(root).entries if root.is_dir() else ()
    return {f"workloads/{one.path}": one.content for one in found if one.kind != "dir"}


def seed(workload: Workload) -> str:
    """The seed of what is random in a run, its weights as well: the workload's, else its script's own."""
    words = workload.arguments
    given = [after for word, after in pairwise(words) if word == "--seed"]
    given += [word.partition("=")[2] for word in words if word.startswith("--seed=")]
    if given:
        return given[-1]
    own = workload.directory / workload.script
    for path in sorted(workload.directory.glob("*.py"), key=lambda path: (path != own, path)):
        with suppress(OSError):
            if found := SEED.search(files.read_limited(path).decode("utf-8", "replace")):
                return found[1]
    return ""


def _data(lab: Lab, workloads: tuple[Workload, ...]) -> tuple[str, ...]:
    """The paths on this machine of the data that workloads name, and that their runs were given."""
    recorded = list(workloads)
    for run_id in store.ids(lab.directory):
        with suppress(HostError):
            recorded.append(store.load_job(lab.directory, run_id).workload)
    paths = (inputs.locate(lab, path) for one in recorded for path in inputs.given(one))
    return tuple(sorted({str(path) for path in paths if not path.is_relative_to(lab.directory / inputs.RUNS)}))


def _hosts(
    cluster: Cluster, lab: Lab, observed: ObservedState, cached: Mapping[str, Path], data: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Of each host its image, engine, devices and driver; its clones, data and cached models."""
    on_host = {host.name: tuple(naming.path_on(lab, host, path) for path in data) for host in lab.hosts}
    asked: dict[str, list[tuple[Kind, str]]] = {
        host.name: [
            *provenance.code(lab, host),
            *provenance.snapshots(lab, host, cached),
            *(("data", path) for path in on_host[host.name]),
        ]
        for host in lab.hosts
    }
    asked[HERE] = [*asked.get(HERE, ()), *provenance.code_here(lab)]
    found, failed = provenance.read(cluster, asked, HASHING)
    raise_all(failed)
    versions, failed = map_hosts(
        lambda name: cluster.engine.capabilities(name).versions(), {name: name for name in on_host}
    )
    raise_all(failed)

    def of_host(host: Host) -> dict[str, Any]:
        there = found[host.name]
        revisions = provenance.revisions(lab, host, cached, there)
        return {
            "image": observed.on(host.name).image,
            "driver": host.driver,
            "cores": len(host.cpus),
            **versions[host.name],
            **{f"device {one.id}": _device(one.name, one.uuid, one.firmware) for one in host.devices},
            **{name: revision for name, revision in revisions.items() if revision},
            **{f"{kind} {path}": value for (kind, path), value in there.items() if kind != "snapshot"},
        }

    known = {host.name: of_host(host) for host in lab.hosts}
    if HERE not in known:
        known[HERE] = {f"code {path}": value for (_, path), value in found[HERE].items()}
    return known


def _device(*facts: str) -> str:
    return " ".join(filter(None, facts))


def _nodes(lab: Lab, observed: ObservedState) -> dict[str, dict[str, str | None]]:
    """Of each node, and the launcher, the host and the image that it runs, or would run."""
    slots = {node.name: node.slots for node in lab.nodes}
    known = {}
    for name in lab.containers:
        host, container = lab.host_of(name).name, observed.container(name)
        image = container.image if container else observed.on(host).image
        known[name] = {"host": host, "image": image}
        if name != LAUNCHER:
            known[name]["slots"] = str(slots[name])
    return known
