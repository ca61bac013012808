"""A lab in a cluster: its runs, its pods, and their removal."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends import terminal
from labctl.backends.kubernetes import pods, render
from labctl.backends.kubernetes.api import Api, KubernetesEngine, Manifest, Refused, node_of
from labctl.backends.kubernetes.job import ClusterJob, build, job_name, lab_of_pods
from labctl.backends.kubernetes.render import OWNER
from labctl.backends.kubernetes.run import (
    ENDED,
    KINDS,
    LOOK,
    OWNED,
    ClusterRun,
    kind_of,
    remove,
    run_pods,
    seconds_of,
    submit,
)
from labctl.backends.kubernetes.target import USUAL_KIND, Target, read
from labctl.backends.owner import owner
from labctl.backends.state import Container
from labctl.backends.status import LabStatus, NodeStatus
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import LAUNCHER, Hang, Workload
from labctl.records import places, store
from labctl.records.active import ActiveRun, Run
from labctl.records.lines import Line, line_of
from labctl.system import filelock
from labctl.system.decode import decode
from labctl.system.parallel import begin, pool

# Last lines of a log in which a run prints its step.
RECENT = 50
FORBIDDEN = 403
# Ends a launcher's command; while it waits for its workers it has none.
NO_COMMAND = 9
STOP = f'[ -s ~/.command ] || exit {NO_COMMAND}; echo "$0" > ~/.stopped; kill -TERM "$(cat ~/.command)"'


class ClusterLab(Struct, frozen=True, kw_only=True):
    """The lab of a directory in a namespace of a cluster."""

    context: Context
    settings: Settings
    api: Api

    @property
    def name(self) -> str:
        return self.settings.text("LAB_NAME")

    @property
    def directory(self) -> Path:
        return self.context.directory

    @property
    def engine(self) -> KubernetesEngine:
        return KubernetesEngine(self.api, self.name)

    @property
    def target(self) -> Target:
        """Target of jobs, of a kind that the cluster has. HostError if none, ConfigError for a setting."""
        return read(self.settings, self.settings.text("LAB_ACCELERATOR"), kind_of(self.api, self.settings))

    @property
    def selector(self) -> str:
        return f"labctl.lab={self.name}"

    def place_of(self, run_id: str) -> Place:
        """Return a run's server, namespace and job by its record; an empty Place if in no cluster."""
        return store.decode(store.directory(self.directory, run_id) / store.PLACE, Place) or Place()

    def is_here(self, run_id: str) -> bool:
        """Return True if a run's record names this server and namespace."""
        recorded = self.place_of(run_id)
        return (recorded.server, recorded.namespace) == (self.api.server, self.api.namespace)

    def run(self, run_id: str) -> ClusterRun:
        """Return a run from its record. HostError if it is in another cluster or namespace, or on Docker."""
        job, recorded = store.load_job(self.directory, run_id), self.place_of(run_id)
        if not self.is_here(run_id):
            place = f"in namespace {recorded.namespace} of {recorded.server}" if recorded.server else "on Docker hosts"
            settings = (
                f"LAB_K8S_CONTEXT and LAB_K8S_NAMESPACE={recorded.namespace}" if recorded.server else "LAB_ENGINE"
            )
            raise HostError(f"run {run_id} is {place}", hint=f"{settings} in .env")
        accelerator = self.settings.text("LAB_ACCELERATOR")
        lab = lab_of_pods(self.settings, self.directory, accelerator, read(self.settings, accelerator), recorded.name)
        patience = self.settings.number("LAB_K8S_PATIENCE")
        return ClusterRun(
            name=recorded.name, kind=recorded.kind, lab=lab, job=job, patience=patience, waits=recorded.waits
        )

    def kind_of(self, name: str) -> str:
        """Return the kind of the job with this name in the cluster; the usual one if none is found."""
        for kind in KINDS.values():
            # The user may have no rights to the other kind.
            with suppress(Refused):
                if self.api.get(kind, name):
                    return kind
        return KINDS[USUAL_KIND]


class Place(Struct, frozen=True, kw_only=True):
    """Place of a run: the cluster's server, the namespace, and its job."""

    server: str = ""
    namespace: str = ""
    name: str = ""
    kind: str = ""
    waits: bool = False
    """It waits for room on its nodes for as long as that takes."""


def open_lab(context: Context, settings: Settings) -> ClusterLab:
    """Return the lab of this directory, by its kubeconfig; send nothing. HostError if that names no cluster."""
    namespace = settings.text("LAB_K8S_NAMESPACE") or settings.text("LAB_NAME")
    return ClusterLab(context=context, settings=settings, api=Api(namespace, settings.text("LAB_K8S_CONTEXT")))


