"""Carries out each step of a plan and announces it; decides nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from labctl import model, naming
from labctl.accelerators import leases
from labctl.backends.docker.agent import EarlyReach, reach
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import decide, images, ledger, plan, preflight, provision
from labctl.backends.docker.deploy.decide import Decision
from labctl.backends.docker.engine import connection_to
from labctl.backends.docker.hosts import push
from labctl.backends.docker.lab import cluster
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.errors import Failures, HostError, raise_all
from labctl.model import HERE, Event, Lab
from labctl.system import files
from labctl.system.parallel import map_hosts
from labctl.system.progress import waiting_for


@dataclass(kw_only=True)
class Deployment:
    """What steps act on: the hosts of a lab, less those that fail meanwhile."""

    context: Context
    cluster: Cluster


@dataclass(kw_only=True)
class LabDeployment(Deployment):
    """The same, with the lab that they are to have."""

    lab: Lab
    early: EarlyReach | None = None
    """The check over ssh, if it was begun before and nothing has changed containers since."""


def bring_up(
    context: Context, decided: Decision, early: EarlyReach | None, *, wait: float
) -> tuple[Cluster, ObservedState | None]:
    """Carry out what `up` decided; returns the hosts left, and what was observed if nothing was changed since.

    Once images and engines are ready, the rest is decided again. HostError names what failed on each host.
    """
    first, steps = decided.first, decided.plan.steps
    if first:
        site = Deployment(context=context, cluster=decided.cluster)
        carry_out(steps[:first], site, decided.failed, after=len(steps) - first)
        observed, able = preflight.observe(context, site.cluster)
        lab, able = cluster.load_lab(context, able)
        decided = decide.rest_of_up(context, able, lab, observed)
        steps = decided.plan.steps
    with leases.granting(decided.lab, wait=wait, notice=context.notice):
        leases.require_free(decided.lab)
        # One may have begun while this waited.
        preflight.require_no_run(context, decided.cluster.engine, decided.observed, steps)
        unchanged = early if len(steps) == 1 else None
        site = LabDeployment(context=context, cluster=decided.cluster, lab=decided.lab, early=unchanged)
        raise_all(carry_out(steps, site, decided.failed, before=first))
    return decided.cluster, None if first or len(steps) > 1 else decided.observed


def carry_out(
    steps: Sequence[plan.Step],
    site: Deployment,
    failed: Failures = MappingProxyType({}),
    *,
    before: int = 0,
    after: int = 0,
) -> dict[str, HostError]:
    """Every step in order, those of different hosts concurrently; returns what failed on which host, with ``failed``.

    A host that fails gets no further steps; HostError for another step that fails. ``before`` and ``after``: further
    steps of the same plan.
    """
    lost = dict(failed)
    of = before + len(steps) + after
    numbered = [(f"[{number}/{of}]", step) for number, step in enumerate(steps, before + 1)]
    for on_hosts, group in groupby(numbered, key=lambda one: isinstance(one[1], plan.HostStep)):
        if on_hosts:
            lost |= concurrently(group, site, lost)
            continue
        for number, whole in group:
            if step := skip_failed_hosts(whole, site, lost):
                announce(site, number, step)
                try:
                    lost |= do(step, site) or {}
                except HostError as error:
                    raise_all({**lost, host_of(site, error): error})
    return lost


def host_of(site: Deployment, error: HostError) -> str:
    """The host on which a step failed, also where the error names a node of it."""
    if isinstance(site, LabDeployment) and error.node in site.lab.containers:
        return site.lab.host_of(error.node).name
    return error.node or HERE


def concurrently(group: Iterable[tuple[str, plan.Step]], site: Deployment, lost: Failures) -> dict[str, HostError]:
    """The steps of each host in order, all hosts at once; returns what failed where. Lost hosts are skipped."""
    queues: dict[str, list[tuple[str, plan.HostStep]]] = {}
    for number, step in group:
        if isinstance(step, plan.HostStep) and step.host not in lost:
            queues.setdefault(step.host, []).append((number, step))

    def work(host: str) -> None:
        for number, step in queues[host]:
            announce(site, number, step)
            with busy(host):
                do(step, site)

    with waiting_for("still running", site.context.notice) as busy:
        return map_hosts(work, {host: host for host in queues})[1]


def announce(site: Deployment, number: str, step: plan.Step) -> None:
    site.context.emit(Event(kind="step", text=f"{number} {shorten(str(step))}"))


def shorten(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def skip_failed_hosts(step: plan.Step, site: Deployment, lost: Failures) -> plan.Step | None:
    """The step as far as it concerns other hosts than the lost ones; None if nothing of it is left."""
    if not lost or not isinstance(step, plan.WaitForSsh | plan.RemoveState):
        return step
    if not isinstance(site, LabDeployment):
        # What `clean` removes is that of a lab which the lost hosts still have.
        return None
    if isinstance(step, plan.RemoveState):
        return step
    nodes = tuple(node.name for node in site.lab.nodes if node.name in step.nodes and node.host not in lost)
    return replace(step, nodes=nodes) if nodes and site.lab.host_of(model.LAUNCHER).name not in lost else None


@singledispatch
def do(step: object, site: Deployment) -> Failures | None:  # noqa: ARG001
    """Carry out one step; returns the hosts on which it failed, if it goes on without them."""
    raise TypeError(f"no way to carry out {type(step).__name__}")


@do.register
def _(step: plan.EnsureImage, site: Deployment) -> Failures:
    failed = images.ensure(site.context, site.cluster, step.image)
    site.cluster = site.cluster.excluding(failed)
    return failed


@do.register
def _(step: plan.ProbeEngines, site: Deployment) -> Failures:  # noqa: ARG001
    before = site.cluster.failed
    _, site.cluster = cluster.load_lab(site.context, site.cluster)
    return {host: error for host, error in site.cluster.failed.items() if host not in before}


@do.register
def _(step: plan.MakeDirectories, site: Deployment) -> None:
    for path in step.paths:
        files.make_private(site.context.directory / path)


@do.register
def _(step: plan.WriteKeys, site: LabDeployment) -> None:  # noqa: ARG001
    from labctl.backends.docker.compose import ssh_keys

    ssh_keys.ensure(site.lab)


@do.register
def _(step: plan.WriteFiles, site: Deployment) -> None:
    files.write_all(site.context.directory, step.files)


@do.register
def _(step: plan.RemoveState, site: Deployment) -> None:
    for name in step.paths:
        remove(site.context.directory / name)


@do.register
def _(step: plan.EmptyDirectories, site: Deployment) -> None:
    for name in step.paths:
        for path in (site.context.directory / name).iterdir():
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or directory. HostError."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {path}") from error


@do.register
def _(step: plan.PushFiles, site: LabDeployment) -> None:
    engine = site.cluster.engine
    ledger.note(site.lab.directory, step.host, engine.capabilities(step.host).identity())
    provision.send(site.lab, site.lab.host(step.host), connection_to(engine, step.host), step.image)


@do.register
def _(step: plan.RemoveContainers, site: Deployment) -> None:
    site.cluster.engine.remove(step.host, "container", tuple(container.id for container in step.containers))


@do.register
def _(step: plan.ApplyProject, site: LabDeployment) -> None:
    files = [naming.compose_path(node) for node in step.nodes]
    nodes = [node for node in site.lab.nodes if node.name in step.nodes]
    files += [file.path for node in nodes for file in render.overrides(site.lab, node)]
    paths = tuple(site.context.directory / file for file in files)
    site.cluster.engine.apply(step.host, step.project, paths)


@do.register
def _(step: plan.WaitForSsh, site: LabDeployment) -> None:
    if not (site.early and site.early.passed(step.nodes)):
        reach(site.lab, site.cluster.engine, step.nodes, step.seconds)


@do.register
def _(step: plan.RemoveNetworks, site: Deployment) -> None:
    site.cluster.engine.remove(step.host, "network", tuple(identity for identity, _ in step.networks))


@do.register
def _(step: plan.RemoveFiles, site: Deployment) -> None:
    push.remove(connection_to(site.cluster.engine, step.host), step.directory)


@do.register
def _(step: plan.RemoveImage, site: Deployment) -> None:
    try:
        site.cluster.engine.remove(step.host, "image", (step.image,))
    except HostError as error:
        # Docker's word for an image that a container uses.
        _, conflict, why = error.message.partition("conflict: ")
        if not conflict:
            raise
        site.context.warn(f"{step.host}: image {step.image} stays: {why}")


@do.register
def _(step: plan.ForgetHost, site: Deployment) -> None:
    for path in step.paths:
        (site.context.directory / path).unlink(missing_ok=True)
