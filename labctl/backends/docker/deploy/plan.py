"""All that a command does to machines, as data: decided in full before anything happens; ``--dry-run`` prints it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from labctl import model, naming
from labctl.backends.state import Container, ObservedState, lost
from labctl.model import HERE, Copy, File, Host, Job, Lab


class Step(Struct, frozen=True, kw_only=True):
    """One thing that a command does to a machine, and why."""

    cause: str


class HostStep(Step, frozen=True, kw_only=True):
    """A step on one host; successive ones of different hosts run concurrently."""

    host: str = HERE


class PathStep(Step, frozen=True, kw_only=True):
    """Something that is done to these paths, which are relative to the lab directory unless they lie elsewhere."""

    verb: ClassVar[str] = "write"
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(self.paths)}"


class ProbeEngines(PathStep, frozen=True):
    """Try limits, and how to request devices, with throw-away containers; the results are kept in these files."""

    verb = "probe limits and devices, write"


class MakeDirectories(PathStep, frozen=True):
    """Make these directories of this machine, for their owner alone."""

    verb = "make"


class WriteKeys(PathStep, frozen=True):
    """Generate missing ssh keys and write the files that follow from them."""


class RemoveState(PathStep, frozen=True):
    """Remove these files and directories below the lab directory."""

    verb = "remove"


class EmptyDirectories(PathStep, frozen=True):
    """Remove all that is in these directories, which containers mount, below the lab directory."""

    verb = "empty"


class EndRun(PathStep, frozen=True):
    """End what is left of an earlier run, fetch its results and close its record."""

    verb = "end, fetch and close"


class WriteResult(PathStep, frozen=True):
    """Judge the run and write its result; of one that failed, what is known of it besides."""


class EnsureImage(Step, frozen=True, kw_only=True):
    """Build, pull or send the lab's image wherever it is not found."""

    image: str
    words: str

    def __str__(self) -> str:
        return self.words


class WriteFiles(Step, frozen=True, kw_only=True):
    """Write these files below the lab directory."""

    files: tuple[File, ...]

    def __str__(self) -> str:
        return "write " + ", ".join(file.path for file in self.files)


