"""The backend of a Kubernetes cluster: runs are jobs, and nodes are their pods."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec.structs import replace

from labctl import __version__
from labctl.backends import Backend, OnLines, Replay, RunPlan, spec, terminal
from labctl.backends.finding import Receiver, ignore
from labctl.backends.kubernetes import capacity, nodes, render
from labctl.backends.kubernetes import lab as labs
from labctl.backends.kubernetes import run as jobs
from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.capacity import ClusterNode, request_of
from labctl.backends.kubernetes.job import ANYWHERE, ClusterPods, Placement, build, job_name, lab_of_pods, place_of_code
from labctl.backends.kubernetes.lab import ClusterLab, Place, open_lab
from labctl.backends.kubernetes.render import OWNER
from labctl.backends.kubernetes.run import KINDS, ClusterRun
from labctl.backends.kubernetes.target import Target, read
from labctl.backends.owner import owner
from labctl.backends.plan import Plan, carry_out
from labctl.config import inventory
from labctl.config.context import Context, require_named
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, raise_all
from labctl.jobs.replay import renamed
from labctl.jobs.request import bounded
from labctl.model import HERE, File, Hang, Job, Lab, Result, Workload
from labctl.records import outputs, store
from labctl.records.active import ActiveRun, Run
from labctl.records.lines import Line
from labctl.system import git

if TYPE_CHECKING:
    from labctl.backends.devices import DeviceReport
    from labctl.backends.finding import Finding
    from labctl.backends.plan import Step
    from labctl.backends.status import LabStatus
    from labctl.errors import Failures
    from labctl.hub.report import CacheReport
    from labctl.jobs.replay import ReplayedRun
    from labctl.jobs.request import RunOptions
    from labctl.model import Cache
    from labctl.records.verdict import RunOutcome
    from labctl.system.process import CompletedProcess

PODS = "on Kubernetes each `labctl run` starts its own pods; for Docker hosts: -s LAB_ENGINE=docker"
UNSUPPORTED: Mapping[str, str] = {
    "up": PODS,
    "render": "labctl k8s render WORKLOAD",
    "devcontainer": PODS,
    "build": "build and push an image with docker, then name it: LAB_IMAGE in .env",
    "clean": "labctl down",
    "keys rotate": "each run has its own keys",
    "down --images": "nodes remove images themselves",
    "jupyter": "kubectl port-forward, and labctl exec -- jupyter lab",
    "bundle save": "labctl k8s export WORKLOAD --kustomize DIR",
    "cache --hosts": "labctl cache downloads to the claim, which all pods mount",
    "doctor --fix": "labctl doctor",
    "doctor --node": "labctl doctor",
    "health": "kubectl describe node; labctl reads no host of a cluster",
    "fit": "labctl fit WORKLOAD -s LAB_ENGINE=docker",
}


REPLAYED: Mapping[str, Any] = {"images": {}, "devices": {}, "cache": {}}
"""Versions in a replayable run's record; here its manifests have the image, and devices are the cluster's."""


class NewClusterRun(ClusterRun, frozen=True, kw_only=True):
    """A run to be submitted: its target, the nodes that it names, and its objects."""

    target: Target
    placement: Placement
    objects: tuple[Manifest, ...]
    on_claim: bytes = b""
    """Archive of its code if that goes by the claim."""


def _commits(run: NewClusterRun) -> Iterator[dict[str, Any]]:
    """Yield commit and ``dirty`` of the run's project if it is in git; nothing for a replay or without a project."""
    project = run.job.workload.project
    if project and not run.job.replays:
        commit, dirty = git.commit(project.root)
        if commit:
            yield {"host": HERE, "path": str(project.root), "commit": commit, "dirty": dirty}


def settings_for(context: Context, settings: Settings, workload: Workload) -> Settings:  # noqa: ARG001
    """Return the settings unchanged: pods have the image that LAB_IMAGE names, whatever the workload."""
    return settings


