"""A lab in a cluster: its runs there, its pods, and what removes them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from labctl.backends import terminal
from labctl.backends.docker.lab.cluster import owner
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
    judge,
    kind_of,
    remove,
    run_pods,
    seconds_of,
    submit,
)
from labctl.backends.kubernetes.target import USUAL_KIND, Target, read
from labctl.backends.status import LabStatus, NodeStatus, RunState
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.model import LAUNCHER, File, Result, Workload
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.records.lines import line_of
from labctl.runs.follow import timed
from labctl.runs.request import RunOptions, bounded
from labctl.system import filelock
from labctl.system.parallel import pool

# Options that name nodes of Docker hosts, or go on with what such a run has left.
OF_HOSTS = ("hostfile", "include", "exclude", "resume", "retries", "wait")
# Lines of a log in which a run says where it is.
RECENT = 50
PLACE = "cluster.json"
"""Of a run's record."""
FORBIDDEN = 403
# Tells a launcher's command to end; a launcher that looks for its workers yet has none.
NO_COMMAND = 9
STOP = f'[ -s ~/.command ] || exit {NO_COMMAND}; echo "$0" > ~/.stopped; kill -TERM "$(cat ~/.command)"'
# Seconds for pods that were deleted to be gone.
GOING = 120
STEP = re.compile(r"\bstep \d+(?:/\d+)?")


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
        return store.decode(store.directory(self.directory, run_id) / PLACE, Place) or Place()

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


def require_options(options: RunOptions) -> None:
    """ConfigError for options that a job of a cluster cannot have."""
    for name in OF_HOSTS:
        if getattr(options, name):
            raise ConfigError(f"--{name} is for Docker hosts", hint="leave it out: the cluster places a run's pods")


def begin(lab: ClusterLab, workload: Workload, options: RunOptions) -> tuple[Target, ClusterJob]:
    """A new run, and where it is to run. ConfigError, HostError; nothing is sent."""
    require_options(options)
    require_own(lab)
    target = lab.target
    run_id = store.new_id(workload.name, datetime.now())
    workload = bounded(lab.directory, workload)
    return target, build(lab.settings, lab.directory, target, workload, options, run_id, owner())


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


def record(lab: ClusterLab, target: Target, built: ClusterJob) -> None:
    """Make the run's directories, with what it was asked to do and what was sent."""
    kept = store.record(built.lab, lab.settings, built.job, store.versions(built.lab, lab.engine.versions(), None))
    where = Place(server=lab.api.server, namespace=lab.api.namespace, name=built.name, kind=KINDS[target.kind])
    place = File(path=PLACE, content=msgspec.json.encode(where).decode())
    store.create(built.lab, built.run_id, built.job.files, (*kept, place, render.record(target, built)))


def launch(lab: ClusterLab, target: Target, built: ClusterJob) -> ClusterRun:
    """Submit a recorded run. HostError, with the record closed, where the cluster does not take it."""
    lab.context.notice(f"run {built.run_id}: {built.job.workload.description}")
    try:
        submit(lab.api, target, built)
    except BaseException:
        store.abandon(built.lab, built.run_id)
        raise
    lab.context.notice(f"{KINDS[target.kind]} {built.name} in namespace {target.namespace} of {lab.api.server}")
    return ClusterRun(name=built.name, kind=KINDS[target.kind], lab=built.lab, job=built.job)


def follow(lab: ClusterLab, run: ClusterRun, on_line: Callable[[str], None], *, ends: bool) -> Result:
    """Follow a run to its end and judge it; the caller holds its lock."""
    patience = lab.settings.number("LAB_K8S_PATIENCE")
    return judge(lab.context, lab.api, run, on_line, patience=patience, ends=ends)


def attach(lab: ClusterLab, run_id: str, on_line: Callable[[str], None]) -> Result:
    """Follow a run from its beginning to its end; judge it, unless another labctl does."""
    if found := store.read_result(lab.directory, run_id):
        for _, text in store.output(lab.directory, run_id):
            on_line(text)
        return found
    try:
        with store.recording(lab.directory, run_id):
            return follow(lab, lab.run(run_id), on_line, ends=False)
    except filelock.LockHeld:
        print_log(lab, run_id, on_line, follow=True)
        return judged(lab, run_id)


def judged(lab: ClusterLab, run_id: str) -> Result:
    """The result of a run that another labctl records. HostError where that does not write one."""
    while filelock.is_held(store.lock(lab.directory, run_id)):
        time.sleep(LOOK)
    if found := store.read_result(lab.directory, run_id):
        return found
    raise HostError(f"run {run_id} has no result yet", hint=f"labctl attach {run_id}")


def print_log(
    lab: ClusterLab,
    run_id: str,
    on_line: Callable[[str], None],
    *,
    follow: bool,
    rank: int | None = None,
    timestamps: bool = False,
) -> None:
    """What a run, or one rank of it, has printed, and with ``follow`` what it prints until it ends."""

    def show(when: float | None, text: str) -> None:
        on_line(timed(when, text) if timestamps else text)

    if store.read_result(lab.directory, run_id):
        for at, text in store.output(lab.directory, run_id, rank):
            show(at, text)
        return
    run = lab.run(run_id)
    launcher = _launcher(lab.api, run)
    if not launcher:
        raise HostError(f"run {run_id} has not begun", hint="labctl status says what its pods wait for")
    for when, text in lab.api.lines(launcher, follow=follow):
        ended = ENDED.fullmatch(text)
        if not ended or ended[1]:
            line = line_of(ended[1] if ended else text, seconds_of(when))
            if rank in (None, line.rank):
                show(line.when, store.redact(line.text if rank is None else line.said, run.lab.hidden))
        if ended:
            return