# --- run -----------------------------------------------------------------------------------------------------


def require_own(lab: ClusterLab) -> None:
    """Raise HostError if a job of this lab in the namespace belongs to another user."""
    for job in jobs(lab):
        who = job["metadata"].get("annotations", {}).get(OWNER, "")
        if who not in ("", owner()):
            name = f"{job['kind']} {job['metadata']['name']}"
            raise HostError(
                f"lab `{lab.name}` in namespace {lab.api.namespace} belongs to {who}: it has {name}",
                hint="for a lab of your own, set another LAB_NAME in .env",
            )


class Submitted(Struct, frozen=True, kw_only=True):
    """A job in a cluster, and the objects that were applied or deleted, by kind and name."""

    name: str
    namespace: str
    objects: tuple[str, ...]


def job_of(lab: ClusterLab, workload: Workload, options: RunOptions) -> tuple[Target, ClusterJob]:
    """Return target and job of a workload without a record. ConfigError if it exists, HostError if none is served.

    Applied again, an existing job would not run again.
    """
    target = lab.target
    built = build(lab.settings, lab.directory, target, workload, options, warn=lab.context.warn)
    if lab.api.get(kind := KINDS[target.kind], built.name):
        raise ConfigError(
            f"{kind} {built.name} is already in namespace {lab.api.namespace}",
            hint=f"labctl k8s delete {workload.name} removes it, whether it runs or has ended",
        )
    return target, built


def submit_by_hand(lab: ClusterLab, workload: Workload, options: RunOptions) -> Submitted:
    """Check and apply a workload's job that has no record. ConfigError if it exists, HostError if a check fails."""
    from labctl.backends.kubernetes import checks

    target, built = job_of(lab, workload, options)
    checks.preflight(lab, target, built.job)
    submit(lab.api, built.lab.name, render.manifests(target, built))
    made = render.rendered(target, built)
    return Submitted(name=made.name, namespace=made.namespace, objects=made.objects)


def delete(lab: ClusterLab, workload: str, *, storage: bool) -> Submitted:
    """Delete a workload's job submitted by hand, if ``storage`` also claims; return what was. ConfigError if none."""
    name = job_name(lab.name, workload)
    kind = lab.kind_of(name)
    objects = [(owned_kind, name) for owned_kind in (kind, *OWNED[kind])]
    if storage:
        objects += [("PersistentVolumeClaim", claim["metadata"]["name"]) for claim in _claims(lab)]
    deleted = [target for target in objects if lab.api.delete(*target)]
    if not deleted:
        hint = "`labctl k8s submit` makes one; runs of `labctl run` end with `labctl stop`"
        raise ConfigError(f"job {name} not found in namespace {lab.api.namespace}", hint=hint)
    return Submitted(name=name, namespace=lab.api.namespace, objects=tuple(f"{kind}/{it}" for kind, it in deleted))


def follow(
    lab: ClusterLab, run: ClusterRun, on_lines: Callable[[Sequence[Line]], object], given_up: Callable[[], bool]
) -> None:
    """Pass on a run's lines until it ends or is ``given_up``, an empty batch per silent second. HostError if no job.

    HostError if the run has no job in the cluster, or the connection to its launcher is lost.
    """
    while not (launcher := launcher_of(lab.api, run)):
        if not lab.api.get(run.kind, run.name):
            raise HostError(f"run {run.run_id} has not begun, and has no {run.kind}", hint="labctl runs")
        on_lines(())
        if given_up():
            return
        time.sleep(LOOK)
    heard: queue.SimpleQueue[Line] = queue.SimpleQueue()

    def read() -> None:
        """Queue the lines as they come."""
        for line in lines(lab, launcher, follow=True):
            heard.put(line)

    reading = begin(read)
    while not (given_up() or (reading.done() and heard.empty())):
        on_lines(tuple(_heard(heard)))
    if reading.done():
        reading.result()


def _heard(lines_heard: queue.SimpleQueue[Line]) -> Iterator[Line]:
    """Wait up to LOOK seconds for a line, then yield all lines in the queue."""
    with suppress(queue.Empty):
        yield lines_heard.get(timeout=LOOK)
        while True:
            yield lines_heard.get_nowait()


def lines(lab: ClusterLab, launcher: Manifest, *, follow: bool) -> Iterator[Line]:
    """Yield the lines in a launcher's log up to the line that reports its end; with ``follow`` wait for more."""
    for when, text in lab.api.lines(launcher, follow=follow):
        ended = ENDED.fullmatch(text)
        if not ended or ended["rest"]:
            yield line_of(ended["rest"] if ended else text, seconds_of(when))
        if ended:
            return


