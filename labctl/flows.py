"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, Interrupted, raise_all
from labctl.records.active import in_use

if TYPE_CHECKING:
    from datetime import datetime

    from labctl.backends.docker.compose.devcontainer import DevcontainerFile
    from labctl.backends.docker.compose.render import RenderedFiles
    from labctl.backends.docker.deploy.decide import Decision
    from labctl.backends.docker.deploy.images import Ask
    from labctl.backends.docker.deploy.plan import Step
    from labctl.backends.docker.lab.cluster import Cluster
    from labctl.backends.docker.lab.devices import DeviceReport, EffectiveSettings
    from labctl.backends.kubernetes.importing import ImportedJob
    from labctl.backends.kubernetes.job import ClusterJob
    from labctl.backends.kubernetes.lab import ClusterLab, Submitted
    from labctl.backends.kubernetes.render import Kustomized, Manifests
    from labctl.backends.kubernetes.target import Target
    from labctl.backends.state import ObservedState
    from labctl.backends.status import LabStatus
    from labctl.batches.baseline import BaselineReport, ValidationReport
    from labctl.batches.batch import BatchReport
    from labctl.batches.bisect import Diagnosis
    from labctl.batches.evaluate import Evaluation, Limits
    from labctl.batches.figures import JobOutcome
    from labctl.batches.hostfiles import HostfileSet, Pattern
    from labctl.batches.profile import Check
    from labctl.batches.record import Batch, BatchJob
    from labctl.batches.search import BisectReport
    from labctl.batches.validate import Suspicion
    from labctl.bundle.load import LoadedBundle
    from labctl.bundle.save import SavedBundle
    from labctl.config.scaffold import InitializedLab
    from labctl.doctor.report import DoctorReport
    from labctl.fit import FitReport
    from labctl.hub.prefetch import CacheReport
    from labctl.model import Cache, Job, Lab, Result, Workload
    from labctl.records.store import RunFilter, RunList, RunSummary
    from labctl.reports.runs import WrittenReport
    from labctl.runs.compare import Comparison, RecordedRun, RepeatedRuns
    from labctl.runs.export import ExportedRun
    from labctl.runs.freeze import FrozenLab, Verification
    from labctl.runs.prune import PrunedRuns
    from labctl.runs.request import RunOptions
    from labctl.runs.top import RunView
    from labctl.system.setup.install import SetupResult
    from labctl.workloads.external import WorkloadList

# Seconds to wait for another `up` or `down` of the same lab, and for another run that is staged.
PATIENCE = 300
STAGING = 10


def init(directory: Path) -> InitializedLab:
    """Create a lab directory: .env, hosts.txt, hostfiles and workloads, where they are missing."""
    from labctl.config import scaffold

    return scaffold.InitializedLab(str(directory), scaffold.initialise(directory))


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> SetupResult:
    """Install and start what this host needs to run a lab."""
    from labctl.system.setup import install

    return install.SetupResult(install.setup(yes=yes, ask=ask, emit=emit))


def doctor(context: Context, *, node: str = "", fix: bool = False, ask: Ask | None = None) -> DoctorReport:
    """Diagnose hosts, Docker and the lab, or one node of it and its host.

    ``fix`` applies fixes that only change labctl's own resources, asking before each unless ``ask`` is None.
    """
    from labctl.backends.docker.checks import run as doctor_run
    from labctl.backends.docker.lab.cluster import require_docker
    from labctl.doctor.report import DoctorReport

    if fix or node:
        require_docker(context.declared(), "--fix" if fix else "--node")
    if there := in_cluster(context):
        from labctl.backends.kubernetes import checks

        return DoctorReport(tuple(checks.examine(there)))
    if not fix:
        return DoctorReport(doctor_run.findings(context, node=node))
    from labctl.doctor.fix import apply_fixes

    return DoctorReport(*apply_fixes(context, lambda: doctor_run.findings(context, node=node), ask))


def in_cluster(context: Context) -> ClusterLab | None:
    """The lab where it is on Kubernetes (LAB_ENGINE), else None. HostError where the kubeconfig names no cluster."""
    from labctl.backends.docker.lab.cluster import DOCKER

    # Without their warnings: on Docker hosts the flow itself gives them.
    if context.declared().text("LAB_ENGINE") == DOCKER:
        return None
    from labctl.backends.docker.deploy.preflight import require_named
    from labctl.backends.kubernetes import lab

    settings = context.settings()
    require_named(context, settings)
    return lab.open_lab(context, settings)


def devices(context: Context) -> DeviceReport:
    """The devices of each host; needs neither an engine nor a lab."""
    from labctl.backends.docker.lab import devices

    if there := in_cluster(context):
        from labctl.backends.kubernetes import capacity

        return capacity.devices(there)
    return devices.devices(context)


def config(context: Context) -> EffectiveSettings:
    """The effective settings with their origins, and what they resolve to on the hosts."""
    from labctl.backends.docker.lab import devices

    return devices.effective_settings(context)


def render_files(context: Context) -> RenderedFiles:
    """Write the files of every node."""
    from labctl.backends.docker.compose import render
    from labctl.backends.docker.deploy import preflight, provision
    from labctl.backends.docker.lab.cluster import connect, preview_lab
    from labctl.system.files import write_all

    with connect(context, context.settings()) as cluster:
        lab, able = preview_lab(cluster)
        preflight.warn_excluded_hosts(context, able.failed)
        for path in provision.stale_secrets(lab):
            path.unlink()
        changed = tuple(write_all(lab.directory, (*render.render(lab), *provision.secrets(lab))))
        nodes = tuple(node.name for node in lab.nodes)
        return render.RenderedFiles(lab=lab.name, directory=str(lab.directory), nodes=nodes, changed=changed)


def devcontainer(context: Context, program: str, *, force: bool = False) -> DevcontainerFile:
    """Write the devcontainer.json that attaches VS Code to this lab; ConfigError if it was edited, unless forced."""
    from labctl.backends.docker.compose import devcontainer
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.docker.lab.cluster import require_docker
    from labctl.system.files import write_all

    require_initialised(context)
    settings = context.settings()
    require_docker(settings)
    path = context.directory / devcontainer.PATH
    if path.exists() and not force and not devcontainer.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = devcontainer.render(settings.text("LAB_NAME"), settings.text("PROJECT_PATH"), program)
    changed = write_all(context.directory, (file,))
    return devcontainer.DevcontainerFile(str(path), str(context.directory), bool(changed))


def build(
    context: Context, *, workload: str = "", base: str = "", update_lock: bool = False, sbom: Path | None = None
) -> dict[str, Any]:
    """Build the image of the nodes, or that which a workload needs; or resolve its pinned versions again.

    ``base``: anyone's image, to which only what a node needs is added.
    ``sbom``: a file to write the software bill of materials of the image to.
    """
    from labctl.backends.docker.deploy.images import build_from, build_image
    from labctl.backends.docker.images import sbom as bills
    from labctl.backends.docker.lab.cluster import connect

    if sbom and not sbom.parent.is_dir():
        raise ConfigError(f"{sbom.parent}: no such directory", hint=f"mkdir -p {shlex.quote(str(sbom.parent))}")
    settings = settings_for(context, workload)
    # Also while the lab is up for a workload, whose image is built by that workload's name.
    with connect(context, settings if workload else context.declared()) as cluster:
        if base:
            built = build_from(context, cluster, base)
        else:
            built = build_image(context, cluster, update_lock=update_lock, refresh=True)
        if sbom:
            built |= {"sbom": str(sbom), "packages": bills.write(built["image"], sbom)}
        return built


