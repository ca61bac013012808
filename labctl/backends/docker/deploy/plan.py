"""What `up` and `down` do to Docker hosts, decided from what was observed there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from labctl import model, naming
from labctl.backends.docker.deploy.steps import (
    ApplyProject,
    FetchLeftRuns,
    ForgetHost,
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


def up(
    lab: Lab,
    files: tuple[File, ...],
    observed: ObservedState,
    *,
    local: tuple[Step, ...] = (),
    stale: Collection[str] = (),
    unusable: Mapping[str, str] = MappingProxyType({}),
    failed: Collection[str] = (),
) -> Plan:
    """Bring the daemons to what the files say: surplus and stuck containers go, missing and changed ones come.

    ``local``: steps in the lab directory. ``stale``: hosts whose files are out of date. ``unusable``: containers whose
    mounts are broken, with the reason. Hosts that have ``failed`` are skipped.
    """
    steps: list[Step] = [*local]
    for host in (host for host in lab.hosts if host.name not in failed):
        steps += up_on(lab, host, files, observed.on(host.name), unusable, push=host.name in stale)
    workers = tuple(node.name for node in lab.nodes)
    steps.append(WaitForSsh(nodes=workers, seconds=60, cause="wait for SSH"))
    return Plan(tuple(steps))


def up_on(
    lab: Lab, host: Host, files: tuple[File, ...], observed: ObservedState, unusable: Mapping[str, str], *, push: bool
) -> Iterator[HostStep]:
    """Bring one host to what the files say."""
    workers = tuple(node.name for node in lab.nodes if node.host == host.name)
    wanted = lab.containers_on(host.name)
    surplus = tuple(container for container in observed.containers if container.node not in wanted)
    stuck = tuple(one for one in observed.containers if one.node in wanted and why_stuck(lab, one, unusable))
    usable = (one for one in observed.containers if one.node in wanted and one not in stuck)
    modified = tuple(filter(altered, usable))
    removed = (*stuck, *modified)
    kept = replace(observed, containers=tuple(one for one in observed.containers if one not in removed))
    pending = not_current(lab, files, kept, wanted)
    if surplus:
        yield RemoveContainers(containers=surplus, host=host.name, cause="removed from .env")
    if stuck:
        reasons = sorted({why_stuck(lab, one, unusable) or "" for one in stuck})
        yield RemoveContainers(containers=stuck, host=host.name, cause="cannot be used: " + ", ".join(reasons))
    if modified:
        cause = "; ".join(f"{container.node}: {altered(container)}" for container in modified)
        yield RemoveContainers(containers=modified, host=host.name, cause=cause)
    if host.name != HERE and (push or surplus or pending):
        image, cause = observed.image or "", "files missing on host"
        yield PushFiles(nodes=workers, image=image, folders=not push, host=host.name, cause=cause)
    if pending:
        cause, changed = "; ".join(f"{node} {why}" for node, why in pending), tuple(node for node, _ in pending)
        yield ApplyProject(project=naming.project(lab), nodes=workers, changed=changed, host=host.name, cause=cause)


def why_stuck(lab: Lab, container: Container, unusable: Mapping[str, str]) -> str | None:
    """Why compose could not make a container serve by itself; None when it could."""
    if container.state in ("paused", "dead", "removing"):
        return container.state
    if container.name != naming.container_name(lab, container.node):
        return "left over from an interrupted recreate"
    if cause := lost(container.reason):
        return cause
    return unusable.get(container.node)


def not_current(
    lab: Lab, files: tuple[File, ...], observed: ObservedState, wanted: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Those of the wanted containers of one host that do not serve as they are, each with the reason."""
    content = {file.path: file.content for file in files}
    there = {container.node: container for container in observed.containers}
    pending = []
    for name in wanted:
        owner = lab.nodes[0].name if name == model.LAUNCHER else name
        fingerprint = naming.fingerprint(content[naming.compose_path(owner)])
        reason = why_not_current(there.get(name), fingerprint, observed.image)
        if reason:
            pending.append((name, reason))
    return pending


def why_not_current(container: Container | None, fingerprint: str, image: str | None) -> str | None:
    """Why a container does not serve as it is; None when it does."""
    if container is None:
        return "missing"
    if container.state != "running":
        return container.state
    if container.image != image:
        return "image changed"
    if container.fingerprint != fingerprint:
        return "configuration changed"
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
    """Remove all with the lab's label, whatever the files on disk say, and what was ``sent``: folders by host.

    With an ``image``, the one that was observed goes too; so do the ``records`` that hosts have nodes, and at last the
    lab's own ``state`` directory. Hosts that have ``failed`` are skipped.
    """
    steps: list[Step] = []
    why = "labctl down"
    for host in (host for host in observed.hosts if host not in failed):
        found = observed.on(host)
        if containers := (*found.containers, *found.probes):
            steps.append(RemoveContainers(containers=containers, host=host, cause=why))
        if networks := (*found.networks, *found.probe_networks):
            steps.append(RemoveNetworks(networks=networks, host=host, cause=why))
        for directory in sent.get(host, ()):
            steps.append(FetchLeftRuns(directory=directory, host=host, cause=why))
            steps.append(RemoveFiles(directory=directory, host=host, cause=why))
        if image and found.image:
            steps.append(RemoveImage(image=image, host=host, cause=f"{why} --images"))
        if paths := records.get(host):
            steps.append(ForgetHost(paths=paths, host=host, cause=why))
    if state:
        steps.append(RemoveState(paths=(state,), cause="labctl clean"))
    return Plan(tuple(steps))