def require_launcher_of(lab: ClusterLab, run: ClusterRun) -> Manifest:
    """Return the pod of a run's launcher. HostError if its program has not started."""
    launcher = launcher_of(lab.api, run)
    if not launcher:
        raise HostError(f"run {run.run_id} has not begun", hint="labctl status says what its pods wait for")
    return launcher


def launcher_of(api: Api, run: ClusterRun) -> Manifest | None:
    """Return the pod of a run's launcher; None before its program has started."""
    pods_of_run = run_pods(api, run)
    return next((pod for pod in pods_of_run if pods.has_started(pod) and node_of(pod) == LAUNCHER), None)


def stop(lab: ClusterLab, run: ClusterRun, message: str) -> None:
    """Send TERM and ``message`` to a run's launch command; if there is none yet, delete the run's job."""
    launcher, code = launcher_of(lab.api, run), 0
    if launcher:
        code = lab.engine.exec(launcher["metadata"]["name"], ("sh", "-c", STOP, message), user="").code
    if not launcher or code == NO_COMMAND:
        remove(lab.api, run.kind, run.name)


def look(lab: ClusterLab, run: ClusterRun) -> Hang:
    """Have the agent in the launcher's pod tell what ranks wait for; return that. HostError if it does not run."""
    pod = require_launcher_of(lab, run)["metadata"]["name"]
    done = lab.engine.exec(pod, ("python3", "-I", "/etc/labctl/start/labnode.py", "look", run.run_id), user="")
    if done.code:
        raise HostError(f"{LAUNCHER}: {done.err.strip()}", hint=f"labctl show {run.run_id}")
    return decode(done.out.encode(), Hang)


# --- observe -------------------------------------------------------------------------------------------------


def jobs(lab: ClusterLab) -> list[Manifest]:
    """Return the lab's jobs of both kinds. HostError if the user may list neither."""
    refused = []
    listed: list[Manifest] = []
    for kind in KINDS.values():
        try:
            listed += lab.api.list(kind, lab.selector)
        except Refused as error:
            if error.status != FORBIDDEN:
                raise
            refused.append(error)
    if len(refused) == len(KINDS):
        raise refused[0]
    return listed


def active(lab: ClusterLab) -> dict[str, ActiveRun]:
    """Return the runs without a result, by id, observed; all as unknown if the cluster is unreachable.

    A run without a job in the cluster has ended, but is omitted while a process holds it.
    """
    waiting = store.unjudged(lab.directory)
    if not waiting:
        return {}
    # Before asking the cluster: if no process holds a run now, its job has been submitted already or never will be.
    held = {path.stem for path in filelock.held_below(lab.directory / filelock.RUNS)}
    try:
        jobs_by_name = {job["metadata"]["name"]: job for job in jobs(lab)}
        runs = {run_id: _active(lab, run_id, jobs_by_name) for run_id in waiting}
    except HostError:
        return store.unknown(lab.directory)
    gone = {run_id: ActiveRun(id=run_id, nodes=(), state="ended") for run_id in waiting if run_id not in held}
    return gone | {run_id: run for run_id, run in runs.items() if run}


def _active(lab: ClusterLab, run_id: str, jobs_by_name: Mapping[str, Manifest]) -> ActiveRun | None:
    """Return a run as ended, running, or unknown if in another cluster; None if its job is not in the cluster."""
    if not lab.is_here(run_id):
        return ActiveRun(id=run_id, nodes=(), state="unknown")
    job = jobs_by_name.get(lab.place_of(run_id).name)
    if not job:
        return None
    pods_of_run = lab.api.list("Pod", f"labctl.run={render.label(run_id)}")
    launcher = next((pod for pod in pods_of_run if node_of(pod) == LAUNCHER and pods.has_started(pod)), None)
    printed = [text for _, text in lab.api.lines(launcher, last=RECENT)] if launcher else []
    over = pods.state_of(job).name in ("succeeded", "failed") or any(map(ENDED.fullmatch, printed))
    return ActiveRun(
        id=run_id,
        nodes=tuple(sorted(node_of(pod) for pod in pods_of_run if node_of(pod) != LAUNCHER)),
        state="ended" if over else "running",
        order=seconds_of(job["metadata"].get("creationTimestamp", "")),
        waits=not launcher and not over,
        step=places.last(printed),
    )