def settings_for(context: Context, workload: str) -> Settings:
    """The settings, with the image that a workload needs where one is named."""
    settings = context.settings()
    if not workload:
        return settings
    from labctl.backends.docker.deploy.images import for_workload
    from labctl.runs.request import RunOptions, choose_workload

    return for_workload(context, settings, choose_workload(context.directory, workload, RunOptions(), settings))


def up(context: Context, *, workload: str = "", dry_run: bool = False) -> LabStatus | PlanPreview:
    """Bring the lab up and return when the launcher has reached every worker; a second call changes nothing.

    With a workload, the nodes get the image that it needs. A host that fails is named once the others are done.
    """
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.docker.lab.cluster import connect

    require_initialised(context)
    with connect(context, settings_for(context, workload)) as cluster:
        return bring_up(context, cluster, dry_run=dry_run)


def bring_up(context: Context, cluster: Cluster, *, dry_run: bool = False) -> LabStatus | PlanPreview:
    """Decide and carry out what brings the lab up; the answer is its status, or the plan."""
    from labctl.backends.docker.deploy import preflight

    with changing(context, "labctl up", dry_run=dry_run):
        observed, cluster = preflight.observe(context, cluster)
        early = None if dry_run else cluster.begin_reach(observed)
        # The nodes are asked while these are loaded.
        from labctl.backends.docker.deploy import steps as executor
        from labctl.backends.docker.lab.status import status_of

        decided = decide_up(context, cluster, observed, dry_run=dry_run)
        if dry_run:
            preflight.warn_excluded_hosts(context, decided.failed)
            return answer(cluster, decided.plan)
        cluster, unchanged = executor.bring_up(context, decided, early, wait=PATIENCE)
        context.keep_image(cluster.settings)
        return with_runs(context, cluster, status_of(context, cluster, unchanged))


def rotate_keys(context: Context) -> LabStatus:
    """Replace the lab's ssh keys, and its containers if there are any. HostError during a run."""
    from labctl.backends.docker.compose import ssh_keys
    from labctl.backends.docker.deploy import preflight
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.backends.docker.lab.status import status_of

    preflight.require_initialised(context)
    with connect(context, context.settings()) as cluster:
        with changing(context, "labctl keys rotate", dry_run=False):
            observed, able = preflight.observe(context, cluster)
            lab, able = load_lab(context, able, ask=False)
            preflight.require_idle(context, able.engine, observed)
            for path in ssh_keys.private(lab):
                path.unlink()
        if observed.containers:
            return cast("LabStatus", bring_up(context, cluster))
        return with_runs(context, able, status_of(context, able, observed))


def decide_up(context: Context, cluster: Cluster, observed: ObservedState, *, dry_run: bool) -> Decision:
    """What `up` would do now, and is stopped by."""
    from labctl.backends.docker.checks import run as doctor_run
    from labctl.backends.docker.deploy import decide, plan

    def check(lab: Lab, cluster: Cluster) -> Cluster:
        return doctor_run.preflight(context, lab, cluster, "up")

    decided = decide.up(context, cluster, observed, check, dry_run=dry_run)
    if any(isinstance(step, plan.ApplyProject) for step in decided.plan.steps):
        doctor_run.require_compose(context, decided.lab, decided.cluster)
    return decided


def changing(context: Context, command: str, *, dry_run: bool) -> AbstractContextManager[None]:
    """Be the only command that changes the lab, unless nothing is changed."""
    from labctl.system import filelock

    if dry_run:
        return nullcontext()
    return filelock.held(context.directory / filelock.LAB, command, wait=PATIENCE, notice=context.notice)


class PlanPreview(Struct, frozen=True):
    """The steps of a plan, as text."""

    lab: str
    plan: tuple[str, ...]


def answer(cluster: Cluster, plan: object) -> PlanPreview:
    """The plan of a command, as its answer."""
    return PlanPreview(cluster.settings.text("LAB_NAME"), tuple(str(plan).splitlines()))


def status(context: Context) -> LabStatus:
    """What Docker says of the lab, by its labels; hosts that do not answer are named in it."""
    from labctl.backends.docker.deploy.preflight import require_named
    from labctl.backends.docker.lab.cluster import connect
    from labctl.backends.docker.lab.status import status_of

    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab

        return lab.status(there)
    settings = context.settings()
    require_named(context, settings)
    with connect(context, settings, demand=False) as cluster:
        return with_runs(context, cluster, status_of(context, cluster))


def with_runs(context: Context, cluster: Cluster, status: LabStatus) -> LabStatus:
    """The lab's status with its latest runs."""
    from labctl.backends.status import RunState
    from labctl.runs import follow

    listed = follow.listing(context, cluster, 20)
    return replace(status, runs=tuple(RunState(run.run_id, run.state) for run in listed))


def down(context: Context, *, images: bool = False, dry_run: bool = False, ask: Ask | None = None) -> PlanPreview:
    """Remove the lab's containers and network; works without the state directory, twice, or on a lab never made.

    With ``images``, hosts lose the lab's image too. ``ask`` is asked whether runs that are under way may be ended.
    """
    from labctl.backends.docker.lab.cluster import require_docker

    if images:
        require_docker(context.declared(), "--images")
    if there := in_cluster(context):
        return down_in_cluster(there, dry_run=dry_run, ask=ask)
    return remove(context, "labctl down", images=images, dry_run=dry_run, ask=ask)


def down_in_cluster(there: ClusterLab, *, dry_run: bool, ask: Ask | None) -> PlanPreview:
    """Remove what the lab has in the cluster, but its claim."""
    from labctl.backends.kubernetes import lab

    plan, running = lab.plan_down(there), lab.running(there)
    if running:
        there.context.warn(f"this ends {', '.join(f'run {run_id}' for run_id in running)}")
    if running and not dry_run and ask and not ask("end it?" if len(running) == 1 else "end them?"):
        raise HostError("aborted: the lab stays as it is", hint="labctl runs")
    if not dry_run:
        lab.down(there)
    return PlanPreview(there.name, plan)


def clean(context: Context) -> PlanPreview:
    """``down``, and the lab's own state goes: keys, rendered files. Runs stay."""
    return remove(context, "labctl clean", state=".lab")


def remove(
    context: Context,
    command: str,
    *,
    images: bool = False,
    state: str = "",
    dry_run: bool = False,
    ask: Ask | None = None,
) -> PlanPreview:
    """Decide and carry out what removes the lab, and ``state`` of its directory; the answer is the plan."""
    from labctl.backends.docker.deploy.preflight import require_named
    from labctl.backends.docker.lab.cluster import connect

    settings = context.settings()
    require_named(context, settings)
    with connect(context, settings, drained=True) as cluster, changing(context, command, dry_run=dry_run):
        return take_down(context, cluster, images=images, state=state, dry_run=dry_run, ask=ask)


