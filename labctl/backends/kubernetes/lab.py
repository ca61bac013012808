"""A lab in a cluster: its runs there, its pods, and what removes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from labctl.backends.status import LabStatus, NodeStatus
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import LAUNCHER, Workload
from labctl.records import places, store
from labctl.records.active import ActiveRun
from labctl.records.lines import Line, line_of
from labctl.system import filelock
from labctl.system.parallel import pool

# Lines of a log in which a run says where it is.
RECENT = 50
FORBIDDEN = 403
# Tells a launcher's command to end; a launcher that looks for its workers yet has none.
NO_COMMAND = 9
STOP = f'[ -s ~/.command ] || exit {NO_COMMAND}; echo "$0" > ~/.stopped; kill -TERM "$(cat ~/.command)"'


class ClusterLab(Struct, frozen=True, kw_only=True):
    """The lab of a directory, and the namespace where it is."""

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
        """Where jobs run, with the kind that the cluster has. HostError, ConfigError."""
        return read(self.settings, self.settings.text("LAB_ACCELERATOR"), kind_of(self.api, self.settings))

    @property
    def selector(self) -> str:
        return f"labctl.lab={self.name}"

    def place_of(self, run_id: str) -> Place:
        """Where a run is, by its record; of one that is in no cluster this is empty."""
        return store.decode(store.directory(self.directory, run_id) / store.PLACE, Place) or Place()

    def is_here(self, run_id: str) -> bool:
        where = self.place_of(run_id)
        return (where.server, where.namespace) == (self.api.server, self.api.namespace)

    def run(self, run_id: str) -> ClusterRun:
        """A run that is recorded here. HostError for one of another cluster or namespace, or on Docker hosts."""
        job, where = store.load_job(self.directory, run_id), self.place_of(run_id)
        if not self.is_here(run_id):
            there = f"in namespace {where.namespace} of {where.server}" if where.server else "on Docker hosts"
            settings = f"LAB_K8S_CONTEXT and LAB_K8S_NAMESPACE={where.namespace}" if where.server else "LAB_ENGINE"
            raise HostError(f"run {run_id} is {there}", hint=f"{settings} in .env")
        accelerator = self.settings.text("LAB_ACCELERATOR")
        lab = lab_of_pods(self.settings, self.directory, accelerator, read(self.settings, accelerator), where.name)
        return ClusterRun(name=where.name, kind=where.kind, lab=lab, job=job)

    def kind_of(self, name: str) -> str:
        """The kind of a job, by what the cluster has of its name."""
        for kind in KINDS.values():
            # Who works with one kind may have no rights to the other.
            with suppress(Refused):
                if self.api.get(kind, name):
                    return kind
        return KINDS[USUAL_KIND]


class Place(Struct, frozen=True, kw_only=True):
    """Where a run is: the cluster's server, the namespace, and its job there."""

    server: str = ""
    namespace: str = ""
    name: str = ""
    kind: str = ""


def open_lab(context: Context, settings: Settings) -> ClusterLab:
    """The lab of this directory. HostError where the kubeconfig names no cluster."""
    namespace = settings.text("LAB_K8S_NAMESPACE") or settings.text("LAB_NAME")
    return ClusterLab(context=context, settings=settings, api=Api(namespace, settings.text("LAB_K8S_CONTEXT")))


# --- run -----------------------------------------------------------------------------------------------------


def require_own(lab: ClusterLab) -> None:
    """HostError where somebody else has a lab of this name in the namespace: its jobs and pods are theirs."""
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
    """A workload's job that no run of labctl's is recorded of. ConfigError, HostError; nothing is sent.

    ConfigError too where it is there: applied again it would not run again.
    """
    target = lab.target
    built = build(lab.settings, lab.directory, target, workload, options)
    if lab.api.get(kind := KINDS[target.kind], built.name):
        raise ConfigError(
            f"{kind} {built.name} is already in namespace {lab.api.namespace}",
            hint=f"labctl k8s delete {workload.name} removes it, whether it runs or has ended",
        )
    return target, built