def status(lab: ClusterLab) -> LabStatus:
    """Return the lab's state and a status per pod with its run and reason; ``down`` without pods."""
    containers = [pod for pod in lab.engine.observe(lab.name).containers if pod.state != "removing"]
    several = len({pod.fingerprint for pod in containers}) > 1
    runs = {render.label(run_id): run_id for run_id in store.unjudged(lab.directory)}
    nodes = tuple(
        NodeStatus(
            name=pod.name if several else pod.node,
            role=pod.role,
            host=pod.host or "-",
            state=pod.state,
            health=pod.health,
            reason=pod.reason,
            run=runs.get(pod.fingerprint, "") if pod.role == "worker" else "",
        )
        for pod in containers
    )
    state = "up" if all(node.state == "running" for node in nodes) else "partial"
    return LabStatus(
        lab=lab.name,
        state=state if nodes else "down",
        nodes=nodes,
        unreachable=(),
        hint="" if nodes else "labctl run opt-tiny",
    )


def pod_of(lab: ClusterLab, node: str) -> str:
    """Return the name of a node's latest pod. HostError if not running or another user's, ConfigError if none."""
    require_own(lab)
    return _running_pod(lab, lab.engine.observe(lab.name).containers, node)


def pod_of_run(lab: ClusterLab, run: Run, node: str) -> str:
    """Return a node's pod in a run, or in any if that has none. HostError if not running, ConfigError if none."""
    containers = lab.engine.observe(lab.name).containers
    mine = tuple(container for container in containers if container.fingerprint == render.label(run.run_id))
    # A run that is yet to be submitted has the pods that the lab has.
    return _running_pod(lab, mine or containers, run.short(node))


def _running_pod(lab: ClusterLab, containers: Sequence[Container], node: str) -> str:
    """Return the name of a node's pod. HostError if none runs, ConfigError if the lab has no such node."""
    if not containers:
        raise HostError(f"lab {lab.name} has no pods", hint="labctl run --detach WORKLOAD starts pods", node=node)
    chosen = next((container for container in containers if node in (container.node, container.name)), None)
    if not chosen:
        names = ", ".join(dict.fromkeys(container.node for container in containers))
        raise ConfigError(f"lab {lab.name} has no node `{node}`", hint=f"it has {names}", node=node)
    if chosen.state != "running":
        reason = f": {chosen.reason}" if chosen.reason else ""
        raise HostError(f"{node} is {chosen.state}{reason}", hint="labctl status", node=node)
    return chosen.name


def workers(lab: ClusterLab) -> tuple[str, ...]:
    """Return the names of the lab's workers that are running. HostError if none is."""
    containers = lab.engine.observe(lab.name).containers
    active_workers = (pod.node for pod in containers if pod.role == "worker" and pod.state == "running")
    names = tuple(dict.fromkeys(active_workers))
    if not names:
        raise HostError(f"no worker of lab {lab.name} is running", hint="labctl status")
    return names


def execute(lab: ClusterLab, nodes: tuple[str, ...], command: tuple[str, ...], **options: Any) -> int:
    """Run a command in the pods of nodes; return the largest exit code. Several get no input, marked output."""
    pods_of = {node: pod_of(lab, node) for node in nodes}
    if len(nodes) == 1:
        return lab.engine.attach(pods_of[nodes[0]], command, user="", workdir=None, **options)

    def run(node: str) -> int:
        marked = partial(terminal.show_of, node)
        return lab.engine.attach(pods_of[node], command, user="", workdir=None, on_line=marked)

    with pool(len(nodes)) as threads:
        return max(threads.map(run, nodes))


# --- down ----------------------------------------------------------------------------------------------------


def running(lab: ClusterLab) -> list[str]:
    """Return the ids of the lab's runs that are running."""
    return [run_id for run_id, run in active(lab).items() if run.state == "running"]


def owned(lab: ClusterLab) -> Iterator[Manifest]:
    """Yield the lab's jobs, ConfigMaps, Secrets, pods and runtimes; not its claim and namespace."""
    yield from jobs(lab)
    for kind in ("ConfigMap", "Secret", "Pod"):
        yield from lab.api.list(kind, lab.selector)
    with suppress(Refused):
        yield from lab.api.list("TrainingRuntime", lab.selector)


def _claims(lab: ClusterLab) -> list[Manifest]:
    return lab.api.list("PersistentVolumeClaim", lab.selector)


def kept(lab: ClusterLab) -> dict[str, str]:
    """Return the claims and namespace that `down` keeps, each with the kubectl command that removes it.

    The claim, and the namespace if it was created for the lab: it may hold other objects by now.
    """
    name = lab.api.namespace
    claims = [claim["metadata"]["name"] for claim in _claims(lab)]
    commands = {f"claim {claim}": f"kubectl -n {name} delete pvc {claim}" for claim in claims}
    with suppress(Refused):
        namespace = lab.api.get("Namespace", name)
        if namespace and namespace["metadata"].get("labels", {}).get("labctl.lab") == lab.name:
            commands[f"namespace {name}"] = f"kubectl delete namespace {name}"
    return commands