def take_down(
    context: Context,
    cluster: Cluster,
    *,
    images: bool = False,
    state: str = "",
    dry_run: bool = False,
    ask: Ask | None = None,
) -> PlanPreview:
    """The same on connected hosts; the caller holds the lock."""
    from labctl.backends.docker.deploy import decide, preflight
    from labctl.backends.docker.deploy import steps as executor
    from labctl.runs import follow

    plan, failed, runs = decide.down(context, cluster, images_too=images, state=state)
    if runs:
        context.warn(f"this ends {'; '.join(runs)}")
    if runs and not dry_run and ask and not ask("end it?" if len(runs) == 1 else "end them?"):
        raise HostError("aborted: the lab stays as it is", hint="labctl runs")
    if dry_run:
        preflight.warn_excluded_hosts(context, failed)
    else:
        if runs:
            follow.end_all(context, cluster)
        raise_all(executor.carry_out(plan.steps, executor.Deployment(context=context, cluster=cluster), failed))
        context.forget_image()
    return answer(cluster, plan)


def run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> Result | RunSummary | PlanPreview:
    """Run a workload, or with no name the options' script, on the lab and judge it; the answer is the run's result.

    A run that is detached is only launched. With ``options.resume`` it is that of an earlier run, and goes on from its
    last whole checkpoint. A run that loses a node or a device is started again, up to ``options.retries`` times.
    ``ask`` is asked whether the image that the workload needs may be built and the lab brought up with it.
    """
    from labctl.model import Result
    from labctl.runs.request import resumed
    from labctl.runs.run import LOST

    if there := in_cluster(context):
        return run_in_cluster(there, name, options)
    if options.detach and options.retries:
        raise ConfigError(
            "a run is started again by the labctl that follows it", hint="leave out --detach or --retries"
        )
    if options.resume:
        name, options = resumed(context.directory, name, options)
    result = run_once(context, name, options, ask)
    while isinstance(result, Result) and result.cause in LOST and len(options.retried) < options.retries:
        try:
            options = retry(context, name, options, result)
        except HostError as error:
            context.warn(f"run {result.run_id} is not started again, because the lab does not come up: {error.message}")
            break
        result = run_once(context, name, options, ask)
    return result


def repeat(
    context: Context, name: str, options: RunOptions, count: int, ask: Ask | None = None
) -> RepeatedRuns | PlanPreview:
    """Run it so many times, one after the other; the answer is the runs and how their metrics spread.

    A run that somebody stops is the last. A dry run is the plan of one.
    """
    from labctl.model import Result
    from labctl.runs.compare import RepeatedRuns, spreads

    if options.detach or options.resume:
        raise ConfigError(
            "--repeat runs one after the other, each from its beginning", hint="leave out --detach and --resume"
        )
    results: list[Result] = []
    while len(results) < count:
        if not options.dry_run:
            context.notice(f"repeat {len(results) + 1} of {count}")
        result = run(context, name, options, ask)
        if not isinstance(result, Result):
            return cast("PlanPreview", result)
        results.append(result)
        if result.cause == "interrupted":
            break
    return RepeatedRuns(runs=tuple(results), spread=spreads(results))


def run_in_cluster(there: ClusterLab, name: str, options: RunOptions) -> Result | RunSummary | PlanPreview:
    """Submit a workload as a job, follow it and judge it."""
    from labctl.backends.kubernetes import checks, lab, render
    from labctl.records import store
    from labctl.runs.request import choose_workload, unknown

    workload = choose_workload(there.directory, name, options, there.settings)
    for remark in unknown(workload, options):
        there.context.warn(remark)
    target, built = lab.begin(there, workload, options)
    checks.preflight(there, target, built)
    if options.dry_run:
        return PlanPreview(there.name, tuple(f"apply {one}" for one in render.rendered(target, built).objects))
    with store.recording(there.directory, built.run_id):
        lab.record(there, target, built)
        run = lab.launch(there, target, built)
        if not options.detach:
            return lab.follow(there, run, there.context.line, ends=True)
    return store.summary(there.directory, built.run_id, lab.active(there))


def retry(context: Context, name: str, options: RunOptions, ended: Result) -> RunOptions:
    """Bring the lab up again after a run that lost a node or a device; the options to start it again with.

    HostError where the lab does not come up, unless the workload is elastic and nodes are left.
    """
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.runs import run as runs
    from labctl.runs.request import choose_workload

    workload = choose_workload(context.directory, name, options, context.settings())
    context.notice(f"run {ended.run_id} has ended: {ended.cause}: {ended.message}; the lab is brought up again")
    with connect(context, settings_for(context, name)) as cluster:
        try:
            bring_up(context, cluster)
        except HostError as error:
            if not workload.elastic:
                raise
            options = runs.without_lost(context, cluster, options, ended, error)
        lab, able = load_lab(context, cluster, ask=False)
        gather(context, able, lab, ended.run_id)
    return runs.again(context, lab, workload, options, ended)


def gather(context: Context, cluster: Cluster, lab: Lab, run_id: str) -> None:
    """Bring here all that an earlier run has written; it is judged if nobody has. ConfigError if it is running."""
    from labctl.runs import follow
    from labctl.runs import run as runs

    known = follow.known_runs(cluster)
    follow.settle(context, cluster, lab, run_id, known)
    with running(context, lab.directory, run_id):
        runs.gather(context, cluster, lab, run_id, known)


def run_once(context: Context, name: str, options: RunOptions, ask: Ask | None) -> Result | RunSummary | PlanPreview:
    """Run it and judge it, whatever comes of it."""
    from labctl.backends.docker.deploy.images import for_workload
    from labctl.backends.docker.deploy.images import remark as image_remark
    from labctl.backends.docker.deploy.preflight import require_named
    from labctl.backends.docker.lab.cluster import connect
    from labctl.runs.request import choose_workload, unknown
    from labctl.workloads import external

    settings = context.settings()
    if not name:
        require_named(context, settings)
    workload = choose_workload(context.directory, name, options, settings)
    settings = for_workload(context, settings, workload)
    for remark in (*external.remarks(workload, external.roots(settings)), *unknown(workload, options)):
        context.warn(remark)
    if remark := image_remark(settings, workload):
        context.warn(remark)
    with connect(context, settings) as cluster:
        return run_on(context, cluster, workload, options, ask)