def submit_by_hand(lab: ClusterLab, workload: Workload, options: RunOptions) -> Submitted:
    """Create a workload's job that labctl does not record. ConfigError if it exists, HostError if refused."""
    from labctl.backends.kubernetes import checks

    target, built = job_of(lab, workload, options)
    checks.preflight(lab, target, built)
    submit(lab.api, target, built)
    made = render.rendered(target, built)
    return Submitted(name=made.name, namespace=made.namespace, objects=made.objects)


def delete(lab: ClusterLab, workload: str, *, storage: bool) -> Submitted:
    """Delete a workload's job that was submitted by hand, and with ``storage`` the lab's claim."""
    name = job_name(lab.name, workload)
    kind = lab.kind_of(name)
    wanted = [(one, name) for one in (kind, *OWNED[kind])]
    if storage:
        wanted += [("PersistentVolumeClaim", one["metadata"]["name"]) for one in _claims(lab)]
    found = [one for one in wanted if lab.api.delete(*one)]
    if not found:
        hint = "`labctl k8s submit` makes one; runs of `labctl run` end with `labctl stop`"
        raise ConfigError(f"job {name} not found in namespace {lab.api.namespace}", hint=hint)
    return Submitted(name=name, namespace=lab.api.namespace, objects=tuple(f"{kind}/{it}" for kind, it in found))


def lines(lab: ClusterLab, run: ClusterRun, *, follow: bool) -> Iterator[Line]:
    """Yield the lines of a run, with ``follow`` to its end. HostError if its launcher has not started."""
    launcher = launcher_of(lab.api, run)
    if not launcher:
        raise HostError(f"run {run.run_id} has not begun", hint="labctl status says what its pods wait for")
    for when, text in lab.api.lines(launcher, follow=follow):
        ended = ENDED.fullmatch(text)
        if not ended or ended["rest"]:
            yield line_of(ended["rest"] if ended else text, seconds_of(when))
        if ended:
            return


def launcher_of(api: Api, run: ClusterRun) -> Manifest | None:
    """The launcher's pod, once it has started."""
    found = run_pods(api, run)
    return next((pod for pod in found if pods.has_started(pod) and node_of(pod) == LAUNCHER), None)


def stop(lab: ClusterLab, run: ClusterRun, message: str) -> None:
    """Have a run's launcher end its command; a run that has not begun is removed."""
    launcher, code = launcher_of(lab.api, run), 0
    if launcher:
        code = lab.engine.exec(launcher["metadata"]["name"], ("sh", "-c", STOP, message), user="").code
    if not launcher or code == NO_COMMAND:
        remove(lab.api, run.kind, run.name)


# --- what there is -------------------------------------------------------------------------------------------


def jobs(lab: ClusterLab) -> list[Manifest]:
    """The lab's jobs, of either kind. HostError where none of them may be listed."""
    refused = []
    found: list[Manifest] = []
    for kind in KINDS.values():
        try:
            found += lab.api.list(kind, lab.selector)
        except Refused as error:
            if error.status != FORBIDDEN:
                raise
            refused.append(error)
    if len(refused) == len(KINDS):
        raise refused[0]
    return found


def active(lab: ClusterLab) -> dict[str, ActiveRun]:
    """What the cluster knows of the runs that nobody has judged; the state of all is unknown where it is silent."""
    waiting = store.unjudged(lab.directory)
    if not waiting:
        return {}
    # Before the cluster is asked: the job of a run that nothing holds now was submitted by then, or never will be.
    held = {path.stem for path in filelock.held_below(lab.directory / filelock.RUNS)}
    try:
        jobs_by_name = {job["metadata"]["name"]: job for job in jobs(lab)}
        runs = {run_id: _active(lab, run_id, jobs_by_name) for run_id in waiting}
    except HostError:
        return store.unknown(lab.directory)
    gone = {run_id: ActiveRun(id=run_id, nodes=(), state="ended") for run_id in waiting if run_id not in held}
    return gone | {run_id: run for run_id, run in runs.items() if run}


