"""Steps of plans on Docker hosts: their texts, and the code that carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from labctl import naming
from labctl.backends import spec
from labctl.backends.docker.engine import connection_to
from labctl.backends.plan import HostStep, Step
from labctl.backends.state import Container
from labctl.config.context import Context
from labctl.errors import Failures, HostError
from labctl.model import HERE, LAUNCHER, File, Job, Lab
from labctl.records.active import Run
from labctl.system import files, human

if TYPE_CHECKING:
    from labctl.backends.docker.agent import EarlyReach, Standby
    from labctl.backends.docker.lab.cluster import Cluster
    from labctl.records.manifest import Manifest


@dataclass(kw_only=True)
class Deployment:
    """Hosts of a lab that steps act on, without those that failed since."""

    context: Context
    cluster: Cluster

    def host_of(self, error: HostError) -> str:
        """Return the host that an error names; this machine if it names none."""
        return error.node or HERE


@dataclass(kw_only=True)
class LabDeployment(Deployment):
    """A deployment with the lab that its hosts get."""

    lab: Lab
    early: EarlyReach | Standby | None = None
    """A check over ssh that was begun before; None if containers changed since."""
    pushed: dict[str, Manifest] = field(default_factory=dict)
    """Files that runs were sent, by run."""

    def host_of(self, error: HostError) -> str:
        """Return the host that an error names, also by a node on it; this machine if it names none."""
        if error.node in self.lab.containers:
            return self.lab.host_of(error.node).name
        return super().host_of(error)


def on(host: str) -> str:
    return "" if host == HERE else f" on {host}"


class PathStep(Step, frozen=True, kw_only=True):
    """A step on these paths, which are relative to the lab directory unless absolute."""

    verb: ClassVar[str] = "write"
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(self.paths)}"


class ProbeEngines(PathStep, frozen=True):
    """Try limits, and ways to request devices, with throw-away containers, and keep the results in these files."""

    verb = "probe limits and devices, write"

    def do(self, deployment: Deployment) -> Failures:
        """Probe the engines; exclude hosts that fail from the deployment; return them with their errors."""
        from labctl.backends.docker.lab.cluster import load_lab

        before = deployment.cluster.failed
        _, deployment.cluster = load_lab(deployment.context, deployment.cluster)
        return {host: error for host, error in deployment.cluster.failed.items() if host not in before}


class MakeDirectories(PathStep, frozen=True):
    """Create directories on this machine that only their owner may use."""

    verb = "make"

    def do(self, deployment: Deployment) -> None:
        """Create the directories with access for their owner only."""
        for path in self.paths:
            files.make_private(deployment.context.directory / path)


class WriteKeys(PathStep, frozen=True):
    """Generate missing ssh keys, and write the files that depend on them."""

    def do(self, deployment: LabDeployment) -> None:
        """Generate the lab's missing ssh keys, and write the files that depend on them."""
        from labctl.backends.docker.compose import ssh_keys

        ssh_keys.ensure(deployment.lab)


class RemoveState(PathStep, frozen=True):
    """Remove these files and directories below the lab directory."""

    verb = "remove"

    def do(self, deployment: Deployment) -> None:
        """Remove the files and directories from the lab directory."""
        for name in self.paths:
            files.remove(deployment.context.directory / name)

    def without(self, deployment: Deployment, lost: Failures) -> RemoveState | None:  # noqa: ARG002
        """Return this step, or None for `labctl clean`: a lost host may still have containers of the lab."""
        return self if isinstance(deployment, LabDeployment) else None


class EmptyDirectories(PathStep, frozen=True):
    """Remove the content of these directories below the lab directory, which containers mount."""

    verb = "empty"

    def do(self, deployment: Deployment) -> None:
        """Remove the content of the directories, and keep the directories."""
        for name in self.paths:
            for path in (deployment.context.directory / name).iterdir():
                files.remove(path)


class EnsureImage(Step, frozen=True, kw_only=True):
    """Build, pull or send the lab's image wherever it is not found."""

    image: str
    words: str

    def __str__(self) -> str:
        return self.words

    def do(self, deployment: Deployment) -> Failures:
        """Build, pull or send the image to hosts; exclude those that fail from the deployment; return them."""
        from labctl.backends.docker.deploy import images

        failed = images.ensure(deployment.context, deployment.cluster, self.image)
        deployment.cluster = deployment.cluster.excluding(failed)
        return failed