def run_on(
    context: Context,
    cluster: Cluster,
    workload: Workload,
    options: RunOptions,
    ask: Ask | None,
    replayed: Callable[[datetime], Job] | None = None,
) -> Result | RunSummary | PlanPreview:
    """Job, what must hold before it, plan, launch. ``replayed`` makes the job of a run once more."""
    from datetime import datetime

    from labctl.backends.docker import agent
    from labctl.backends.docker.checks import run as doctor_run
    from labctl.backends.docker.deploy import images, preflight
    from labctl.backends.docker.deploy.plan import Plan
    from labctl.backends.docker.lab.cluster import load_lab
    from labctl.runs import provenance
    from labctl.runs import run as runs
    from labctl.runs.request import build_job, renamed
    from labctl.system import filelock
    from labctl.workloads import external

    now, dry_run = datetime.now().astimezone(), options.dry_run
    first: tuple[Step, ...] = ()
    lab, cluster = load_lab(context, cluster, ask=False)
    if options.resume and not options.retried and not dry_run:
        gather(context, cluster, lab, options.resume)
    job = replayed(now) if replayed else build_job(lab, workload, options, now, context.warn)
    if text := renamed(lab, options):
        context.notice(f"{options.hostfile}: {text}")
    external.require_device(workload, lab.accelerator, external.roots(cluster.settings))
    if reason := runs.why_not_fit(lab, job, cluster.settings.number("LAB_MEMORY")):
        return runs.refuse(lab, job, reason, now, dry_run=dry_run)
    if filelock.is_held(context.directory / filelock.LAB):
        with changing(context, "labctl run", dry_run=dry_run):
            pass  # What is observed next is not in the middle of a change.
    observed = runs.observe(context, cluster, dry_run=dry_run)
    origin = provenance.begin(lab, job, cluster, observed) if observed and not dry_run else None
    foreign = preflight.find_foreign_labs(context, lab.name, observed) if observed else {}
    nodes = tuple(node.name for node in job.nodes)
    early = agent.begin_reach(cluster.engine, observed, nodes) if observed and not foreign and not dry_run else None
    if active := runs.under_way(lab, cluster.engine, observed, dry_run=dry_run) if observed else ():
        if replayed:
            raise in_use(active)
        lab = runs.with_own_port(lab, active)
        job = build_job(lab, workload, options, now)
    if workload.has_own_image and observed and runs.not_up(lab, job.containers, observed):
        images.confirm_image(workload, lab.image, bool(observed.on(lab.hosts[0].name).image), ask, dry_run=dry_run)
        if not dry_run:
            bring_up(context, cluster)
            return run_on(context, cluster, workload, options, None, replayed)
        able = cluster.excluding({**dict(observed.silent), **foreign})
        first = decide_up(context, able, observed, dry_run=True).plan.steps
    runs.require_hosts(lab, job, {**cluster.failed, **foreign})
    doctor_run.preflight(context, lab, cluster, "run")
    runs.require_ready(context, cluster, lab, job, observed, options)
    runs.require_free(job, active, options)
    with nullcontext() if dry_run else running(context, lab.directory, job.run_id):
        plan = runs.plan_run(lab, job, cluster, observed, options, origin, dry_run=dry_run)
        if dry_run:
            return answer(cluster, Plan((*first, *plan.steps)))
        return runs.carry_out(context, cluster, lab, job, plan, now, early)


def replay(context: Context, run: str, *, dry_run: bool = False) -> Result | PlanPreview:
    """Run again what a run was, from its record: the same command, files, code, image and nodes.

    HostError that names what of it cannot be had.
    """
    from labctl.backends.docker.deploy.images import for_workload
    from labctl.backends.docker.lab.cluster import connect, load_lab, require_docker
    from labctl.records import store
    from labctl.runs import replay as replays
    from labctl.runs import run as runs
    from labctl.runs.request import RunOptions

    lab_name(context)
    require_docker(context.declared(), "replay")
    recorded = replays.read(context.directory, store.find(context.directory, run))
    workload = recorded.job.workload
    with connect(context, for_workload(context, context.settings(), workload)) as cluster:
        lab, able = load_lab(context, cluster, ask=False)
        runs.require_hosts(lab, recorded.job, able.failed)
        replays.require_same(context, able, lab, able.engine.observe(lab.name, able.image), recorded)
        answer = run_on(context, cluster, workload, RunOptions(dry_run=dry_run), None, partial(replays.job, recorded))
        return cast("Result | PlanPreview", answer)


def freeze(context: Context, file: Path) -> FrozenLab:
    """Write what the lab is now: images, packages, files, data, devices. HostError where a host does not say."""
    from labctl.runs import freeze as freezing

    document = frozen(context)
    changed = freezing.write(file, document)
    return freezing.FrozenLab(lock=str(file), changed=changed, facts=freezing.count(document))


def verify(context: Context, file: Path) -> Verification:
    """Compare what the lab is now with what a file says it was. ConfigError where that is no such file."""
    from labctl.runs import freeze as freezing

    before = freezing.read(file)
    return freezing.verify(str(file), before, frozen(context))


def frozen(context: Context) -> dict[str, Any]:
    """What the lab is now, as `freeze` writes it."""
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.runs import freeze as freezing

    lab_name(context)
    with connect(context, context.settings()) as connected:
        lab, cluster = load_lab(context, connected, ask=False)
        raise_all(cluster.failed)
        return freezing.of(context, cluster, lab)