def _active(lab: ClusterLab, run_id: str, jobs_by_name: Mapping[str, Manifest]) -> ActiveRun | None:
    """Observe a run; None if the cluster does not have its job."""
    if not lab.is_here(run_id):
        return ActiveRun(id=run_id, nodes=(), state="unknown")
    job = jobs_by_name.get(lab.place_of(run_id).name)
    if not job:
        return None
    found = lab.api.list("Pod", f"labctl.run={render.label(run_id)}")
    launcher = next((pod for pod in found if node_of(pod) == LAUNCHER and pods.has_started(pod)), None)
    printed = [text for _, text in lab.api.lines(launcher, last=RECENT)] if launcher else []
    over = pods.state_of(job).name in ("succeeded", "failed") or any(map(ENDED.fullmatch, printed))
    return ActiveRun(
        id=run_id,
        nodes=tuple(sorted(node_of(pod) for pod in found if node_of(pod) != LAUNCHER)),
        state="ended" if over else "running",
        waits=not launcher and not over,
        step=places.last(printed),
    )


def status(lab: ClusterLab) -> LabStatus:
    """Return the lab's pods, with what keeps them from running."""
    containers = [one for one in lab.engine.observe(lab.name).containers if one.state != "removing"]
    several = len({one.fingerprint for one in containers}) > 1
    nodes = tuple(
        NodeStatus(
            name=one.name if several else one.node,
            role=one.role,
            host=one.host or "-",
            state=one.state,
            health=one.health,
            reason=one.reason,
        )
        for one in containers
    )
    running = [node for node in nodes if node.state == "running"]
    return LabStatus(
        lab=lab.name,
        state="down" if not nodes else "up" if len(running) == len(nodes) else "partial",
        nodes=nodes,
        unreachable=(),
    )


def pod_of(lab: ClusterLab, node: str) -> str:
    """The pod of a node of the latest run. HostError where it does not run, ConfigError where there is none."""
    require_own(lab)
    found = lab.engine.observe(lab.name).containers
    if not found:
        raise HostError(
            f"lab {lab.name} has no pods", hint="labctl run --detach WORKLOAD starts some for a run", node=node
        )
    chosen = next((one for one in found if node in (one.node, one.name)), None)
    if not chosen:
        known = ", ".join(dict.fromkeys(one.node for one in found))
        raise ConfigError(f"lab {lab.name} has no node `{node}`", hint=f"it has {known}", node=node)
    if chosen.state != "running":
        said = f": {chosen.reason}" if chosen.reason else ""
        raise HostError(f"{node} is {chosen.state}{said}", hint="labctl status", node=node)
    return chosen.name


def workers(lab: ClusterLab) -> tuple[str, ...]:
    """The workers of the latest run that run. HostError where none does."""
    found = lab.engine.observe(lab.name).containers
    names = tuple(dict.fromkeys(one.node for one in found if one.role == "worker" and one.state == "running"))
    if not names:
        raise HostError(f"lab {lab.name} has no worker that runs", hint="labctl status")
    return names


def execute(lab: ClusterLab, nodes: tuple[str, ...], command: tuple[str, ...], **options: Any) -> int:
    """Run a command in the pods of these nodes; of several each line is marked, and the largest code is the answer."""
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
    """The ids of the runs that are under way."""
    return [run_id for run_id, found in active(lab).items() if found.state == "running"]


def owned(lab: ClusterLab) -> Iterator[Manifest]:
    yield from jobs(lab)
    for kind in ("ConfigMap", "Secret", "Pod"):
        yield from lab.api.list(kind, lab.selector)
    with suppress(Refused):
        yield from lab.api.list("TrainingRuntime", lab.selector)


def _claims(lab: ClusterLab) -> list[Manifest]:
    return lab.api.list("PersistentVolumeClaim", lab.selector)


def kept(lab: ClusterLab) -> dict[str, str]:
    """Return what `down` keeps, with the command that removes it.

    The claim, and the namespace if it was made for the lab: others may be in it by now.
    """
    name = lab.api.namespace
    claims = [claim["metadata"]["name"] for claim in _claims(lab)]
    commands = {f"claim {claim}": f"kubectl -n {name} delete pvc {claim}" for claim in claims}
    with suppress(Refused):
        namespace = lab.api.get("Namespace", name)
        if namespace and namespace["metadata"].get("labels", {}).get("labctl.lab") == lab.name:
            commands[f"namespace {name}"] = f"kubectl delete namespace {name}"
    return commands