class WriteFiles(Step, frozen=True, kw_only=True):
    """Write these files below the lab directory."""

    files: tuple[File, ...]

    def __str__(self) -> str:
        return "write " + ", ".join(file.path for file in self.files)

    def do(self, deployment: Deployment) -> None:
        files.write_all(deployment.context.directory, self.files)


class NoteSettings(WriteFiles, frozen=True):
    """Write the settings that the containers of all hosts are made from."""

    def without(self, deployment: Deployment, lost: Failures) -> None:
        """Return None: containers of lost hosts are made from other settings."""


class PushFiles(HostStep, frozen=True, kw_only=True):
    """Make a host's folders, and push the files of its nodes and workloads; only ``folders`` if files are current."""

    nodes: tuple[str, ...]
    image: str
    """Id of the image of the nodes."""
    folders: bool = False

    def __str__(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"make folders of {nodes} on {self.host}" if self.folders else f"push files of {nodes} to {self.host}"

    def do(self, deployment: LabDeployment) -> None:
        """Record that the host has nodes, make its folders, push changed files. HostError if that fails."""
        from labctl.backends.docker.deploy import ledger, provision

        engine = deployment.cluster.engine
        ledger.note(deployment.lab.directory, self.host, engine.capabilities(self.host).identity())
        provision.send(deployment.lab, deployment.lab.host(self.host), connection_to(engine, self.host), self.image)


class RemoveContainers(HostStep, frozen=True, kw_only=True):
    """Kill and remove these containers of the lab."""

    containers: tuple[Container, ...]

    def __str__(self) -> str:
        return "remove " + ", ".join(container.node for container in self.containers) + on(self.host)

    def do(self, deployment: Deployment) -> None:
        deployment.cluster.engine.remove(self.host, "container", tuple(container.id for container in self.containers))


class ApplyProject(HostStep, frozen=True, kw_only=True):
    """Create or start these nodes from their compose files, as one project."""

    project: str
    nodes: tuple[str, ...]
    changed: tuple[str, ...] = ()
    """Containers that are missing or outdated; the others are unchanged."""

    def __str__(self) -> str:
        return f"compose up {', '.join(self.nodes)} (project {self.project}){on(self.host)}"

    def do(self, deployment: LabDeployment) -> None:
        """Run `docker compose up` for the compose files of these nodes, with overrides. HostError if it fails."""
        from labctl.backends.docker.compose import render

        composed = [naming.compose_path(node) for node in self.nodes]
        for node in deployment.lab.nodes:
            if node.name in self.nodes:
                composed += [file.path for file in render.overrides(deployment.lab, node)]
        paths = tuple(deployment.context.directory / path for path in composed)
        try:
            deployment.cluster.engine.apply(self.host, self.project, paths)
        except HostError as error:
            raise of_override(error, deployment.lab, self.changed) from error


def of_override(error: HostError, lab: Lab, changed: tuple[str, ...]) -> HostError:
    """Return the error of nodes that the engine refused; its hint names compose.override.yml if that adds to them."""
    from labctl.config import override

    added = [service for service, _ in lab.override if service in changed]
    # Other hints say what to do.
    general = error.hint == "labctl doctor" or ("LAB_PORTS" in error.hint and not lab.ports)
    if not added or not general:
        return error
    hint = f"correct {override.FILE}, which adds to {', '.join(added)}, then `labctl up`"
    return HostError(error.message, hint=hint, node=error.node)


class WaitForSsh(Step, frozen=True, kw_only=True):
    """Log in from the launcher to each of these workers over ssh; HostError names the workers not reached."""

    nodes: tuple[str, ...]
    seconds: int

    def __str__(self) -> str:
        return f"reach {', '.join(self.nodes)} over ssh within {human.duration(self.seconds)}"

    def do(self, deployment: LabDeployment) -> None:
        """Log in from the launcher to the nodes, unless an early check passed. HostError if one does not answer."""
        from labctl.backends.docker.agent import reach

        if not (deployment.early and deployment.early.passed(self.nodes)):
            reach(deployment.lab, deployment.cluster.engine, self.nodes, self.seconds)

    def without(self, deployment: LabDeployment, lost: Failures) -> WaitForSsh | None:
        """Return the step without nodes on lost hosts; None if no node or no launcher's host is left."""
        lab = deployment.lab
        nodes = tuple(node.name for node in lab.nodes if node.name in self.nodes and node.host not in lost)
        return replace(self, nodes=nodes) if nodes and lab.host_of(LAUNCHER).name not in lost else None


class RemoveNetworks(HostStep, frozen=True, kw_only=True):
    """Remove these networks of the lab."""

    networks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "remove network " + ", ".join(name for _, name in self.networks) + on(self.host)

    def do(self, deployment: Deployment) -> None:
        deployment.cluster.engine.remove(self.host, "network", tuple(identity for identity, _ in self.networks))


class FetchLeftRuns(HostStep, frozen=True, kw_only=True):
    """Fetch results that runs left in the lab's directory on a host."""

    directory: str

    def __str__(self) -> str:
        return f"fetch results left in {self.directory}/runs on {self.host}"

    def do(self, deployment: Deployment) -> None:
        """Move results that earlier runs left on the host into their records. HostError if incomplete."""
        from labctl.backends.docker.deploy import artifacts

        connection, context = connection_to(deployment.cluster.engine, self.host), deployment.context
        hidden = spec.hidden(deployment.cluster.settings)
        artifacts.fetch_left(connection, self.directory, context.directory, hidden, context.notice)


class RemoveFiles(HostStep, frozen=True, kw_only=True):
    """Remove the directory of the lab's pushed files from a host."""

    directory: str

    def __str__(self) -> str:
        return f"remove {self.directory} on {self.host}"

    def do(self, deployment: Deployment) -> None:
        """Remove the pushed directory from the host."""
        from labctl.backends.docker.hosts import push

        push.remove(connection_to(deployment.cluster.engine, self.host), self.directory)


class RemoveImage(HostStep, frozen=True, kw_only=True):
    """Remove the lab's image from a host, unless a container of another lab uses it."""

    image: str

    def __str__(self) -> str:
        return f"remove image {self.image} on {self.host}"

    def do(self, deployment: Deployment) -> None:
        """Remove the image from the host; warn, and keep it, if a container uses it. HostError otherwise."""
        try:
            deployment.cluster.engine.remove(self.host, "image", (self.image,))
        except HostError as error:
            # Docker's message for an image that a container uses.
            _, conflict, why = error.message.partition("conflict: ")
            if not conflict:
                raise
            deployment.context.warn(f"{self.host}: image {self.image} stays: {why}")


class ForgetHost(HostStep, frozen=True, kw_only=True):
    """Remove the records that a host has nodes of this lab."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"remove {', '.join(self.paths)}"

    def do(self, deployment: Deployment) -> None:
        """Remove the host's record files from the lab directory."""
        for path in self.paths:
            (deployment.context.directory / path).unlink(missing_ok=True)


class CheckNodes(WaitForSsh, frozen=True, kw_only=True):
    """Check that the sshd of each node of a run answers, and that the rendezvous port of its ranks is free.

    The launch logs in to them: if that fails, it is said why.
    """

    job: Job

    def __str__(self) -> str:
        return f"ask sshd of {', '.join(self.nodes)} for an answer within {human.duration(self.seconds)}"

    def do(self, deployment: LabDeployment) -> None:
        """Check that each node's sshd answers and LAB_MASTER_PORT is free. HostError if not."""
        from labctl.backends.docker.deploy import readiness

        super().do(deployment)
        cluster = deployment.cluster
        readiness.require_port(deployment.lab, self.job, cluster.engine, cluster.facts)


class PushRun(Step, frozen=True, kw_only=True):
    """Push the workloads, and the directories of this run and of runs that it reads, to hosts."""

    run: Run
    reads: tuple[str, ...]
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        runs = ", ".join((f"{naming.OUTPUTS}/{self.run.run_id}", *(f"runs/{run}" for run in self.reads)))
        return f"push workloads, {runs} to {', '.join(self.hosts)}"

    def do(self, deployment: LabDeployment) -> None:
        """Push the run's files to its hosts; keep the manifest of its directory in ``deployment.pushed``."""
        from labctl.backends.docker.deploy import artifacts

        engine, run = deployment.cluster.engine, self.run
        deployment.pushed[run.run_id] = artifacts.send(run.lab, run.job, engine, self.reads)