class PushFiles(HostStep, frozen=True, kw_only=True):
    """Make a host's folders and push the files of its nodes and the workloads; only ``folders`` if all is current."""

    nodes: tuple[str, ...]
    image: str
    """Id of the image that they run."""
    folders: bool = False

    def __str__(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"make folders of {nodes} on {self.host}" if self.folders else f"push files of {nodes} to {self.host}"


class RemoveContainers(HostStep, frozen=True, kw_only=True):
    """Kill and remove these containers of the lab."""

    containers: tuple[Container, ...]

    def __str__(self) -> str:
        return "remove " + ", ".join(container.node for container in self.containers) + on(self.host)


class ApplyProject(HostStep, frozen=True, kw_only=True):
    """Create or start these nodes from their compose files, as one project."""

    project: str
    nodes: tuple[str, ...]
    changed: tuple[str, ...] = ()
    """The containers that are not as they are to be; the others stay."""

    def __str__(self) -> str:
        return f"compose up {', '.join(self.nodes)} (project {self.project}){on(self.host)}"


class WaitForSsh(Step, frozen=True, kw_only=True):
    """Log in from the launcher to each of these workers over ssh, or say which could not be reached and why."""

    nodes: tuple[str, ...]
    seconds: int

    def __str__(self) -> str:
        return f"reach {', '.join(self.nodes)} over ssh within {self.seconds} s"


class RemoveNetworks(HostStep, frozen=True, kw_only=True):
    """Remove these networks of the lab."""

    networks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "remove network " + ", ".join(name for _, name in self.networks) + on(self.host)


class FetchLeftRuns(HostStep, frozen=True, kw_only=True):
    """Fetch what runs left in the lab's directory on a host."""

    directory: str

    def __str__(self) -> str:
        return f"fetch results left in {self.directory}/runs on {self.host}"


class RemoveFiles(HostStep, frozen=True, kw_only=True):
    """Remove what was pushed to a host."""

    directory: str

    def __str__(self) -> str:
        return f"remove {self.directory} on {self.host}"


class RemoveImage(HostStep, frozen=True, kw_only=True):
    """Remove the lab's image from a host, unless a container there that is not the lab's still uses it."""

    image: str

    def __str__(self) -> str:
        return f"remove image {self.image} on {self.host}"


class ForgetHost(HostStep, frozen=True, kw_only=True):
    """Remove the records that a host has nodes of this lab."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"remove {', '.join(self.paths)}"


class StageRun(Step, frozen=True, kw_only=True):
    """Make the run's directories: with its record, whose lock is held, and with what its ranks need and write."""

    run_id: str
    job: tuple[File, ...]
    record: tuple[File, ...]
    code: tuple[Copy, ...]

    def __str__(self) -> str:
        printed = ("output.log", "output.times", "metrics.jsonl")
        record = ", ".join((*(file.path for file in (*self.job, *self.record)), "started", *printed))
        copied = f"work/ (files of {self.code[0].root.name}: {len(self.code)})" if self.code else "work/"
        needed = ", ".join(("ranks/", copied, *(file.path for file in self.job)))
        return f"write {record} to runs/{self.run_id}, and {needed} to {naming.OUTPUTS}/{self.run_id}"


class PushRun(Step, frozen=True, kw_only=True):
    """Push the workloads, and the directories of this run and of those that it reads, to hosts."""

    run_id: str
    reads: tuple[str, ...]
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        runs = ", ".join((f"{naming.OUTPUTS}/{self.run_id}", *(f"runs/{run}" for run in self.reads)))
        return f"push workloads, {runs} to {', '.join(self.hosts)}"


class LaunchJob(Step, frozen=True, kw_only=True):
    """Have the launcher's agent execute the job's command until it ends, is stopped, or its time is up; follow it.

    One that is detached is only launched.
    """

    job: Job
    detach: bool = False
    wait: bool = False
    """Whether it waits for other runs that have its nodes."""

    def __str__(self) -> str:
        import shlex

        workload = self.job.workload
        started = shlex.join((workload.script, *workload.arguments))
        return f"in launcher, at most {self.job.timeout:g} s: {shlex.join(self.job.argv)}, which starts {started}"


class CollectResults(Step, frozen=True, kw_only=True):
    """Move what ranks wrote here to the run's directory; fetch what they wrote on hosts, and remove it there."""

    run_id: str
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        elsewhere = f", and fetch it from {', '.join(self.hosts)}" if self.hosts else ""
        return f"move {naming.OUTPUTS}/{self.run_id} to runs{elsewhere}"


def on(host: str) -> str:
    return "" if host == HERE else f" on {host}"


class Plan(Struct, frozen=True):
    """Steps in order; the text has one numbered line each, with its cause."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        lines = (f"#{number} {step}  [{step.cause}]" for number, step in enumerate(self.steps, 1))
        return "\n".join(lines) or "nothing to do"


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
    kept = replace(observed, containers=tuple(one for one in observed.containers if one not in stuck))
    pending = not_current(lab, files, kept, wanted)
    if surplus:
        yield RemoveContainers(containers=surplus, host=host.name, cause="removed from .env")
    if stuck:
        reasons = sorted({why_stuck(lab, one, unusable) or "" for one in stuck})
        yield RemoveContainers(containers=stuck, host=host.name, cause="cannot be used: " + ", ".join(reasons))
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
    return "configuration changed" if container.fingerprint != fingerprint else None


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


def run(
    job: Job,
    record: tuple[File, ...] = (),
    *,
    hosts: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    ended: Mapping[str, str] = MappingProxyType({}),
    detach: bool = False,
    wait: bool = False,
) -> Plan:
    """Check that the run's nodes answer, write its files, launch, judge; a run that is detached is only launched.

    ``hosts`` are those that the files are pushed to; ``reads`` are earlier runs that it reads, ``ended`` those that
    are ended first, with the reason. The record holds the text of the plan itself.
    """
    nodes = tuple(node.name for node in job.nodes)
    cause = f"run {job.run_id}"

    def steps(text: str) -> Iterator[Step]:
        for run_id, why in ended.items():
            yield EndRun(paths=(f"runs/{run_id}",), cause=why)
        yield WaitForSsh(nodes=nodes, seconds=15, cause="a run needs every node")
        plan = File(path="plan.txt", content=text)
        yield StageRun(run_id=job.run_id, job=job.files, record=(plan, *record), code=job.code, cause=cause)
        if hosts:
            yield PushRun(run_id=job.run_id, reads=reads, hosts=hosts, cause=cause)
        yield LaunchJob(job=job, detach=detach, wait=wait, cause=f"{job.workload.name} on {', '.join(nodes)}")
        if detach:
            return
        yield CollectResults(run_id=job.run_id, hosts=hosts, cause=cause)
        yield WriteResult(paths=(f"runs/{job.run_id}/result.json",), cause=cause)

    return Plan(tuple(steps(f"{Plan(tuple(steps('')))}\n")))
