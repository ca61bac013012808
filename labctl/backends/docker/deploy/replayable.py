"""Find what a recorded run used on Docker hosts and is no longer available."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from labctl import naming
from labctl.backends.docker.deploy import provenance
from labctl.backends.docker.hosts.sources import Kind, Sources
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config.settings import Settings
from labctl.errors import ConfigError
from labctl.jobs import inputs
from labctl.jobs.job import WORK
from labctl.jobs.replay import ReplayedRun
from labctl.model import Lab
from labctl.records import store

SHORT = 19
"""Characters of a shortened image id."""


def uncommitted(lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """Yield a warning per still mounted clone that had uncommitted changes when the run began."""
    mounted = {place for host in lab.hosts for place in provenance.code(lab, host)}
    for clone in run.origin.code:
        if clone["dirty"] and ("code", clone["path"]) in mounted:
            yield f"{clone['path']} had uncommitted changes, which may differ now"


def missing(cluster: Cluster, lab: Lab, observed: ObservedState, run: ReplayedRun) -> Iterator[str]:
    """Yield a line per image, node, setting, file, source or input of a run that changed or is gone."""
    yield from _images(lab, observed, run)
    yield from _nodes(lab, run)
    yield from _settings(cluster.settings, lab, run)
    yield from _files(lab.directory, run)
    yield from _sources(cluster, lab, run)
    try:
        inputs.resolve(lab, run.job.workload)
    except ConfigError as error:
        yield error.message
    if run.job.resumed and not (lab.directory / "runs" / run.job.resumed).exists():
        yield f"runs/{run.job.resumed}, from which it resumed, is gone"


def _nodes(lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """Yield a line per node that is gone, or has fewer slots, or other host, cores or devices than recorded."""
    nodes = {node.name: node for node in lab.nodes}
    for node in run.job.nodes:
        now = nodes.get(node.name)
        if now is None or now.slots < node.slots:
            has = "the lab has no such node" if now is None else f"it has {now.slots} of {node.slots} slots"
            yield f"{node.name}: {has}"
        elif now.host != node.host or now.cpuset != node.cpuset:
            yield f"{node.name}: it was on {_place(node.host, node.cpuset)}, and is on {_place(now.host, now.cpuset)}"
        elif (devices := provenance.devices(lab, now)) != run.origin.devices.get(node.name, []):
            yield f"{node.name}: its devices or their driver were {_devices(run, node.name)}, and are {_text(devices)}"


def _images(lab: Lab, observed: ObservedState, run: ReplayedRun) -> Iterator[str]:
    """Yield a line per host whose image differs from the recorded one; one line if the lab's has another name."""
    if lab.image != run.origin.image:
        yield f"image: it ran {run.origin.image}, and the lab has {lab.image}"
        return
    names = {host.name for host in lab.hosts}
    for host, image in run.origin.images.items():
        now = observed.on(host).image
        if host in names and image and now != image:
            is_now = f"is {now[:SHORT]} there" if now else "is not there"
            back = f"docker tag {image[:SHORT]} {lab.image}, if {host} still has it"
            yield f"{host}: image {lab.image} was {image[:SHORT]}, and {is_now} ({back})"


def _place(host: str, cpuset: tuple[int, ...]) -> str:
    return f"{host}, cores {','.join(map(str, cpuset))}" if cpuset else host


def _devices(run: ReplayedRun, node: str) -> str:
    return _text(run.origin.devices.get(node, []))


def _text(devices: list[dict[str, str]]) -> str:
    """Render devices by their recorded values; ``none`` if there are no devices."""
    return "; ".join(" ".join(filter(None, device.values())) for device in devices) or "none"


def _settings(settings: Settings, lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """Yield one line of changed settings, if they make a node's compose file differ from the recorded one."""
    if not any(_is_changed(lab, run.path, node.name) for node in run.job.nodes):
        return
    now = {key: value for key, value, _ in settings.rows()}
    changed = [key for key in dict.fromkeys((*run.settings, *now)) if run.settings.get(key) != now.get(key)]
    changes = (f"{key} was {run.settings.get(key) or 'unset'}, and is {now.get(key) or 'unset'}" for key in changed)
    yield f"settings: {'; '.join(changes) or 'its containers were created differently, by another labctl'}"


def _is_changed(lab: Lab, path: Path, node: str) -> bool:
    """Return True if a node's compose file differs from that in the record; False if either is missing."""
    now = lab.directory / naming.compose_path(node)
    then = store.read_record(path / "rendered" / naming.compose_path(node).removeprefix(".lab/"))
    return now.exists() and then is not None and now.read_bytes() != then


def _files(lab: Path, run: ReplayedRun) -> Iterator[str]:
    """Yield a line per file of the record, or of the lab's shared code, that changed since the run began."""
    recorded = store.digests((name, run.path / name) for name in (*run.files, *run.code))
    for name, digest in {**run.files, **run.code}.items():
        if recorded.get(name) != digest:
            change = "was changed by the run" if name in recorded else "is gone"
            yield f"{name.removeprefix(f'{WORK}/')}: its copy in {run.path} {change}"
    shared = store.digests(store.shared_code(lab))
    for name in sorted({*shared, *run.shared}):
        if shared.get(name) != run.shared.get(name):
            yield f"{name}: changed since, and ranks import it from there"


def _sources(cluster: Cluster, lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """Yield a line per silent host, and per clone or cached model at another commit or revision than recorded."""
    hosts = {host.name: host for host in lab.hosts if host.name in run.origin.images}
    cached = provenance.repositories(run.job.workload.cache)
    asked = {name: provenance.code(lab, host) + provenance.snapshots(lab, host, cached) for name, host in hosts.items()}
    values_by_host, failed = provenance.read(cluster, asked)
    yield from (error.message for error in failed.values())
    for name in (name for name in hosts if name not in failed):
        yield from _commits(name, run, asked[name], values_by_host[name])
        revisions = provenance.revisions(lab, hosts[name], cached, values_by_host[name])
        for repository, revision in run.origin.cache.get(name, {}).items():
            if revisions.get(repository) != revision:
                now = revisions.get(repository) or ""
                yield f"{name}: {repository} was {revision or 'not cached'}, and is {now or 'not cached'}"


def _commits(host: str, run: ReplayedRun, asked: Collection[tuple[Kind, str]], values: Sources) -> Iterator[str]:
    """Yield a line per clone of a host that is at another commit than recorded, among the folders ``asked`` for."""
    for clone in run.origin.code:
        path, commit = clone["path"], clone["commit"]
        if clone["host"] != host or ("code", path) not in asked:
            continue
        now = provenance.commit_of(values.get(("code", path), ""))
        if now != commit:
            yield f"{host}: {path} was at commit {commit[:12]}, and is at {now[:12] or 'none'}"