@contextmanager
def running(context: Context, lab: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run, which is not taken while another command changes the lab. HostError if one does."""
    from labctl.records import store
    from labctl.system import filelock

    with ExitStack() as held:
        with filelock.held(context.directory / filelock.LAB, store.purpose(run_id), wait=STAGING):
            held.enter_context(store.recording(lab, run_id))
        yield


def runs(context: Context, wanted: RunFilter | None = None) -> RunList:
    """The lab's runs, or those that are wanted, the latest first. A run that has ended meanwhile is judged."""
    from labctl.records.store import RunList

    every = all_runs(context)
    workloads = sorted({run.workload or "" for run in every} - {""})
    if wanted and wanted.workload and workloads and wanted.workload not in workloads:
        context.notice(f"no run of {wanted.workload}; there are runs of {', '.join(workloads)}")
    return RunList(tuple(run for run in every if wanted is None or wanted.has(run)))


def all_runs(context: Context) -> tuple[RunSummary, ...]:
    from labctl.backends.docker.lab.cluster import connect
    from labctl.records import store
    from labctl.runs import follow

    lab_name(context)
    if not store.unjudged(context.directory):
        return store.listing(context.directory)
    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab

        return lab.listing(there)
    with connect(context, context.settings(), demand=False) as cluster:
        return follow.listing(context, cluster)


def prune_runs(context: Context, keep: int, *, dry_run: bool = False) -> PrunedRuns:
    """Remove the records of the oldest runs that have ended, all but so many."""
    from labctl.runs import prune

    lab_name(context)
    chosen = prune.choose(context.directory, keep)
    for run_id in () if dry_run else chosen.removed:
        prune.remove(context.directory, run_id)
        context.notice(f"removed run {run_id}")
    return chosen


def show(context: Context, run: str) -> Result | RunSummary:
    """The result of a run (its id, or ``latest``), or its summary without one. A run that has ended is judged first."""
    from labctl.backends.docker.lab.cluster import connect
    from labctl.model import Result
    from labctl.records import store
    from labctl.runs import follow

    lab_name(context)
    found = store.read(context.directory, run)
    if isinstance(found, Result):
        return found
    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab

        (found,) = (one for one in lab.listing(there) if one.run_id == found.run_id)
        return store.read_result(context.directory, found.run_id) or found
    with connect(context, context.settings(), demand=False) as cluster:
        (found,) = (one for one in follow.listing(context, cluster) if one.run_id == found.run_id)
    return store.read_result(context.directory, found.run_id) or found


def compare(context: Context, runs: Iterable[str]) -> Comparison:
    """What differed between runs that have ended, and what it did. ConfigError for fewer than two."""
    from labctl.runs import compare as comparing

    recorded = read_records(context, runs)
    if len(recorded) < 2:
        raise ConfigError("name two runs or more to compare", hint="labctl runs")
    return comparing.compare(recorded)


def report(context: Context, named: Sequence[str], out: Path | None = None) -> WrittenReport:
    """Write the page and the pictures of runs that have ended, or of one metrics.csv that a training script wrote."""
    from labctl.reports import runs as reports

    if len(named) == 1 and named[0].endswith(".csv"):
        if not (file := Path(named[0])).is_file():
            raise ConfigError(f"{file}: no such file", hint="labctl report RUN, or its id")
        made, name = reports.of_csv(file), file.stem
    else:
        runs = read_records(context, named)
        made, name = reports.of_runs(context.directory, runs), runs[0].result.run_id
        name += f"-and-{len(runs) - 1}-more" if len(runs) > 1 else ""
    return reports.write((out or context.directory / "reports" / name).absolute(), made)


def export(context: Context, run: str, *, tensorboard: Path | None = None, junit: Path | None = None) -> ExportedRun:
    """Write a run's series as TensorBoard's event file below a directory, and its verdict as JUnit XML."""
    from labctl.runs import export as exports
    from labctl.runs import series
    from labctl.system import files

    if not (tensorboard or junit):
        raise ConfigError("neither --tensorboard nor --junit is given", hint="labctl export latest --junit run.xml")
    (found,) = ended(context, (run,))
    written = []
    if tensorboard:
        written.append(exports.tensorboard(tensorboard, found, series.read(context.directory, found.run_id)))
    if junit:
        files.write(junit.absolute(), exports.junit(found), mode=0o644)
        written.append(junit)
    return exports.ExportedRun(run_id=found.run_id, files=tuple(str(path.absolute()) for path in written))


def read_records(context: Context, runs: Iterable[str]) -> list[RecordedRun]:
    """The records of runs, each once. HostError for one that has no result."""
    from labctl.runs import compare as comparing

    return [comparing.read(context.directory, result) for result in ended(context, runs)]


def ended(context: Context, runs: Iterable[str]) -> list[Result]:
    """The results of runs, each once. HostError for one that has none."""
    from labctl.model import Result
    from labctl.records import store

    lab_name(context)
    found = [show(context, run_id) for run_id in dict.fromkeys(store.find(context.directory, run) for run in runs)]
    for one in found:
        if not isinstance(one, Result):
            raise HostError(f"run {one.run_id} has no result: it is {one.state}", hint=f"labctl attach {one.run_id}")
    return [one for one in found if isinstance(one, Result)]


def attach(context: Context, run: str) -> Result:
    """Print what a run has printed, and what it prints until it ends; judge it then, unless another does."""
    from labctl.records import store
    from labctl.runs import follow

    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab as cluster_lab

        return cluster_lab.attach(there, store.find(context.directory, run), context.line)
    with attached(context, run) as (cluster, lab, run_id):
        return follow.attach(context, cluster, lab, run_id)


def top(context: Context, run: str = "", show: Callable[[RunView], bool] | None = None) -> RunView:
    """A run that is under way, without a name the latest: how far it is, and what its nodes do.

    ``show`` is given one view after the other, about each second, until the run ends or it says that it is enough.
    """
    from labctl.backends.docker.lab.cluster import connect, load_lab, require_docker
    from labctl.runs import top as runs_top

    lab_name(context)
    require_docker(context.declared(), "labctl top")
    with connect(context, context.settings()) as connected:
        lab, cluster = load_lab(context, connected, ask=False)
        observer = runs_top.Observer(lab, cluster.engine, runs_top.under_way(cluster, run))
        return observer.watch(show) if show else observer.look()


def stop(context: Context, run: str, grace: float) -> Result:
    """End a run, with so many seconds between TERM and KILL, and judge it."""
    from labctl.records import store
    from labctl.runs import follow

    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab as cluster_lab

        return cluster_lab.stop(there, store.find(context.directory, run))
    with attached(context, run) as (cluster, lab, run_id):
        return follow.stop(context, cluster, lab, run_id, grace)


def run_logs(
    context: Context,
    run: str,
    on_line: Callable[[str], None],
    *,
    follow: bool,
    rank: int | None = None,
    timestamps: bool = False,
) -> None:
    """Pass on what a run, or one rank of it, has printed, and with ``follow`` what it prints until it ends."""
    from labctl.records import store
    from labctl.runs.follow import logs

    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab as cluster_lab

        run_id = store.find(context.directory, run)
        cluster_lab.print_log(there, run_id, on_line, follow=follow, rank=rank, timestamps=timestamps)
        return
    with attached(context, run) as (cluster, lab, run_id):
        logs(cluster, lab, run_id, on_line, follow=follow, rank=rank, timestamps=timestamps)


@contextmanager
def attached(context: Context, run: str) -> Iterator[tuple[Cluster, Lab, str]]:
    """The connected hosts of the lab, and the id of one of its runs. ConfigError for one that there is not."""
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.records import store

    lab_name(context)
    run_id = store.read(context.directory, run).run_id
    with connect(context, context.settings()) as connected:
        lab, cluster = load_lab(context, connected, ask=False)
        yield cluster, lab, run_id


def hostfiles(
    context: Context, file: Path, *, size: int, pattern: Pattern, slots: int, out: Path | None, seed: int
) -> HostfileSet:
    """Write a set of hostfiles, each for ``size`` of the machines that a file lists.

    ``slots`` are those of each machine; 0 for what the file or the lab says, and 8 where neither does.
    """
    from labctl.batches import hostfiles as sets
    from labctl.config import inventory

    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file", hint="write a machine per line: its name, its IP address or worker-N"
        )
    listed, drained = inventory.in_use(context.directory, inventory.read(file))
    names = tuple(host.name for host in listed)
    groups = sets.groups(names, size, pattern, seed)
    given = {host.name: slots or host.slots for host in listed}
    if not all(given.values()):
        given = {name: given[name] or known for name, known in slots_in_lab(context, names).items()}
    directory = out or context.directory / sets.default_directory(len(names), size, pattern)
    files = sets.texts(groups, given)
    sets.write(directory, files)
    used = {name for group in groups for name in group}
    return sets.HostfileSet(
        directory=str(directory),
        pattern=pattern,
        size=size,
        hostfiles=tuple(files),
        left_over=tuple(name for name in names if name not in used),
        drained=tuple(name for name, _ in drained),
    )


def slots_in_lab(context: Context, names: tuple[str, ...]) -> dict[str, int]:
    """The slots of the lab's nodes by the names that a list of machines gives them; as Lambda's 8 outside a lab."""
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.batches import hostfiles as sets
    from labctl.config.context import is_lab
    from labctl.runs import job

    if not is_lab(context.directory):
        return dict.fromkeys(names, sets.SLOTS)
    with connect(context, context.settings()) as cluster:
        lab, _ = load_lab(context, cluster, ask=False)
    return {name: job.nodes_of(lab, (name,), "the list")[0].slots for name in names}


