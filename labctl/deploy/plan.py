"""What to do, as data: a plan is decided in full before anything happens, and its text is what ``--dry-run`` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from labctl import model, naming
from labctl.engines.state import Container, ObservedState, lost
from labctl.model import HERE, File, Host, Job, Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFiles:
    """Write these files below the lab directory, and make the keys that are missing."""

    files: tuple[File, ...]
    cause: str

    def __str__(self) -> str:
        return "write " + ", ".join(file.path for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsureImage:
    """Have the nodes' image on hosts. It is only foreseen: `up` does that before it plans, as the rest hangs on it."""

    words: str
    cause: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFiles:
    """Make a host's folders, and send it the files of its nodes and the workloads, as far as it does not have them.

    A host that shows the files as they are to be gets the folders alone.
    """

    nodes: tuple[str, ...]
    image: str
    """Id of the image that they run."""
    folders: bool = False
    """Nothing is to be sent."""
    cause: str
    host: str

    def __str__(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"make folders of {nodes} on {self.host}" if self.folders else f"send files of {nodes} to {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveContainers:
    """Kill and remove these containers of the lab."""

    containers: tuple[Container, ...]
    cause: str
    host: str = HERE

    def __str__(self) -> str:
        return "remove " + ", ".join(container.node for container in self.containers) + on(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeUp:
    """Create or start these nodes from their compose files, as one project."""

    project: str
    nodes: tuple[str, ...]
    cause: str
    host: str = HERE

    def __str__(self) -> str:
        return f"compose up {', '.join(self.nodes)} (project {self.project}){on(self.host)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForSsh:
    """Log in from the launcher to each of these workers over ssh, or say which could not be reached and why."""

    nodes: tuple[str, ...]
    seconds: int
    cause: str

    def __str__(self) -> str:
        return f"reach {', '.join(self.nodes)} over ssh within {self.seconds} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNetworks:
    """Remove these networks of the lab."""

    networks: tuple[tuple[str, str], ...]
    cause: str
    host: str = HERE

    def __str__(self) -> str:
        return "remove network " + ", ".join(name for _, name in self.networks) + on(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFiles:
    """Remove what was sent to a host, once what runs left there is fetched."""

    directory: str
    cause: str
    host: str

    def __str__(self) -> str:
        return f"remove {self.directory} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveImage:
    """Remove the lab's image from a host, unless a container there that is not the lab's still uses it."""

    image: str
    cause: str
    host: str

    def __str__(self) -> str:
        return f"remove image {self.image} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Execute the job's command in the launcher until it ends, is stopped, or its time is up."""

    job: Job
    cause: str

    def __str__(self) -> str:
        import shlex

        workload = self.job.workload
        started = shlex.join((workload.script, *workload.arguments))
        return f"in launcher, at most {self.job.timeout:g} s: {shlex.join(self.job.argv)}, which starts {started}"


HostStep = SendFiles | RemoveContainers | ComposeUp | RemoveNetworks | RemoveFiles | RemoveImage
"""What concerns one host: such steps of different hosts, one after the other in a plan, are done side by side."""
Step = HostStep | EnsureImage | WriteFiles | WaitForSsh | Launch


def on(host: str) -> str:
    return "" if host == HERE else f" on {host}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order; the text has one numbered line each, with its cause."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = (f"#{number} {step}  [{step.cause}]" for number, step in enumerate(self.steps, 1))
        return "\n".join(lines) or "nothing to do"


def up(
    lab: Lab,
    files: tuple[File, ...],
    changed: tuple[File, ...],
    observed: ObservedState,
    *,
    unsent: Collection[str] = (),
    unusable: Mapping[str, str] = MappingProxyType({}),
    failed: Collection[str] = (),
) -> Plan:
    """Bring the daemons to what the files say: surplus and stuck containers go, missing and changed ones come.

    ``unsent`` hosts do not show the files as they are to be, ``unusable`` containers have lost theirs, with the reason;
    hosts that have ``failed`` are left as they are.
    """
    steps: list[Step] = []
    if changed:
        steps.append(WriteFiles(files=changed, cause="new or changed"))
    for host in (one for one in lab.hosts if one.name not in failed):
        steps += up_on(lab, host, files, observed.on(host.name), unusable, sends=host.name in unsent)
    workers = tuple(node.name for node in lab.nodes)
    steps.append(WaitForSsh(nodes=workers, seconds=60, cause="ready means that the launcher reaches every worker"))
    return Plan(tuple(steps))


def up_on(
    lab: Lab, host: Host, files: tuple[File, ...], observed: ObservedState, unusable: Mapping[str, str], *, sends: bool
) -> Iterator[HostStep]:
    """What brings one host, of which this was observed, to what the files say."""
    workers = tuple(node.name for node in lab.nodes if node.host == host.name)
    wanted = lab.containers_on(host.name)
    surplus = tuple(container for container in observed.containers if container.node not in wanted)
    stuck = tuple(one for one in observed.containers if one.node in wanted and why_stuck(lab, one, unusable))
    kept = replace(observed, containers=tuple(one for one in observed.containers if one not in stuck))
    pending = not_current(lab, files, kept, wanted)
    if surplus:
        yield RemoveContainers(containers=surplus, host=host.name, cause="not in .env any more")
    if stuck:
        reasons = sorted({why_stuck(lab, one, unusable) or "" for one in stuck})
        yield RemoveContainers(containers=stuck, host=host.name, cause="cannot be used: " + ", ".join(reasons))
    if host.name != HERE and (sends or surplus or pending):
        image, cause = observed.image or "", "what it does not have"
        yield SendFiles(nodes=workers, image=image, folders=not sends, host=host.name, cause=cause)
    if pending:
        cause = "; ".join(f"{node} {why}" for node, why in pending)
        yield ComposeUp(project=naming.project(lab), nodes=workers, host=host.name, cause=cause)


def why_stuck(lab: Lab, container: Container, unusable: Mapping[str, str]) -> str | None:
    """Why compose could not make a container serve by itself; None when it could."""
    if container.state in ("paused", "dead", "removing"):
        return container.state
    if container.name != naming.container_name(lab, container.node):
        return "left by an interrupted renewal"
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
        return "has another image"
    return "has other settings" if container.fingerprint != fingerprint else None


def down(
    observed: ObservedState,
    sent: Mapping[str, Collection[str]] = MappingProxyType({}),
    image: str = "",
    failed: Collection[str] = (),
) -> Plan:
    """Remove all with the lab's label, whatever the files on disk say, and what was ``sent``: folders by host.

    With an ``image``, the one that was observed goes too. Hosts that have ``failed`` are left as they are.
    """
    steps: list[Step] = []
    for host in (one for one in observed.hosts if one not in failed):
        there = observed.on(host)
        if containers := (*there.containers, *there.probes):
            steps.append(RemoveContainers(containers=containers, host=host, cause="labctl down"))
        if networks := (*there.networks, *there.probe_networks):
            steps.append(RemoveNetworks(networks=networks, host=host, cause="labctl down"))
        folders = sent.get(host, ())
        steps += (RemoveFiles(directory=directory, host=host, cause="labctl down") for directory in folders)
        if image and there.image:
            steps.append(RemoveImage(image=image, host=host, cause="labctl down --images"))
    return Plan(tuple(steps))


def run(job: Job) -> Plan:
    """Check that the run's nodes answer, write its files, launch."""
    nodes = tuple(node.name for node in job.nodes)
    return Plan(
        (
            WaitForSsh(nodes=nodes, seconds=15, cause="a run needs every node"),
            WriteFiles(files=job.files, cause=f"run {job.run_id}"),
            Launch(job=job, cause=f"{job.workload.name} on {', '.join(nodes)}"),
        )
    )
