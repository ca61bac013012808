"""Facts of a lab on Docker hosts for `labctl freeze`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from labctl import __version__, launchers, naming
from labctl.backends import facts, health
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import on_hosts, provenance
from labctl.backends.docker.hosts.sources import Kind
from labctl.backends.docker.images import catalog, package_sources
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config import health_rules
from labctl.config.context import Context
from labctl.errors import HostError, raise_all
from labctl.jobs import inputs
from labctl.model import HERE, LAUNCHER, Cache, Host, Lab, Workload
from labctl.records import store
from labctl.system import files
from labctl.system.parallel import map_hosts
from labctl.workloads import external, loader

SCHEMA = 1
HASHING = 24 * 3600
"""Time limit of a host to read its data, in seconds."""
# Declaration of a script's default seed.
SEED = re.compile(r"""["']--seed["'].*\bdefault\s*=\s*(\d+)""")


def of(context: Context, cluster: Cluster, lab: Lab) -> dict[str, Any]:
    """Return what `labctl freeze` records of a lab on its hosts. HostError if a host is silent or has no image.

    That is its image, packages, settings, workload files, seeds, hosts and nodes.
    """
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
    seeds = {workload.name: value for workload in workloads if (value := seed(workload))}
    return {
        "schema": SCHEMA,
        "labctl": __version__,
        "image": _image(first, lab),
        "packages": provenance.packages_of(lab, cluster, image),
        "pinned": _pinned(lab.image, cluster.base_image),
        "settings": facts.settings_given(cluster.settings),
        "files": facts.workload_files(lab.directory),
        "seeds": seeds,
        "hosts": _hosts(cluster, lab, observed, cached, data),
        "nodes": _nodes(lab, observed),
    }


def _workloads(context: Context, lab: Lab) -> Iterator[Workload]:
    """Yield the lab's valid workloads, without external families; warn of each invalid one."""
    declared, errors = loader.list_all(lab.directory / "workloads", launchers.known())
    for error in errors:
        context.warn(error.message)
    yield from (workload for workload in declared if workload.name not in external.FAMILIES)


def _cache(workloads: tuple[Workload, ...]) -> Cache:
    """Return the models and datasets that workloads declare."""
    models = chain.from_iterable(workload.cache.models for workload in workloads)
    datasets = chain.from_iterable(workload.cache.datasets for workload in workloads)
    return Cache(models=tuple(models), datasets=tuple(datasets))


def _image(engine: DockerEngine, lab: Lab) -> dict[str, str | None]:
    """Return the names of the image and its base, and the base's registry digest, or its id if it has none."""
    base = engine.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    inspected = (engine.image(base) if base else None) or {}
    digests = inspected.get("RepoDigests") or ()
    return {
        "name": lab.image,
        "base": base,
        "base_digest": digests[0].rpartition("@")[2] if digests else inspected.get("Id"),
    }


def _pinned(image: str, base: str) -> dict[str, dict[str, str | None]]:
    """Return the pins of the lock file of labctl's image, or of its base, by image name; {} without such a lock."""
    name = catalog.name_of(image) or catalog.name_of(base)
    lock = catalog.file(name, "lock") if name else None
    return {name: package_sources.pins(lock.read_text(encoding="utf-8"))} if name and lock and lock.is_file() else {}


def seed(workload: Workload) -> str:
    """Return the seed that a workload passes, else the default in its script or other Python files; empty if none."""
    arguments = workload.arguments
    given = [value for option, value in pairwise(arguments) if option == "--seed"]
    given += [argument.partition("=")[2] for argument in arguments if argument.startswith("--seed=")]
    if given:
        return given[-1]
    script = workload.directory / workload.script
    for path in sorted(workload.directory.glob("*.py"), key=lambda path: (path != script, path)):
        with suppress(OSError):
            if default := SEED.search(files.read_limited(path).decode("utf-8", "replace")):
                return default[1]
    return ""


def _data(lab: Lab, workloads: tuple[Workload, ...]) -> tuple[str, ...]:
    """Return this machine's paths of data that workloads name or their runs were given, without run results."""
    recorded = list(workloads)
    for run_id in store.ids(lab.directory):
        with suppress(HostError):
            recorded.append(store.load_job(lab.directory, run_id).workload)
    given = chain.from_iterable(map(inputs.given, recorded))
    paths = (inputs.locate(lab, path) for path in given)
    return tuple(sorted({str(path) for path in paths if not path.is_relative_to(lab.directory / inputs.RUNS)}))


def _hosts(
    cluster: Cluster, lab: Lab, observed: ObservedState, cached: Mapping[str, Path], data: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return the facts of each host and this machine: image, engine, devices, driver, clones, data, cached models."""
    asked: dict[str, list[tuple[Kind, str]]] = {}
    for host in lab.hosts:
        paths: list[tuple[Kind, str]] = [("data", naming.path_on(lab, host, path)) for path in data]
        asked[host.name] = [*provenance.code(lab, host), *provenance.snapshots(lab, host, cached), *paths]
    names = {name: name for name in asked}
    asked[HERE] = [*asked.get(HERE, ()), *provenance.code_here(lab)]
    values_by_host, failed = provenance.read(cluster, asked, HASHING)
    raise_all(failed)
    versions, failed = map_hosts(lambda name: cluster.engine.capabilities(name).versions(), names)
    raise_all(failed)
    hardware = _hardware(cluster, lab)

    def of_host(host: Host) -> dict[str, Any]:
        """Return one host's image, driver, cores, versions, devices, cached revisions, clones and data."""
        values = values_by_host[host.name]
        devices = {f"device {each.id}": _device(each.name, each.uuid, each.firmware) for each in host.devices}
        revisions = provenance.revisions(lab, host, cached, values)
        cached_here = {name: revision for name, revision in revisions.items() if revision}
        paths = {f"{kind} {path}": value for (kind, path), value in values.items() if kind != "snapshot"}
        return {
            "image": observed.on(host.name).image,
            "driver": host.driver,
            "cores": len(host.cpus),
            **versions[host.name],
            **devices,
            **cached_here,
            **paths,
            health.FINGERPRINT: hardware[host.name],
        }

    facts = {host.name: of_host(host) for host in lab.hosts}
    if HERE not in facts:
        facts[HERE] = {f"code {path}": value for (_, path), value in values_by_host[HERE].items()}
    return facts


def _hardware(cluster: Cluster, lab: Lab) -> dict[str, dict[str, Any]]:
    """Return each host's fingerprint: processor, memory, cards, links, disks, drivers. HostError if one is silent."""
    subjects, rules = health.subjects_of(lab.accelerator), health_rules.load(lab.directory)
    hosts = tuple(host.name for host in lab.hosts)
    snapshots, failed = health.look(partial(on_hosts.run, cluster), hosts, subjects, rules, full=True)
    raise_all(failed)
    return {host: health.frozen(snapshot) for host, snapshot in snapshots.items()}


def _device(*facts: str) -> str:
    return " ".join(filter(None, facts))


def _nodes(lab: Lab, observed: ObservedState) -> dict[str, dict[str, str | None]]:
    """Return the host of each container, and the image that it runs or would run; of nodes also the slots."""
    slots = {node.name: node.slots for node in lab.nodes}
    facts = {}
    for name in lab.containers:
        host, container = lab.host_of(name).name, observed.container(name)
        image = container.image if container else observed.on(host).image
        facts[name] = {"host": host, "image": image}
        if name != LAUNCHER:
            facts[name]["slots"] = str(slots[name])
    return facts