def _launcher(api: Api, run: ClusterRun) -> Manifest | None:
    """The launcher's pod, once it has started."""
    found = run_pods(api, run)
    return next((pod for pod in found if pods.has_started(pod) and node_of(pod) == LAUNCHER), None)


def stop(lab: ClusterLab, run_id: str) -> Result:
    """End a run and judge it. HostError for one that is not running."""
    if found := store.read_result(lab.directory, run_id):
        raise HostError(f"run {run_id} has ended: {found.verdict}", hint=f"labctl show {run_id}")
    run = lab.run(run_id)
    if launcher := _launcher(lab.api, run):
        told = lab.engine.exec(launcher["metadata"]["name"], ("sh", "-c", STOP, f"stopped by {owner()}"), user="").code
    if not launcher or told == NO_COMMAND:
        remove(lab.api, run.kind, run.name)
    return attach(lab, run_id, lambda _: None)


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
    try:
        there = {one["metadata"]["name"]: one for one in jobs(lab)}
        found = {run_id: _active(lab, run_id, there) for run_id in waiting}
        return {run_id: one for run_id, one in found.items() if one}
    except HostError:
        here = {path.stem for path in filelock.held_below(lab.directory / filelock.RUNS)}
        unknown = (run_id for run_id in waiting if run_id not in here)
        return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown") for run_id in unknown}


def _active(lab: ClusterLab, run_id: str, there: Mapping[str, Manifest]) -> ActiveRun | None:
    if not lab.is_here(run_id):
        return ActiveRun(id=run_id, nodes=(), state="unknown")
    job = there.get(lab.place_of(run_id).name)
    if not job:
        return None
    found = lab.api.list("Pod", f"labctl.run={render.label(run_id)}")
    launcher = next((pod for pod in found if node_of(pod) == LAUNCHER and pods.has_started(pod)), None)
    printed = [text for _, text in lab.api.lines(launcher, last=RECENT)] if launcher else []
    over = pods.state_of(job).name in ("succeeded", "failed") or any(map(ENDED.fullmatch, printed))
    steps = [step[0] for text in printed if (step := STEP.search(text))]
    return ActiveRun(
        id=run_id,
        nodes=tuple(sorted(node_of(pod) for pod in found if node_of(pod) != LAUNCHER)),
        state="ended" if over else "running",
        waits=not launcher and not over,
        step=steps[-1] if steps else "",
    )


def listing(lab: ClusterLab, limit: int | None = None) -> tuple[store.RunSummary, ...]:
    """The lab's runs, the latest first; those that have ended meanwhile are judged."""
    # Before the cluster is asked: what nobody holds now was submitted by then, or never will be.
    left = [one for one in store.unjudged(lab.directory) if not filelock.is_held(store.lock(lab.directory, one))]
    known = active(lab)
    for run_id in left:
        found = known.get(run_id)
        if found is None or found.state == "ended":
            with suppress(HostError):
                attach(lab, run_id, lambda _: None)
    return store.listing(lab.directory, limit, known)


def status(lab: ClusterLab) -> LabStatus:
    """The lab's pods, with what keeps them from running, and its latest runs."""
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
        runs=tuple(RunState(run.run_id, run.state) for run in listing(lab, 20)),
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


def plan_down(lab: ClusterLab) -> tuple[str, ...]:
    """What `down` removes and keeps, as text. HostError where the lab is another person's."""
    require_own(lab)
    return tuple(f"delete {one['kind']} {one['metadata']['name']}" for one in _owned(lab)) + tuple(_kept(lab))


def _owned(lab: ClusterLab) -> Iterator[Manifest]:
    yield from jobs(lab)
    for kind in ("ConfigMap", "Secret", "Pod"):
        yield from lab.api.list(kind, lab.selector)
    with suppress(Refused):
        yield from lab.api.list("TrainingRuntime", lab.selector)


def _claims(lab: ClusterLab) -> list[Manifest]:
    return lab.api.list("PersistentVolumeClaim", lab.selector)


def _kept(lab: ClusterLab) -> list[str]:
    """The claim, and the namespace if it was made for the lab: others may be in it by now."""
    where = f"kubectl -n {lab.api.namespace} delete pvc"
    found = [f"keep claim {one['metadata']['name']}: {where} {one['metadata']['name']}" for one in _claims(lab)]
    with suppress(Refused):
        namespace = lab.api.get("Namespace", lab.api.namespace)
        if namespace and namespace["metadata"].get("labels", {}).get("labctl.lab") == lab.name:
            found.append(f"keep namespace {lab.api.namespace}: kubectl delete namespace {lab.api.namespace}")
    return found


def down(lab: ClusterLab) -> None:
    """End the lab's runs, judge them, and remove all that it has in the cluster but claim and namespace. HostError."""
    for run_id in running(lab):
        with suppress(HostError):
            stop(lab, run_id)
    for one in [*_owned(lab)]:
        lab.api.delete(one["kind"], one["metadata"]["name"])
    deadline = time.monotonic() + GOING
    while left := lab.api.list("Pod", lab.selector):
        if time.monotonic() > deadline:
            names = ", ".join(one["metadata"]["name"] for one in left)
            raise HostError(
                f"pods are still there after {GOING:g} s: {names}", hint="re-run the command; kubectl get pods"
            )
        time.sleep(LOOK)
    for kept in _kept(lab):
        lab.context.notice(kept)