def batch(
    context: Context,
    name: str,
    directories: tuple[Path, ...],
    options: RunOptions,
    show: Callable[[Batch], None],
    *,
    out: Path | None = None,
    parallel: int = 0,
    repeat: int = 1,
    resume: bool = False,
) -> BatchReport:
    """Run a workload on the nodes of each hostfile of these directories, those on disjoint nodes at once.

    The record and the jobs' logs are written to ``out``. ``show`` gets the batch with each change of a job.
    """
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.batches import batch as batches
    from labctl.config import inventory
    from labctl.runs import run as runs
    from labctl.runs.request import bounded, choose_workload
    from labctl.system import filelock

    settings = settings_for(context, name)
    workload = bounded(context.directory, choose_workload(context.directory, name, options, settings))
    directory = out or context.directory / batches.default_directory(directories, name)
    with connect(context, settings) as connected:
        lab, cluster = load_lab(context, connected, ask=False)
        plan = batches.plan(lab, workload, directories, options, repeat=repeat)
        if text := batches.renamed(plan):
            context.notice(f"the hostfiles' machines: {text}")
        if drained := inventory.drained(context.directory).keys() & {node for job in plan.jobs for node in job.nodes}:
            context.warn(f"{', '.join(sorted(drained))} is used, though drained.txt lists it")
        runs.require_launcher(context, cluster, lab, workload)
        with filelock.held(directory / ".lock", f"labctl batch {name}"):
            plan = batches.begin(directory, plan, lab, resume=resume)
            done = run_batch(context, cluster, lab, workload, options, directory, plan, show, parallel=parallel)
        return batches.report(directory, done)


def run_batch(
    context: Context,
    cluster: Cluster,
    lab: Lab,
    workload: Workload,
    options: RunOptions,
    directory: Path,
    plan: Batch,
    show: Callable[[Batch], None],
    *,
    parallel: int = 0,
) -> Batch:
    """Run the jobs of a batch that are not done, each as a detached run that is followed."""
    import threading

    from labctl.backends.docker.events import Losses
    from labctl.batches import batch as batches
    from labctl.runs import follow

    launching, stopped = threading.Semaphore(batches.LAUNCHED), threading.Event()
    # A host that was lost and is there again is listened to by the next run alone.
    losses = Losses(cluster.engine, lab.name) if len(lab.hosts) == 1 else None

    def run_job(job: BatchJob, note: Callable[[BatchJob], None]) -> Result:
        own = replace(options, hostfile=Path(job.hostfile), detach=True, wait=True, batch=f"{plan.id} {job.log}")

        def launch(quiet: Context) -> Result | RunSummary:
            with launching:
                if stopped.is_set():
                    raise Interrupted("the batch was stopped before")
                return cast("Result | RunSummary", run_on(quiet, cluster, workload, own, None))

        return batches.run_job(context, cluster, lab, directory, losses, launch, job, note)

    def stop(run_ids: list[str]) -> None:
        stopped.set()
        context.notice(f"ending {len(run_ids)} run{'s' * (len(run_ids) != 1)}")
        follow.stop_all(cluster, lab, run_ids, f"{lab.owner} stopped the batch")

    return batches.carry_out(directory, plan, run_job, stop, show, parallel=parallel)


def bisect(
    context: Context,
    name: str,
    options: RunOptions,
    show: Callable[[Batch], None],
    *,
    nodes: tuple[str, ...] = (),
    within: float = 0.1,
    minimum: float | None = None,
    out: Path | None = None,
    drain: bool = False,
) -> BisectReport:
    """Find the bad nodes and links by runs of a workload on groups of these nodes (default: all), round after round.

    A run is bad that fails, or whose metric per node is below ``minimum``, or more than ``within`` below the median.
    With ``drain`` bad nodes are added to the lab's list of machines to leave out.
    """
    from datetime import datetime

    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.batches import batch as batches
    from labctl.batches import search
    from labctl.config import inventory
    from labctl.runs import job
    from labctl.runs import run as runs
    from labctl.runs.request import choose_workload

    now = datetime.now()
    settings = settings_for(context, name)
    workload = choose_workload(context.directory, name, options, settings)
    directory = out or context.directory / f"output/bisect_{name.replace('/', '-')}_{now:%Y%m%d-%H%M%S}"
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty", hint="another directory: --out DIR")
    with connect(context, settings) as connected:
        lab, cluster = load_lab(context, connected, ask=False)
        left_out = {} if nodes else inventory.drained(context.directory)
        asked = job.nodes_of(lab, nodes, "--nodes") or lab.nodes
        chosen = tuple(dict.fromkeys(node.name for node in asked if node.name not in left_out))
        for node in (node.name for node in asked if node.name in left_out):
            context.notice(f"{node} is left out: {inventory.DRAINED} lists it")
        runs.require_launcher(context, cluster, lab, workload)

        def run(folder: Path) -> Batch:
            context.notice(folder.name)
            plan = batches.plan(lab, workload, (folder,), options)
            plan = batches.begin(folder, plan, lab, resume=False)
            return run_batch(context, cluster, lab, workload, options, folder, plan, show)

        found = search.search(lab, chosen, directory, run, within=within, minimum=minimum)
    metric = batches.metric_of(workload)
    return search.BisectReport(
        directory=str(directory),
        workload=workload.name,
        metric=metric.name if metric else "",
        unit=metric.unit if metric else "",
        diagnosis=found,
        drained=search.drain(lab, found, now.date()) if drain and found.bad else (),
    )


def workloads(context: Context) -> WorkloadList:
    """The workloads of the lab, and the errors of those that cannot be read."""
    from labctl import launchers
    from labctl.workloads import external

    roots = external.roots(context.settings())
    return external.list_all(context.directory / "workloads", launchers.known(), roots)


def cache(context: Context, name: str, extra: Cache, *, hosts: bool = False, dry_run: bool = False) -> CacheReport:
    """Download models and datasets, those of a workload if one is named, and ``extra`` ones, into the shared cache.

    ``hosts``: then send them to the lab's hosts, or all of the cache where nothing is named.
    Needs no lab that is up, no engine or device.
    """
    import time

    from labctl.backends.docker.lab.cluster import require_docker
    from labctl.hub import prefetch
    from labctl.model import Cache
    from labctl.runs.request import RunOptions, choose_workload

    began = time.monotonic()
    settings = context.settings()
    wanted = extra
    if name:
        own = choose_workload(context.directory, name, RunOptions(), settings).cache
        wanted = Cache(models=(*own.models, *extra.models), datasets=(*own.datasets, *extra.datasets))
    if hosts:
        require_docker(settings, "--hosts")
    if there := in_cluster(context):
        from labctl.backends.kubernetes import storage

        repositories, endpoint = prefetch.names(wanted), prefetch.endpoint_of(context.environ)
        items = storage.fill(there, repositories, endpoint, dry_run=dry_run) if repositories else ()
        where, seconds = f"claim {there.name}-storage", round(time.monotonic() - began, 3)
        return prefetch.CacheReport(workload=name, cache=where, items=items, seconds=seconds)
    if hosts and not settings.text("LAB_HOSTS"):
        raise ConfigError("--hosts: LAB_HOSTS is not set", hint="LAB_HOSTS=hosts.txt in .env names the file of hosts")
    hub = prefetch.connect(settings, context.environ)
    items = prefetch.fetch(context, hub, wanted, dry_run=dry_run)
    # A workload that declares nothing has nothing to send either.
    send = hosts and (items or not name)
    filled, failed = prefetch.fill_hosts(context, hub, wanted, dry_run=dry_run) if send else ((), ())
    return prefetch.CacheReport(
        workload=name,
        cache=settings.text("HOST_CACHE_PATH"),
        items=items,
        seconds=round(time.monotonic() - began, 3),
        hosts=filled,
        failed=failed,
    )