@contextmanager
def connect(context: Context, settings: Settings, **options: Any) -> Iterator[Backend]:  # noqa: ARG001
    """Yield the Kubernetes backend; the cluster is asked on first use. ConfigError if the directory is not a lab."""
    require_named(context, settings)
    yield KubernetesBackend(context, settings)


class KubernetesBackend:
    """Backend of a directory's lab in a namespace of a cluster."""

    name = "kubernetes"

    def __init__(self, context: Context, settings: Settings, cluster: ClusterLab | None = None) -> None:
        """Keep context and settings; ``cluster`` is a lab that is open, else the lab is opened on first use."""
        self.context, self.settings = context, settings
        if cluster:
            self._cluster = cluster
        self._pods: dict[tuple[str, str], str] = {}
        """Pods in which programs were run, by run and node."""
        self._fetched: dict[str, bool] = {}
        """Runs that were followed to their end; False if their launcher still has the results."""

    def with_context(self, context: Context) -> KubernetesBackend:
        """Return a copy, in the same cluster, that reports to another context."""
        other = copy.copy(self)
        other.context, other._cluster = context, replace(self._cluster, context=context)
        return other

    @cached_property
    def _cluster(self) -> ClusterLab:
        """The lab in its cluster, opened on first use. HostError if the kubeconfig names no cluster."""
        return open_lab(self.context, self.settings)

    # --- the lab ---

    def lab(self) -> Lab:
        """Return the lab with the nodes that can hold a worker. HostError if none can, or nodes may not be listed."""
        return nodes.lab_of_nodes(self._cluster, self._target, self._nodes)

    @cached_property
    def _nodes(self) -> tuple[ClusterNode, ...]:
        """Nodes of the cluster, fetched on first use. Refused if they may not be listed."""
        return capacity.nodes(self._cluster.api, self._target)

    @property
    def _target(self) -> Target:
        """Target that the settings describe, without asking the cluster which kinds of jobs it has."""
        return read(self.settings, self.settings.text("LAB_ACCELERATOR"))

    def unusable(self, slots: int = 0) -> Mapping[str, str]:
        """Return nodes of the lab that are out of use or lack room for ``slots``, with the reasons."""
        of_lab = {node.name: node.slots for node in self.lab().nodes}
        now = tuple(node for node in self._nodes_now() if node.name in of_lab)
        return nodes.unusable(now, request_of(self._target, slots or max(of_lab.values())))

    def _nodes_now(self) -> tuple[ClusterNode, ...]:
        """Return the nodes, with what others' pods leave free if known. Refused if nodes are hidden."""
        return capacity.nodes_with_free(self._cluster.api, self._target, beside=self._cluster.name)

    def status(self) -> LabStatus:
        """Return the state of the lab's pods, each with the reason why it is not running."""
        return labs.status(self._cluster)

    def devices(self) -> DeviceReport:
        """Return the devices of the cluster's nodes."""
        from labctl.backends.kubernetes import capacity

        return capacity.devices(self._cluster)

    def findings(self, node: str = "", receive: Receiver = ignore) -> tuple[Finding, ...]:  # noqa: ARG002
        """Run the checks of cluster, namespace, rights, nodes and pods, whatever ``node``; return what they found."""
        from labctl.backends.kubernetes import checks

        findings = tuple(checks.examine(self._cluster))
        receive(findings)
        return findings

    def plan_prepare(self, *, preview: bool = False) -> Plan:  # noqa: ARG002
        """Return an empty plan: a run creates the namespace and the claim."""
        return Plan()

    def plan_up(self, *, preview: bool = False) -> Plan:  # noqa: ARG002
        """Return an empty plan: a run starts its own pods."""
        return Plan()

    def plan_down(self, *, images: bool = False, state: str = "", preview: bool = False) -> Plan:  # noqa: ARG002
        """Plan to delete the lab's objects but claim and namespace. HostError if a job is another's."""
        from labctl.backends.kubernetes.steps import AwaitPodsGone, DeleteObject, KeepObject

        labs.require_own(self._cluster)
        cause = "labctl down"
        steps: list[Step] = [
            DeleteObject(kind=item["kind"], name=item["metadata"]["name"], cause=cause)
            for item in labs.owned(self._cluster)
        ]
        steps += [AwaitPodsGone(cause=cause)] if steps else []
        kept = labs.kept(self._cluster)
        steps += [KeepObject(text=text, cause=f"removed by: {command}") for text, command in kept.items()]
        return Plan(tuple(steps))

    def carry_out(self, plan: Plan) -> None:
        """Carry out a plan of this backend. HostError for a step that fails."""
        from labctl.backends.kubernetes.steps import ClusterDeployment

        raise_all(carry_out(plan.steps, ClusterDeployment(self._cluster)))

    def under_way(self) -> tuple[str, ...]:
        """Return ``run ID`` for each run of the lab that is running."""
        return tuple(f"run {run_id}" for run_id in labs.running(self._cluster))

    def require_idle(self) -> None:
        """Raise HostError if a run is under way."""
        if running := self.under_way():
            raise HostError(f"{'; '.join(running)} is active", hint="wait for it, or end it with `labctl stop`")

    def fill(self, workload: str, cache: Cache, *, hosts: bool, preview: bool) -> CacheReport:  # noqa: ARG002
        """Download models and datasets to the lab's claim by a pod, or list them; return a report."""
        from labctl.backends.kubernetes import storage
        from labctl.hub import prefetch
        from labctl.hub.report import CacheReport

        began = time.monotonic()
        repositories, endpoint = prefetch.names(cache), prefetch.endpoint_of(self.context.environ)
        items = storage.fill(self._cluster, repositories, endpoint, dry_run=preview) if repositories else ()
        claim, seconds = f"claim {self._cluster.name}-storage", round(time.monotonic() - began, 3)
        return CacheReport(workload=workload, cache=claim, items=items, seconds=seconds)

    def on_hosts(
        self,
        script: str,  # noqa: ARG002
        arguments: tuple[str, ...],  # noqa: ARG002
        seconds: float,  # noqa: ARG002
        hosts: Collection[str] = (),  # noqa: ARG002
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run nothing and return empty mappings: labctl has no access to the hosts of a cluster's nodes."""
        return {}, {}

    def typed(self, host: str, command: str) -> str:  # noqa: ARG002
        """Return the command that describes a node: labctl has no access to the hosts of a cluster's nodes."""
        return f"kubectl describe node {host}"

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """Return ``KIND NAME`` of each object of the lab except claim and namespace, and no failures."""
        return tuple(f"{item['kind']} {item['metadata']['name']}" for item in labs.owned(self._cluster)), {}

    def versions(self) -> dict[str, str]:
        """Return the versions of labctl and of the cluster, and the image."""
        cluster = self._cluster.engine.versions()
        image = spec.image_of(self.settings, self.settings.text("LAB_ACCELERATOR"))
        return {"labctl": __version__, "image": image, "engine": cluster["engine"]}

    def freeze(self) -> dict[str, Any]:
        """Describe the lab: image, settings, files, cluster, nodes. HostError if nodes are hidden."""
        from labctl.backends.kubernetes import frozen

        return frozen.of(self._cluster)

    def not_replayable(self, recorded: ReplayedRun) -> Iterator[str]:
        """Yield a text per cluster, kind of job, node or secrets of a recorded run that is gone."""
        from labctl.backends.kubernetes import frozen

        yield from frozen.missing(self._cluster, recorded)

    # --- nodes ---

    def exec(self, run: Run, node: str, argv: tuple[str, ...], *, limit: float) -> CompletedProcess:
        """Run a short program in the pod of a run's node; return exit code and output, whatever the code."""
        pod = self._pods.get((run.run_id, node)) or labs.pod_of_run(self._cluster, run, node)
        done = self._cluster.engine.exec(pod, argv, user="", limit=limit)
        self._pods[run.run_id, node] = pod
        return done

    def attach(
        self,
        nodes: tuple[str, ...],
        command: tuple[str, ...],
        *,
        stdin: Literal["terminal", "pipe"],
        prompt: bool,
    ) -> int:
        """Run a command in nodes' pods (none: workers); return the largest exit code. ConfigError if no tty."""
        if prompt:
            terminal.require(nodes[0], stdin)
        return labs.execute(self._cluster, nodes or labs.workers(self._cluster), command, stdin=stdin)

    def logs(self, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:  # noqa: ARG002
        """Pass on the last lines of the latest run's pods, or of ``node``; with ``follow`` to the end."""
        self._cluster.engine.logs(self._cluster.name, on_line, node=node or "", follow=follow)

    # --- runs ---

    def begin(self, workload: Workload, options: RunOptions, now: datetime, replayed: Replay | None = None) -> Run:
        """Return a new or replayed run with job and objects; send nothing. ConfigError, HostError."""
        cluster = self._cluster
        labs.require_own(cluster)
        target = cluster.target
        if replayed:
            return self._again(replayed(now), target)
        placement = self._placement(options)
        run_id = store.new_id(workload.name, now)
        workload = bounded(cluster.directory, workload)
        warn = self.context.warn
        built = build(self.settings, cluster.directory, target, workload, options, run_id, owner(), placement, warn)
        if built.job.resumed:
            self._require_on_claim(built.job.resumed)
        # Its code is in the objects that are sent, or in the archive for the claim.
        job = replace(built.job, code=())
        return NewClusterRun(
            lab=built.lab,
            job=job,
            name=built.name,
            kind=KINDS[target.kind],
            patience=target.patience,
            waits=built.waits,
            target=target,
            placement=placement,
            objects=tuple(render.manifests(target, built)),
            on_claim=built.on_claim,
        )

    def _require_on_claim(self, checkpoint: str) -> None:
        """Raise ConfigError unless the run that saved a checkpoint had its directory on the lab's claim."""
        run_id, cluster = checkpoint.partition("/")[0], self._cluster
        claim = {"claimName": f"{cluster.name}-storage"}
        if cluster.is_here(run_id):
            objects = render.recorded(store.directory(cluster.directory, run_id), {}, {})
            if claim in render.volumes(objects, "persistentVolumeClaim"):
                return
        raise ConfigError(
            f"checkpoint {checkpoint} is not on the claim: its run was in another place, or had no claim",
            hint="runs in this namespace save checkpoints on the claim if LAB_K8S_STORAGE_SIZE is set",
        )

    def _again(self, job: Job, target: Target) -> NewClusterRun:
        """Build a run that repeats a recorded one: its objects under this run's names, today's owner and secrets."""
        cluster, before = self._cluster, self._cluster.place_of(job.replays)
        target = replace(target, kind=next(kind for kind, name in KINDS.items() if name == before.kind))
        name = job_name(cluster.name, job.workload.name, job.run_id)
        labels = {render.label(job.replays): render.label(job.run_id)}
        names = {job.replays: job.run_id, **labels, before.name: name}
        job = replace(renamed(replace(job, replays=""), {before.name: name}), replays=job.replays)
        record = store.directory(cluster.directory, job.replays)
        objects = render.recorded(record, names, jobs.pinned_images(record))
        for manifest in objects:
            if OWNER in manifest["metadata"].get("annotations", {}):
                manifest["metadata"]["annotations"][OWNER] = owner()
        lab = lab_of_pods(self.settings, cluster.directory, self.settings.text("LAB_ACCELERATOR"), target, name)
        if lab.secrets:
            pods = ClusterPods(name=name, run_id=job.run_id, owner=owner(), lab=lab, files=(), environment=())
            objects = [render.secret(target, pods), *objects]
        return NewClusterRun(
            lab=lab,
            job=job,
            name=name,
            kind=before.kind,
            patience=target.patience,
            target=target,
            placement=ANYWHERE,
            objects=tuple(objects),
        )

    def _placement(self, options: RunOptions) -> Placement:
        """Return the nodes that options name, else all not drained. ConfigError if they do not fit."""
        drained = tuple(inventory.drained(self.context.directory))
        if not nodes.is_placed(options):
            return Placement(without=drained)
        hostnames = {node.name: node.hostname for node in self._nodes}
        placed = nodes.placement(self.lab(), hostnames, options)
        return placed if placed.nodes else replace(placed, without=(*placed.without, *drained))

    def observe(self, run: Run, *, preview: bool = False) -> Run:  # noqa: ARG002
        """Return the run unchanged: its pods do not exist yet."""
        return run

    def needs_up(self, run: Run) -> bool:  # noqa: ARG002
        """Return False: a run brings its pods itself."""
        return False

    def confirm_image(self, run: Run, ask: Callable[[str], bool] | None, *, preview: bool = False) -> None:
        """Ask nothing: nodes pull images themselves."""

    def require_launcher(self, workload: Workload) -> None:
        """Require nothing: a run brings its launcher itself."""

    def require_ready(self, run: Run, options: RunOptions, *, preview: bool = False) -> None:
        """Raise HostError for a failed check or, without --wait, for named nodes in use; a preview notes these."""
        from labctl.backends.kubernetes import checks
        from labctl.records.active import InUse

        new = cast("NewClusterRun", run)
        checks.preflight(self._cluster, new.target, new.job)
        placement = new.placement
        if placement.nodes and not options.wait:
            request = request_of(new.target, placement.slots)
            try:
                nodes.require_free(self._cluster, placement, self._nodes_now(), request)
            except InUse as error:
                if not preview:
                    raise
                self.context.notice(error.message)

    def plan_run(self, run: Run, *, ended: Collection[str] = (), preview: bool = False) -> RunPlan:  # noqa: ARG002
        """Return the record's files, the step that sends code to the claim, and texts for the plan."""
        from labctl.backends.kubernetes.steps import SendCode

        new, cluster = cast("NewClusterRun", run), self._cluster
        versions = {} if preview else store.versions(new.lab, cluster.engine.versions(), None)
        facts = {**versions, **REPLAYED, "code": list(_commits(new))}
        kept = store.record(new.lab, self.settings, new.job, facts, preview=preview)
        place = Place(
            server=cluster.api.server,
            namespace=cluster.api.namespace,
            name=new.name,
            kind=new.kind,
            waits=new.waits,
        )
        place_file = File(path=store.PLACE, content=msgspec.json.encode(place).decode())
        objects = ", ".join(render.names_of(new.objects))
        place_of = place_of_code(new.on_claim)
        sent = SendCode(place=place_of, packed=new.on_claim, cause="too large for a ConfigMap")
        return RunPlan(
            record=(*kept, place_file, render.record(new.objects)),
            send=(sent,) if new.on_claim else (),
            launch=f"apply {objects} in namespace {new.target.namespace} of {cluster.api.server}",
            collect=f"fetch {new.job.directory} from the launcher's pod, and remove {new.kind} {new.name}",
        )

    def carry_out_steps(self, run: Run, steps: tuple[Step, ...], *, before: int, after: int) -> None:
        """Carry out steps of a run's plan. HostError, with the run's record closed, if one fails."""
        from labctl.backends.kubernetes.steps import ClusterDeployment

        try:
            raise_all(carry_out(steps, ClusterDeployment(self._cluster), before=before, after=after))
        except BaseException:
            store.abandon(run.lab, run.run_id)
            raise

    def start(self, run: Run, options: RunOptions) -> None:  # noqa: ARG002
        """Apply a run's objects in the cluster. HostError, with the record closed, if it refuses."""
        new, cluster = cast("NewClusterRun", run), self._cluster
        try:
            jobs.submit(cluster.api, cluster.name, new.objects)
        except BaseException:
            store.abandon(new.lab, new.run_id)
            raise
        namespace = f"namespace {new.target.namespace} of {cluster.api.server}"
        self.context.notice(f"{new.kind} {new.name} in {namespace}")

    def supervise(
        self,
        run: Run,
        keep: Callable[[Sequence[Line]], Sequence[Line]],
        options: RunOptions | None = None,
        *,
        age: float = 0,  # noqa: ARG002
    ) -> RunOutcome:
        """Submit a run, or without ``options`` follow one, to its end; fetch results; return the outcome."""
        recorded, api, fetched = cast("ClusterRun", run), self._cluster.api, True

        def gather(launcher: str) -> None:
            """Keep the pods' descriptions in the record, and fetch the results."""
            nonlocal fetched
            with suppress(HostError):
                jobs.keep_pods(recorded, jobs.run_pods(api, recorded))
            fetched = jobs.fetch(api, recorded, launcher, self.context.warn)

        if options is not None:
            self.start(run, options)
        outcome = jobs.supervise(
            api,
            recorded,
            keep,
            notice=self.context.notice,
            ends=options is not None,
            gather=gather,
        )
        self._fetched[run.run_id] = fetched
        return outcome

    def output(self, run: Run, on_lines: OnLines, given_up: Callable[[], bool] = bool) -> None:
        """Pass on a run's lines until it ends or is ``given_up``, empty batches meanwhile. HostError if no job."""
        labs.follow(self._cluster, cast("ClusterRun", run), on_lines, given_up)

    def log(self, run_id: str, on_lines: OnLines) -> bool:
        """Pass on the log of a run's launcher so far; return True. HostError if it has not started."""
        launcher = labs.require_launcher_of(self._cluster, self._cluster.run(run_id))
        on_lines(tuple(labs.lines(self._cluster, launcher, follow=False)))
        return True

    def recorded(self, run_id: str) -> Run:
        """Load a run of the record. HostError if it is of another cluster or namespace, or on Docker hosts."""
        return self._cluster.run(run_id)

    def active(self) -> Mapping[str, ActiveRun]:
        """Return the runs without a result by id, observed; unknown if the cluster is unreachable."""
        return labs.active(self._cluster)

    def sharing_losses(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the pods of each run are observed separately."""
        return nullcontext()

    def stop(self, run: Run, grace: float, message: str) -> None:  # noqa: ARG002
        """Send TERM and a message to a run's launch command; if it has not begun, delete the run's job."""
        labs.stop(self._cluster, cast("ClusterRun", run), message)

    def look(self, run: Run) -> Hang:
        """Have the agent in the launcher's pod tell what ranks wait for. HostError if the run is not running."""
        return labs.look(self._cluster, cast("ClusterRun", run))

    def leaves_processes(self, run_id: str) -> bool:  # noqa: ARG002
        """Return False: the cluster ends the pods of a run."""
        return False

    def end(self, run_id: str) -> None:
        """Delete the job of a recorded run, with what it owns. HostError if it is elsewhere."""
        recorded = self._cluster.run(run_id)
        jobs.remove(self._cluster.api, recorded.kind, recorded.name)

    def collect(self, run_id: str) -> None:
        """Move fetched files into the run's record; do nothing if this process did not follow it."""
        if run_id in self._fetched:
            directory = self.context.directory
            outputs.move(store.outputs(directory, run_id), store.directory(directory, run_id))

    def evidence(self, run: Run, since: float) -> dict[str, str]:  # noqa: ARG002
        """Return no files: nodes belong to the cluster."""
        return {}

    def forget(self, run: Run) -> None:
        """Delete a run's job and pods, but not if its results could not be fetched."""
        if self._fetched.pop(run.run_id, True):
            jobs.clear(self._cluster.api, cast("ClusterRun", run), self.context.warn)

    def without_lost(self, options: RunOptions, ended: Result, error: HostError) -> RunOptions:  # noqa: ARG002
        """Raise ``error``: the cluster replaces nodes, so no run goes on without them."""
        raise error
