"""``labctl replay``: a recorded run once more, with what it was launched with then, or what of it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import naming
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.model import Copy, File, Job, Lab
from labctl.records import store
from labctl.runs import inputs, provenance
from labctl.runs.job import WORK

SHORT = 19
"""Characters of an image's id that tell it from others."""


class Origin(Struct, frozen=True):
    """What ``versions.json`` of a run has that a replay needs again."""

    image: str
    images: dict[str, str | None]
    devices: dict[str, list[dict[str, str]]]
    code: list[dict[str, Any]]
    cache: dict[str, dict[str, str | None]]


class ReplayedRun(Struct, frozen=True, kw_only=True):
    """A run as its record has it; ``files``, ``code`` and ``shared`` are digests, ``settings`` are as shown then."""

    path: Path
    job: Job
    files: dict[str, str]
    code: dict[str, str]
    shared: dict[str, str]
    settings: dict[str, str]
    origin: Origin


def read(lab: Path, run_id: str) -> ReplayedRun:
    """The record of a run that has ended. ConfigError while it runs, HostError for a record without what is needed."""
    if store.state(lab, run_id) == "running":
        raise ConfigError(f"run {run_id} is still running", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    path = store.directory(lab, run_id)
    known = store.job(path)
    origin = store.decode(path / "versions.json", Origin)
    if not origin or not known.files or known.request is None:
        raise HostError(
            f"run {run_id} cannot be replayed: its record is of an earlier labctl, which kept less",
            hint=f"labctl run {known.workload}, with what it was given then",
        )
    rows = store.decode(path / "settings.json", list[dict[str, str]]) or []
    return ReplayedRun(
        path=path,
        job=replace(store.load_job(lab, run_id), request=known.request, code=()),
        files=known.files,
        code=known.code,
        shared=known.shared,
        settings={row["key"]: row["value"] for row in rows},
        origin=origin,
    )


def require_same(context: Context, cluster: Cluster, lab: Lab, observed: ObservedState, run: ReplayedRun) -> None:
    """HostError that names all that the run had and that cannot be had now."""
    lacking = tuple(missing(cluster, lab, observed, run))
    if len(lacking) == 1:
        raise HostError(f"run {run.job.run_id} cannot be replayed: {lacking[0]}", hint=_hint(run))
    if lacking:
        lines = "".join(f"\n  {one}" for one in lacking)
        raise HostError(f"run {run.job.run_id} cannot be replayed:{lines}", hint=_hint(run))
    mounted = {place for host in lab.hosts for place in provenance.code(lab, host)}
    for one in run.origin.code:
        if one["dirty"] and ("code", one["path"]) in mounted:
            context.warn(f"{one['path']} had changes that were not committed, which may be others now")


def _hint(run: ReplayedRun) -> str:
    return f"put that back, or run it as things are now: labctl run {run.job.workload.name}"


def missing(cluster: Cluster, lab: Lab, observed: ObservedState, run: ReplayedRun) -> Iterator[str]:
    """What cannot be had, a line each."""
    yield from _images(lab, observed, run)
    there = {node.name: node for node in lab.nodes}
    for node in run.job.nodes:
        now = there.get(node.name)
        if now is None or now.slots < node.slots:
            has = "the lab has no such node" if now is None else f"it has {now.slots} of {node.slots} slots"
            yield f"{node.name}: {has}"
        elif now.host != node.host or now.cpuset != node.cpuset:
            yield f"{node.name}: it was on {_place(node.host, node.cpuset)}, and is on {_place(now.host, now.cpuset)}"
        elif (devices := provenance.devices(lab, now)) != run.origin.devices.get(node.name, []):
            yield f"{node.name}: its devices or their driver were {_devices(run, node.name)}, and are {_text(devices)}"
    yield from _settings(cluster.settings, lab, run)
    yield from _files(lab.directory, run)
    yield from _sources(cluster, lab, run)
    try:
        inputs.resolve(lab, run.job.workload)
    except ConfigError as error:
        yield error.message
    if run.job.resumed and not (lab.directory / "runs" / run.job.resumed).exists():
        yield f"runs/{run.job.resumed}, from which it went on, is gone"


def _images(lab: Lab, observed: ObservedState, run: ReplayedRun) -> Iterator[str]:
    if lab.image != run.origin.image:
        yield f"image: the lab has {lab.image}, and it ran {run.origin.image}"
        return
    names = {host.name for host in lab.hosts}
    for host, image in run.origin.images.items():
        now = observed.on(host).image
        if host in names and image and now != image:
            is_now = f"is {now[:SHORT]} there" if now else "is not there"
            back = f"docker tag {image[:SHORT]} {lab.image}, if it has that still"
            yield f"{host}: image {lab.image} was {image[:SHORT]}, and {is_now} ({back})"


def _place(host: str, cpuset: tuple[int, ...]) -> str:
    return f"{host}, cores {','.join(map(str, cpuset))}" if cpuset else host


def _devices(run: ReplayedRun, node: str) -> str:
    return _text(run.origin.devices.get(node, []))


def _text(devices: list[dict[str, str]]) -> str:
    return "; ".join(" ".join(filter(None, one.values())) for one in devices) or "none"


def _settings(settings: Settings, lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """The nodes' compose files as they are now against those of then, and the settings that made them others."""
    if not any(_rendered_anew(lab, run.path, node.name) for node in run.job.nodes):
        return
    now = {key: value for key, value, _ in settings.rows()}
    changed = [key for key in dict.fromkeys((*run.settings, *now)) if run.settings.get(key) != now.get(key)]
    said = (f"{key} was {run.settings.get(key) or 'unset'}, and is {now.get(key) or 'unset'}" for key in changed)
    yield f"settings: {'; '.join(said) or 'its containers are made otherwise than then, by another labctl'}"


def _rendered_anew(lab: Lab, path: Path, node: str) -> bool:
    now = lab.directory / naming.compose_path(node)
    then = store.read_record(path / "rendered" / naming.compose_path(node).removeprefix(".lab/"))
    return now.exists() and then is not None and now.read_bytes() != then


def _files(lab: Path, run: ReplayedRun) -> Iterator[str]:
    """What of its files is not as it began with it: nothing of the record itself, unless a rank wrote into its code."""
    recorded = store.digests((name, run.path / name) for name in (*run.files, *run.code))
    for name, digest in {**run.files, **run.code}.items():
        if recorded.get(name) != digest:
            what = "was changed by the run" if name in recorded else "is gone"
            yield f"{name.removeprefix(f'{WORK}/')}: its copy in {run.path} {what}"
    shared = store.digests(store.shared_code(lab))
    for name in sorted({*shared, *run.shared}):
        if shared.get(name) != run.shared.get(name):
            yield f"{name}: changed since, and ranks import it from there"


def _sources(cluster: Cluster, lab: Lab, run: ReplayedRun) -> Iterator[str]:
    """The commits of clones, and the cached models, on each host."""
    hosts = {host.name: host for host in lab.hosts if host.name in run.origin.images}
    cached = provenance.repositories(run.job.workload.cache)
    asked = {name: provenance.code(lab, host) + provenance.snapshots(lab, host, cached) for name, host in hosts.items()}
    found, failed = provenance.read(cluster, asked)
    yield from (error.message for error in failed.values())
    for name, host in hosts.items():
        if name in failed:
            continue
        for one in run.origin.code:
            kept = ("code", one["path"])
            now = provenance.commit_of(found[name].get(("code", one["path"]), ""))
            if one["host"] == name and kept in asked[name] and now != one["commit"]:
                yield f"{name}: {one['path']} was at commit {one['commit'][:12]}, and is at {now[:12] or 'none'}"
        revisions = provenance.revisions(lab, host, cached, found[name])
        for repository, revision in run.origin.cache.get(name, {}).items():
            if revisions.get(repository) != revision:
                now = revisions.get(repository) or ""
                yield f"{name}: {repository} was {revision or 'not cached'}, and is {now or 'not cached'}"


def job(run: ReplayedRun, now: datetime) -> Job:
    """The run once more: the recorded job with a new id in place of its own, its files and its code from the record."""
    run_id = store.new_id(run.job.workload.name, now)

    def renamed(text: str) -> str:
        return text.replace(run.job.run_id, run_id)

    files = tuple(
        File(path=name, content=renamed((run.path / name).read_text(encoding="utf-8")), mode=_mode(run.path / name))
        for name in run.files
    )
    code = tuple(Copy(path=name, root=run.path / WORK, name=name.removeprefix(f"{WORK}/")) for name in run.code)
    before = replace(run.job, request={})
    text = renamed(msgspec.json.encode(before, enc_hook=str).decode())
    again = msgspec.json.decode(text, type=Job, dec_hook=lambda kind, value: kind(value))
    # It is no run of the batch that the other was one of.
    request = {key: value for key, value in run.job.request.items() if key != "batch"}
    return replace(again, files=files, code=code, request=request, retried=(), replays=run.job.run_id)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