def proxies(context: Context) -> dict[str, str]:
    """The proxy variables that the settings give to programs."""
    from labctl.backends import spec

    return {key: value.reveal() for key, value in spec.proxies(context.settings())}


def k8s_render(context: Context, name: str, options: RunOptions) -> Manifests:
    """The workload as a job for Kubernetes, with all that it needs there. ConfigError; nothing is sent."""
    from labctl.backends.kubernetes import render

    made = render.rendered(*k8s_job(context, name, options))
    if f"Secret/{made.name}" in made.objects:
        context.warn("its Secret is in clear text: keep it out of git, or use `labctl k8s export`, which leaves it out")
    return made


def k8s_export(context: Context, name: str, options: RunOptions, directory: Path) -> Kustomized:
    """Write the workload as a job for Kubernetes into a directory for kustomize, without its Secret."""
    from labctl.backends.kubernetes import render
    from labctl.system import files

    made, left_out = render.kustomization(render.manifests(*k8s_job(context, name, options)))
    for one in made:
        files.write(directory / one.path, one.content, mode=one.mode)
    return render.Kustomized(directory=str(directory), files=tuple(one.path for one in made), left_out=left_out)


def k8s_submit(context: Context, name: str, options: RunOptions) -> Submitted:
    """Create a workload's job, which nobody follows or records. ConfigError where it is there, HostError if refused."""
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.kubernetes import checks, lab, render
    from labctl.backends.kubernetes.run import submit
    from labctl.runs.request import choose_workload

    require_initialised(context)
    there = lab.open_lab(context, context.settings())
    workload = choose_workload(context.directory, name, options, there.settings)
    target, built = lab.job_of(there, workload, options)
    checks.preflight(there, target, built)
    submit(there.api, target, built)
    made = render.rendered(target, built)
    return lab.Submitted(name=made.name, namespace=made.namespace, objects=made.objects)


def k8s_delete(context: Context, name: str, *, storage: bool) -> Submitted:
    """Delete the job that `k8s submit` made of a workload, and with ``storage`` the lab's claim with all data on it."""
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.kubernetes import lab

    require_initialised(context)
    return lab.delete(lab.open_lab(context, context.settings()), name, storage=storage)


def k8s_job(context: Context, name: str, options: RunOptions) -> tuple[Target, ClusterJob]:
    """Where the workload is to run in a cluster, and its job there. ConfigError."""
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.kubernetes import job, target
    from labctl.runs.request import choose_workload

    require_initialised(context)
    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    where = target.read(settings, settings.text("LAB_ACCELERATOR"))
    return where, job.build(settings, context.directory, where, workload, options)


def k8s_import(context: Context, file: Path) -> ImportedJob:
    """Read an MPIJob into a workload of the lab, and settings. ConfigError where a workload of its name is there."""
    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.kubernetes import importing
    from labctl.system import files

    require_initialised(context)
    found = importing.read(file)
    folder = context.directory / "workloads" / found.name
    if folder.exists():
        raise ConfigError(f"{folder} is there", hint="remove it, or rename the MPIJob")
    for one in found.files:
        files.write(context.directory / one.path, one.content, mode=one.mode)
    return found


def fit(
    context: Context, name: str, options: RunOptions, *, nodes: int | None, slots: int | None, device: int | None
) -> FitReport:
    """Estimate the memory of a run of the workload, and whether it fits; ``device`` in bytes."""
    from labctl.backends.docker.lab.cluster import connect, load_lab
    from labctl.runs import run as run_parts
    from labctl.runs.request import choose_workload

    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    with connect(context, settings) as cluster:
        lab, _ = load_lab(context, cluster, ask=False)
    limit = settings.number("LAB_MEMORY")
    return run_parts.how_it_fits(lab, workload, limit, nodes=nodes, slots=slots, device_memory=device)


def evaluate(
    directories: Iterable[Path],
    limits: Limits,
    *,
    pattern: str = "",
    csv: Path | None = None,
    lambda_csv: Path | None = None,
    junit: Path | None = None,
) -> Evaluation:
    """Judge the logs or the batch in each directory, all together, and write what came of it into files."""
    from labctl.batches import evaluate, export, logs
    from labctl.system.files import writing

    named = tuple(dict.fromkeys(directories))
    evaluation = evaluate.judge([run for directory in named for run in logs.read(directory, pattern)], limits)
    texts: dict[Path | None, Callable[[], str]] = {
        csv: lambda: export.results_csv(evaluation),
        junit: lambda: export.junit(evaluation),
        lambda_csv: lambda: export.lambda_csv([log for one in named for log in logs.paths(one)], limits),
    }
    for path, text in texts.items():
        if path:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text(), encoding="utf-8", newline="")
    return evaluation


def validate(
    context: Context, name: str = "", *, keep: bool = False, out: Path | None = None, compare: bool = True
) -> ValidationReport:
    """Validate the cluster of the lab from nothing to a report and back to nothing, by a profile's name or file.

    Without a name it is that of the operator's TEST_CONFIGURATION, else ``quick``. Figures are compared with
    the lab's baseline, if there is one, and if they are to be (``compare``).
    """
    from datetime import datetime

    from labctl.backends.docker.deploy.preflight import require_initialised
    from labctl.backends.docker.lab.cluster import require_docker
    from labctl.batches import baseline, on_hosts
    from labctl.batches import profile as profiles
    from labctl.batches import validate as validation
    from labctl.runs.request import choose_workload

    require_initialised(context)
    context = on_hosts.with_hosts(context)
    settings, operator, drained = context.settings(), on_hosts.operator(context), on_hosts.drained(context)
    require_docker(settings)
    profile = profiles.read(profiles.find(name or profiles.configured(operator.test_configuration, context.warn)))
    for check in profile.checks:
        workload = choose_workload(context.directory, check.workload, check.options, settings)
        profiles.require_metrics(check, workload.metrics)
    known = baseline.read(context.directory / baseline.FILE) if compare else None
    if known and known.profile != profile.name:
        context.notice(f"{baseline.FILE} is one of profile {known.profile}: not compared with")
        known = None
    usual = context.directory / "reports" / f"{datetime.now():%Y%m%d-%H%M%S}-{profile.name}"
    directory = baseline.new_directory(out or usual, numbered=not out).absolute()
    actions = validation.Actions(
        doctor=lambda: doctor(context),
        on_hosts=lambda script, words, seconds: on_hosts.run(context, script, words, seconds),
        up=lambda: cast("LabStatus", up(context)),
        status=lambda: status(context),
        run=lambda check, groups, record, slots: run_check(
            context, check, groups, slots, directory / "checks" / record
        ),
        bisect=lambda check, nodes, why, within: find_bad(
            context, check, nodes, why, within, directory / "checks" / f"{check.name}-bisect"
        ),
        down=lambda: down(context),
        remains=lambda: on_hosts.remains(context),
        versions=lambda: on_hosts.versions(context),
    )
    done = validation.validate(
        settings.text("LAB_NAME"),
        profile,
        actions,
        context.notice,
        operator=operator,
        baseline=known,
        drained=drained,
        keep=keep,
    )
    return baseline.write(directory, done)


