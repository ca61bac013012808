"""Steps of `up` and `down` on Docker hosts, decided from their observed state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from labctl import model, naming
from labctl.backends.docker.deploy.steps import (
    ApplyProject,
    FetchLeftRuns,
    ForgetHost,
    NoteSettings,
    PushFiles,
    RemoveContainers,
    RemoveFiles,
    RemoveImage,
    RemoveNetworks,
    RemoveState,
    WaitForSsh,
)
from labctl.backends.plan import HostStep, Plan, Step
from labctl.backends.state import Container, ObservedState, altered, lost
from labctl.model import HERE, File, Host, Lab
from labctl.system import human

CHANGED = "configuration changed"
"""Reason of a container that was made from another compose file."""


def up(
    lab: Lab,
    files: tuple[File, ...],
    observed: ObservedState,
    *,
    local: tuple[Step, ...] = (),
    stale: Collection[str] = (),
    unusable: Mapping[str, str] = MappingProxyType({}),
    failed: Collection[str] = (),
    applied: File | None = None,
) -> Plan:
    """Plan, per host, to remove surplus or stuck containers, push files, create missing or changed; then try SSH.

    ``local``: steps in the lab directory. ``stale``: hosts whose files are out of date. ``unusable``: containers whose
    mounts are broken, with the reason. Hosts that have ``failed`` are skipped. ``applied``: settings that changed
    containers are made from.
    """
    steps: list[Step] = [*local]
    for host in lab.hosts:
        if host.name in failed:
            continue
        steps += up_on(lab, host, files, observed.on(host.name), unusable, push=host.name in stale)
    if applied and not failed and any(isinstance(step, ApplyProject) for step in steps):
        steps.append(NoteSettings(files=(applied,), cause="containers changed"))
    workers = tuple(node.name for node in lab.nodes)
    steps.append(WaitForSsh(nodes=workers, seconds=60, cause="wait for SSH"))
    return Plan(tuple(steps))


def up_on(
    lab: Lab, host: Host, files: tuple[File, ...], observed: ObservedState, unusable: Mapping[str, str], *, push: bool
) -> Iterator[HostStep]:
    """Yield the steps that bring one host to the state of ``files``; with ``push`` its folders are pushed too."""
    workers = tuple(node.name for node in lab.nodes if node.host == host.name)
    names = lab.containers_on(host.name)
    removed: list[Container] = []
    for containers, cause in removals(lab, names, observed, unusable):
        yield RemoveContainers(containers=containers, host=host.name, cause=cause)
        removed += containers
    kept = tuple(container for container in observed.containers if container not in removed)
    pending = not_current(lab, files, replace(observed, containers=kept), names)
    surplus = any(container.node not in names for container in removed)
    if host.name != HERE and (push or surplus or pending):
        image, cause = observed.image or "", "files missing on host"
        yield PushFiles(nodes=workers, image=image, folders=not push, host=host.name, cause=cause)
    if pending:
        cause = "; ".join(f"{node} {why}" for node, why in pending)
        changed = tuple(node for node, _ in pending)
        yield ApplyProject(project=naming.project(lab), nodes=workers, changed=changed, host=host.name, cause=cause)


def removals(
    lab: Lab, names: tuple[str, ...], observed: ObservedState, unusable: Mapping[str, str]
) -> Iterator[tuple[tuple[Container, ...], str]]:
    """Yield the containers to remove from a host, with the cause: surplus, stuck, or modified ones.

    ``names``: the nodes that the host is to have.
    """
    surplus = tuple(container for container in observed.containers if container.node not in names)
    if surplus:
        yield surplus, "removed from .env"
    expected = tuple(container for container in observed.containers if container.node in names)
    stuck = tuple(container for container in expected if why_stuck(lab, container, unusable))
    if stuck:
        reasons = sorted({why_stuck(lab, container, unusable) or "" for container in stuck})
        yield stuck, "cannot be used: " + ", ".join(reasons)
    modified = tuple(container for container in expected if container not in stuck and altered(container))
    if modified:
        yield modified, "; ".join(f"{container.node}: {altered(container)}" for container in modified)


def named(reason: str, changed: tuple[str, ...]) -> str:
    """Return the reason of a container that is not current: the changed settings, if it is those and they are known."""
    return f"{human.listed(changed)} changed" if changed and reason == CHANGED else reason


def why_stuck(lab: Lab, container: Container, unusable: Mapping[str, str]) -> str | None:
    """Return the reason why compose cannot make a container usable again; None if it can."""
    if container.state in ("paused", "dead", "removing"):
        return container.state
    if container.name != naming.container_name(lab, container.node):
        return "left over from an interrupted recreate"
    if cause := lost(container.reason):
        return cause
    return unusable.get(container.node)


def not_current(
    lab: Lab, files: tuple[File, ...], observed: ObservedState, names: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Return the names of containers of one host that are missing, not running or outdated, each with the reason."""
    content = {file.path: file.content for file in files}
    containers = {container.node: container for container in observed.containers}
    pending = []
    for name in names:
        owner = lab.nodes[0].name if name == model.LAUNCHER else name
        fingerprint = naming.fingerprint(content[naming.compose_path(owner)])
        reason = why_not_current(containers.get(name), fingerprint, observed.image)
        if reason:
            pending.append((name, reason))
    return pending


def why_not_current(container: Container | None, fingerprint: str, image: str | None) -> str | None:
    """Return the reason why a container is missing, not running or outdated; None if it is current."""
    if container is None:
        return "missing"
    if container.state != "running":
        return container.state
    if container.image != image:
        return "image changed"
    if container.fingerprint != fingerprint:
        return CHANGED
    return altered(container) or None


def down(
    observed: ObservedState,
    sent: Mapping[str, Collection[str]] = MappingProxyType({}),
    image: str = "",
    failed: Collection[str] = (),
    *,
    records: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    state: str = "",
) -> Plan:
    """Plan to remove the lab's objects, pushed files and, if given, image, records and state; fetch left runs first.

    If ``image`` is given, also remove the observed image; also the ``records`` that hosts have nodes, and last the
    lab's ``state`` directory. Hosts that have ``failed`` are skipped.
    """
    steps: list[Step] = []
    for host in observed.hosts:
        if host in failed:
            continue
        steps += down_on(host, observed.on(host), sent.get(host, ()), image, records.get(host, ()))
    if state:
        steps.append(RemoveState(paths=(state,), cause="labctl clean"))
    return Plan(tuple(steps))


def down_on(
    host: str, observed: ObservedState, sent: Collection[str], image: str, records: tuple[str, ...]
) -> Iterator[HostStep]:
    """Yield the steps for one host: remove containers and networks, fetch runs, remove files, image and records."""
    why = "labctl down"
    if containers := (*observed.containers, *observed.probes):
        yield RemoveContainers(containers=containers, host=host, cause=why)
    if networks := (*observed.networks, *observed.probe_networks):
        yield RemoveNetworks(networks=networks, host=host, cause=why)
    for directory in sent:
        yield FetchLeftRuns(directory=directory, host=host, cause=why)
        yield RemoveFiles(directory=directory, host=host, cause=why)
    if image and observed.image:
        yield RemoveImage(image=image, host=host, cause=f"{why} --images")
    if records:
        yield ForgetHost(paths=records, host=host, cause=why)