def run_check(
    context: Context, check: Check, groups: tuple[tuple[str, ...], ...], slots: Mapping[str, int], directory: Path
) -> list[JobOutcome]:
    """Run the workload of a check on groups of nodes with these slots, as a batch whose record is in the directory."""
    from labctl.batches import figures
    from labctl.batches import hostfiles as sets
    from labctl.records import store

    hostfiles = directory / "hostfiles"
    sets.write(hostfiles, sets.texts(groups, slots))
    done = batch(context, check.workload, (hostfiles,), check.options, lambda _: None, out=directory)
    results = ((job, store.read_result(context.directory, job.run_id)) for job in done.batch.jobs)
    return [
        figures.JobOutcome(
            nodes=job.nodes,
            passed=job.verdict == "PASS",
            message=job.message,
            run_id=job.run_id,
            metrics=result.metrics if result else {},
        )
        for job, result in results
    ]


def find_bad(
    context: Context, check: Check, nodes: tuple[str, ...], why: Suspicion, within: float, out: Path
) -> Diagnosis:
    """Find the bad nodes and links that explain why a check failed, or missed a bound.

    ConfigError for a metric that no search compares runs by.
    """
    from labctl.batches import batch as batches
    from labctl.batches import search
    from labctl.runs.request import choose_workload

    minimum = None
    metric = batches.metric_of(choose_workload(context.directory, check.workload, check.options, context.settings()))
    if why.bound is None:
        within = search.RUNS_ALONE
    elif search.is_searched_by(metric, why.metric, why.bound.sign):
        minimum = search.least(why.metric, why.bound.value, 2 if check.nodes == "pairs" else len(nodes))
    else:
        known = metric.name if metric else "none"
        raise ConfigError(
            f"runs are compared by `{known}`, not by `{why.metric}`", hint=f"labctl bisect {check.workload}"
        )
    found = bisect(
        context,
        check.workload,
        check.options,
        lambda _: None,
        nodes=nodes,
        within=within,
        minimum=minimum,
        out=out,
    )
    return found.diagnosis


def baseline(context: Context, name: str = "", *, keep: bool = False, file: Path | None = None) -> BaselineReport:
    """Validate, and record the figures in a file, by default the lab's baseline.json; not if the validation failed."""
    from labctl.batches import baseline as baselines

    file = file or context.directory / baselines.FILE
    before = baselines.read(file)
    return baselines.record(file, validate(context, name, keep=keep, compare=False), before)


def shell(context: Context, node: str, *, terminal: bool) -> int:
    """Open a shell in a node, in the current directory if it is mounted there; returns its exit code."""
    from labctl.backends.docker.attach import session, target

    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab

        if not terminal:
            raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")
        return lab.execute(there, (node,), ("bash",), stdin="terminal")
    with target.entered(context, lab_name(context), node) as inside:
        if not terminal:
            raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")
        resume = () if inside.directory else ("LABCTL_RESUME=1",)
        return session.run(inside, ("bash",), stdin="terminal", environment=resume)


def execute(context: Context, command: tuple[str, ...], node: str, *, everywhere: bool, terminal: bool) -> int:
    """Run a command in a node, or from the launcher on several (``a,b``) or all workers; returns its exit code."""
    import shlex

    from labctl.backends.docker.attach import session, target
    from labctl.model import LAUNCHER

    if everywhere and node != LAUNCHER:
        raise ConfigError("use either --all or -n", hint=f"labctl exec --all -- {shlex.join(command)}")
    several = everywhere or "," in node
    if there := in_cluster(context):
        from labctl.backends.kubernetes import lab

        nodes = lab.workers(there) if everywhere else tuple(node.split(","))
        return lab.execute(there, nodes, command, stdin="terminal" if terminal else "pipe")
    with target.entered(context, lab_name(context), LAUNCHER if several else node) as inside:
        if several:
            return session.run_on_nodes(inside, () if everywhere else tuple(node.split(",")), command)
        code = session.run(inside, command, stdin="terminal" if terminal else "pipe")
        if code in session.NOT_RUN and session.lacks(inside, command[0]):
            add = "LAB_APT adds packages of the image's distribution, LAB_PACKAGES Python's: in .env, then `labctl up`"
            hint = target.meant(context, *command) or add
            raise session.CommandNotFound(f"{node}: command not found: `{command[0]}`", hint=hint, node=node)
        return code


def jupyter(context: Context, node: str, port: int | None, emit_url: Callable[[str], None]) -> None:
    """Serve notebooks from a node on 127.0.0.1 until interrupted."""
    from labctl.backends.docker.attach import jupyter, target

    name = lab_name(context)
    if context.settings().text("LAB_HOSTS"):
        hint = f"labctl exec -n {node} -- jupyter lab, and `ssh -L` to its port"
        raise ConfigError("labctl jupyter serves from nodes on this machine, and LAB_HOSTS lists others", hint=hint)
    with target.entered(context, name, node) as inside:
        jupyter.serve(context, inside, node, port, emit_url)


def logs(context: Context, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
    """Pass on the logs of a node, or of all containers."""
    from labctl import naming
    from labctl.backends.docker.attach import target

    name = lab_name(context)
    if there := in_cluster(context):
        there.engine.logs(name, on_line, node=node or "", follow=follow)
        return
    with target.reached(context, name, node) as engine:
        engine.logs(naming.project_name(name), on_line, node=node or "", follow=follow, color=colors)


def lab_name(context: Context) -> str:
    """The name of the lab in the context's directory. ConfigError if it is not a lab directory."""
    from labctl.backends.docker.deploy.preflight import require_named

    settings = context.settings()
    require_named(context, settings)
    return settings.text("LAB_NAME")


def save_bundle(context: Context, file: Path, *, workloads: Iterable[str], cache: bool, secrets: bool) -> SavedBundle:
    """Write the lab with its images into one file."""
    from labctl.bundle import save

    return save.save_bundle(context, file, workloads=workloads, cache=cache, secrets=secrets)


def load_bundle(context: Context, file: Path, *, force: bool, ask: Callable[[str], bool] | None) -> LoadedBundle:
    """Unpack a bundle into the context's directory, and load its images; ``ask`` about files that may be run here."""
    from labctl.bundle import load

    return load.load_bundle(context, file, force=force, ask=ask)
