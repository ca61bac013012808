"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl import errors
from labctl.accelerators import leases
from labctl.compose import render
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy import drift, executor, ledger, plan, preflight, provision
from labctl.deploy import images as prepare
from labctl.errors import ConfigError, HostError
from labctl.lab import cluster
from labctl.lab.cluster import Cluster
from labctl.lab.spec import hidden
from labctl.model import LAUNCHER, Lab, Result, Workload
from labctl.runs import artifacts
from labctl.runs import run as run_parts
from labctl.runs.request import RunOptions, build_job, choose_workload, unknown
from labctl.system import filelock
from labctl.system.files import outdated, write_all
from labctl.workloads import external

if TYPE_CHECKING:
    from labctl.bundle import LoadedBundle
    from labctl.bundle.save import SavedBundle
    from labctl.compose.devcontainer import DevcontainerFile
    from labctl.compose.render import RenderedFiles
    from labctl.config.scaffold import InitializedLab
    from labctl.doctor.examination import DoctorReport
    from labctl.fit import FitReport
    from labctl.hub.prefetch import CacheReport
    from labctl.lab.devices import DeviceReport, EffectiveSettings
    from labctl.lab.status import LabStatus
    from labctl.runs.store import RunList, RunSummary
    from labctl.setup.install import SetupResult
    from labctl.workloads.external import WorkloadList

Ask = prepare.Ask
# Seconds to wait for another `up` or `down` of the same lab.
PATIENCE = 300


def init(directory: Path) -> InitializedLab:
    """Create a lab directory: .env, hosts.txt, hostfiles and workloads, where they are missing."""
    from labctl.config import scaffold

    return scaffold.InitializedLab(str(directory), scaffold.initialise(directory))


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> SetupResult:
    """Install and start what this host needs to run a lab."""
    from labctl.setup import install

    return install.SetupResult(install.setup(yes=yes, ask=ask, emit=emit))


def doctor(context: Context, *, node: str = "", fix: bool = False, ask: Ask | None = None) -> DoctorReport:
    """Diagnose hosts, Docker and the lab, or one node of it and its host.

    ``fix`` applies fixes that only change labctl's own resources, asking before each unless ``ask`` is None.
    """
    from labctl.doctor import run as doctor_run
    from labctl.doctor.examination import DoctorReport

    if not fix:
        return DoctorReport(doctor_run.findings(context, node=node))
    from labctl.doctor.fix import apply_fixes

    return DoctorReport(*apply_fixes(context, lambda: doctor_run.findings(context, node=node), ask))


def devices(context: Context) -> DeviceReport:
    """The devices of each host; needs neither an engine nor a lab."""
    from labctl.lab import devices

    return devices.devices(context)


def config(context: Context) -> EffectiveSettings:
    """The effective settings with their origins, and what they resolve to on the hosts."""
    from labctl.lab import devices

    return devices.effective_settings(context)


def render_files(context: Context) -> RenderedFiles:
    """Write the files of every node."""
    with cluster.connect(context, context.settings()) as connected:
        lab, able = cluster.preview_lab(connected)
        preflight.tell_failed(context, able.failed)
    changed = (*write_all(lab.directory, render.render(lab)), *provision.write_secrets(lab))
    nodes = tuple(node.name for node in lab.nodes)
    return render.RenderedFiles(lab=lab.name, directory=str(lab.directory), nodes=nodes, changed=changed)


def devcontainer(context: Context, program: str, *, force: bool = False) -> DevcontainerFile:
    """Write the devcontainer.json that attaches VS Code to this lab; ConfigError if it was edited, unless forced."""
    from labctl.compose import devcontainer

    preflight.require_initialised(context)
    settings = context.settings()
    path = context.directory / devcontainer.PATH
    if path.exists() and not force and not devcontainer.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = devcontainer.render(settings.text("LAB_NAME"), settings.text("PROJECT_PATH"), program)
    changed = write_all(context.directory, (file,))
    return devcontainer.DevcontainerFile(str(path), str(context.directory), bool(changed))


def build(context: Context, *, workload: str = "", update_lock: bool = False) -> dict[str, Any]:
    """Build the image of the nodes, or that which a workload needs; or resolve its pinned versions anew."""
    with cluster.connect(context, settings_for(context, workload)) as where:
        return prepare.build_image(context, where, update_lock=update_lock)


def settings_for(context: Context, workload: str) -> Settings:
    """The settings, with the image that a workload needs where one is named."""
    found = context.settings()
    if not workload:
        return found
    return prepare.for_workload(found, choose_workload(context.directory, workload, RunOptions(), found))


def up(context: Context, *, workload: str = "", dry_run: bool = False) -> LabStatus | dict[str, Any]:
    """Bring the lab up and return when the launcher has reached every worker; a second call changes nothing.

    With a workload, the nodes get the image that it needs. A host that fails is named once the others are done.
    """
    preflight.require_initialised(context)
    with cluster.connect(context, settings_for(context, workload)) as where:
        if dry_run:
            steps, failed = foresee_up(context, where)
            preflight.tell_failed(context, failed)
            return {"lab": where.settings.text("LAB_NAME"), "plan": str(steps).splitlines()}
        bring_up(context, where)
        return full_status(context, where)


def bring_up(context: Context, where: Cluster) -> None:
    """Hosts that can take part, image, lab, plan, containers."""
    from labctl.doctor import run as doctor_run

    ledger.tell_left_over(context, where)
    where = preflight.exclude_foreign_hosts(context, where)
    if where.remote_hosts:
        where = doctor_run.preflight(context, *cluster.preview_lab(where), "up")
    image_id, lacking = prepare.ensure_images(context, where)
    where = where.excluding(lacking)
    lab, where = cluster.load_lab(context, where)
    preflight.tell_accelerator(context, where, lab)
    preflight.require_room(context, where, lab)
    if not where.remote_hosts:
        doctor_run.preflight(context, lab, where, "up")
    own = filelock.held(lab.directory / filelock.LAB, "labctl up", wait=PATIENCE, notice=context.notice)
    with own, leases.granting(lab, wait=PATIENCE, notice=context.notice):
        steps, failed = plan_up(context, lab, where)
        preflight.require_no_run(context, steps)
        provision.prepare(lab, image_id)
        executor.carry_out(steps, lab, where.engine, context.emit, failed)


def plan_up(context: Context, lab: Lab, where: Cluster) -> tuple[plan.Plan, errors.Failures]:
    """What `up` would do now, and what is wrong with hosts that cannot take part."""
    observed = where.engine.observe(lab.name, lab.image)
    failed = {**where.failed, **dict(observed.silent), **preflight.find_foreign_labs(context, lab.name, observed)}
    leases.require_free(lab)
    files = render.render(lab)
    changed = outdated(lab.directory, files)
    lacks, unasked = drift.find(lab, where.connections, changed, failed)
    failed |= unasked
    return plan.up(lab, files, changed, observed, unsent=lacks.hosts, unusable=lacks.containers, failed=failed), failed


def foresee_up(context: Context, where: Cluster) -> tuple[plan.Plan, errors.Failures]:
    """As ``plan_up`` of the lab that `up` would make now, with the image that it would bring first."""
    lab, where = cluster.preview_lab(where)
    steps, failed = plan_up(context, lab, where)
    return plan.Plan((*prepare.foresee_images(context, where.excluding(failed)), *steps.steps)), failed


def status(context: Context) -> LabStatus:
    """The lab's containers and their health, by their labels; hosts that do not answer are listed."""
    settings = context.settings()
    preflight.require_named(context, settings)
    with cluster.connect(context, settings, demand=False) as connected:
        return full_status(context, connected)


def full_status(context: Context, connected: Cluster) -> LabStatus:
    """The lab's status with its latest runs."""
    from labctl.lab.status import RunState, status_of
    from labctl.runs import store

    runs = tuple(RunState(run.run_id, run.state) for run in store.listing(context.directory, 20))
    return replace(status_of(context, connected), runs=runs)


def down(context: Context, *, images: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Remove the lab's containers and network; works without the state directory, twice, or on a lab never made.

    With ``images``, hosts lose the lab's image too.
    """
    found = context.settings()
    preflight.require_named(context, found)
    with cluster.connect(context, found) as where:
        if dry_run:
            steps, failed = plan_down(context, where, images)
            preflight.tell_failed(context, failed)
            return {"lab": found.text("LAB_NAME"), "plan": str(steps).splitlines()}
        with filelock.held(context.directory / filelock.LAB, "labctl down", wait=PATIENCE, notice=context.notice):
            return remove(context, where, images)


def clean(context: Context) -> dict[str, Any]:
    """``down``, and the lab's own state goes: keys, rendered files. Runs stay."""
    found = context.settings()
    preflight.require_named(context, found)
    with (
        cluster.connect(context, found) as where,
        filelock.held(context.directory / filelock.LAB, "labctl clean", wait=PATIENCE, notice=context.notice),
    ):
        answer = remove(context, where)
        forget(context.directory)
        return answer


def remove(context: Context, where: Cluster, images: bool = False) -> dict[str, Any]:
    """Carry out what `down` plans; the caller holds the lock."""
    steps, failed = plan_down(context, where, images)
    if filelock.is_held(context.directory / filelock.RUN):
        context.warn(f"this ends {filelock.holder(context.directory / filelock.RUN)}")
    ledger.tell_left_over(context, where)
    secret = hidden(where.settings)
    bring = partial(artifacts.fetch_left, lab=context.directory, hidden=secret, notice=context.notice)
    failed = executor.remove_all(steps, where.engine, context.emit, bring, failed)
    done = [machine for host, machine in ledger.machines(where).items() if host not in failed]
    ledger.forget(context.directory, done)
    errors.raise_all(failed)
    return {"lab": where.settings.text("LAB_NAME"), "plan": str(steps).splitlines()}


def plan_down(context: Context, where: Cluster, images: bool) -> tuple[plan.Plan, errors.Failures]:
    """What `down` would do now, and what is wrong with hosts that cannot take part."""
    name, image = where.settings.text("LAB_NAME"), prepare.image_of_hosts(where) if images else ""
    observed = where.engine.observe(name, image)
    failed = {**where.failed, **dict(observed.silent), **preflight.find_foreign_labs(context, name, observed)}
    return plan.down(observed, ledger.sent(context, where), image, failed), failed


def run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> Result | dict[str, Any]:
    """Run a workload on the lab and judge it; the answer is the run's result.

    ``ask`` is asked whether the image that the workload needs may be built and the lab brought up with it.
    """
    found = context.settings()
    task = choose_workload(context.directory, name, options, found)
    found = prepare.for_workload(found, task)
    for remark in (*external.remarks(task, external.roots(found)), *unknown(task, options)):
        context.warn(remark)
    with cluster.connect(context, found) as where:
        return run_on(context, where, task, options, ask)


def run_on(
    context: Context, where: Cluster, task: Workload, options: RunOptions, ask: Ask | None
) -> Result | dict[str, Any]:
    """Job, what must hold before it, launch."""
    from labctl.doctor import run as doctor_run

    lab, where = cluster.load_lab(context, where, ask=False)
    engine = where.engine
    now = datetime.now().astimezone()
    job = build_job(lab, task, options, now)
    steps = plan.run(job)
    if options.dry_run:
        return {"lab": lab.name, "plan": str(steps).splitlines()}
    external.require_device(task, lab.accelerator)
    if reason := run_parts.why_not_fit(lab, job, where.settings.number("LAB_MEMORY")):
        return run_parts.refuse(lab, job, reason, now)
    observed = engine.observe(lab.name, lab.image)
    if task.image and run_parts.not_up(lab, job, observed):
        prepare.offer(task, lab.image, engine.on(lab.hosts[0].name), ask)
        bring_up(context, where)
        observed = engine.observe(lab.name, lab.image)
    run_parts.require_hosts(lab, job, {**where.failed, **preflight.find_foreign_labs(context, lab.name, observed)})
    doctor_run.preflight(context, lab, where, "run")
    run_parts.require_up(lab, job, observed)
    run_parts.require_inputs(lab, job, engine)
    if options.launcher:
        run_parts.require_program(lab, job, engine)
    with filelock.held(lab.directory / filelock.RUN, f"run {job.run_id}"):
        run_parts.end_orphans(context, lab, engine)
        run_parts.require_port(lab, job, engine, where.facts)
        executor.do(steps.steps[0], lab, engine)
        return run_parts.launch(context, where.settings, lab, job, engine, steps, now)


def runs(context: Context) -> RunList:
    """The lab's runs, the latest first."""
    from labctl.runs import store

    return store.RunList(store.listing(context.directory))


def show(context: Context, run: str) -> Result | RunSummary:
    """The result of a run (its id, or ``latest``), or its summary without one."""
    from labctl.runs import store

    return store.read(context.directory, run)


def workloads(context: Context) -> WorkloadList:
    """The workloads of the lab, and the errors of those that cannot be read."""
    from labctl import launchers
    from labctl.workloads import external

    roots = external.roots(context.settings())
    found, errors = external.list_all(context.directory / "workloads", launchers.known(), roots)
    listed = (
        external.WorkloadInfo(name=one.name, launcher=one.launcher, description=one.description, source=one.declared)
        for one in found
    )
    return external.WorkloadList(tuple(listed), errors)


def cache(context: Context, name: str, *, dry_run: bool = False) -> CacheReport:
    """Download the models and datasets of a workload into the shared cache; needs no lab, engine or device."""
    from labctl.hub import prefetch
    from labctl.runs.request import RunOptions, choose_workload

    began = time.monotonic()
    settings = context.settings()
    wanted = choose_workload(context.directory, name, RunOptions(), settings).cache
    items = prefetch.fetch(context, prefetch.connect(settings, context.environ), wanted, dry_run=dry_run)
    seconds = round(time.monotonic() - began, 3)
    return prefetch.CacheReport(workload=name, cache=settings.text("HOST_CACHE_PATH"), items=items, seconds=seconds)


def proxies(context: Context) -> dict[str, str]:
    """The proxy variables that the settings give to programs."""
    from labctl.lab import spec

    return {key: value.reveal() for key, value in spec.proxies(context.settings())}


def fit(
    context: Context, name: str, options: RunOptions, *, nodes: int | None, slots: int | None, device: int | None
) -> FitReport:
    """Estimate the memory of a run of the workload, and whether it fits; ``device`` in bytes."""
    from labctl.runs import run as run_parts
    from labctl.runs.request import choose_workload

    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    with cluster.connect(context, settings) as connected:
        lab, _ = cluster.load_lab(context, connected, ask=False)
    limit = settings.number("LAB_MEMORY")
    return run_parts.how_it_fits(lab, workload, limit, nodes=nodes, slots=slots, device_memory=device)


def shell(context: Context, node: str, *, terminal: bool) -> int:
    """Open a shell in a node, in the current directory if it is mounted there; returns its exit code."""
    from labctl.attach import session, target

    with target.entered(context, lab_name(context), node) as inside:
        if not terminal:
            raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")
        resume = () if inside.directory else ("LABCTL_RESUME=1",)
        return session.run(inside, ("bash",), terminal=True, environment=resume)


def execute(context: Context, command: tuple[str, ...], node: str, *, everywhere: bool, terminal: bool) -> int:
    """Run a command in a node, or from the launcher on several (``a,b``) or all workers; returns its exit code."""
    from labctl.attach import session, target

    if everywhere and node != LAUNCHER:
        raise ConfigError("use either --all or -n", hint=f"labctl exec --all -- {shlex.join(command)}")
    several = everywhere or "," in node
    with target.entered(context, lab_name(context), LAUNCHER if several else node) as inside:
        if several:
            return session.run_on_nodes(inside, () if everywhere else tuple(node.split(",")), command)
        code = session.run(inside, command, terminal=terminal)
        if code in session.NOT_RUN and session.lacks(inside, command[0]):
            hint = target.meant(context, *command)
            raise session.CommandNotFound(f"{node}: command not found: `{command[0]}`", hint=hint, node=node)
        return code


def jupyter(context: Context, node: str, port: int | None, emit_url: Callable[[str], None]) -> None:
    """Serve notebooks from a node on 127.0.0.1 until interrupted."""
    from labctl.attach import jupyter, target

    name = lab_name(context)
    if context.settings().text("LAB_HOSTS"):
        hint = f"labctl exec -n {node} -- jupyter lab, and `ssh -L` to its port"
        raise ConfigError("labctl jupyter serves from nodes on this machine, and LAB_HOSTS lists others", hint=hint)
    with target.entered(context, name, node) as inside:
        jupyter.serve(context, inside, node, port, emit_url)


def logs(context: Context, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
    """Pass on the logs of a node, or of all containers."""
    from labctl.attach import target

    target.logs(context, lab_name(context), node, on_line, follow=follow, colors=colors)


def lab_name(context: Context) -> str:
    """The name of the lab in the context's directory. ConfigError if it is not a lab directory."""
    settings = context.settings()
    preflight.require_named(context, settings)
    return settings.text("LAB_NAME")


def save_bundle(context: Context, file: Path, *, workloads: Iterable[str], cache: bool, secrets: bool) -> SavedBundle:
    """Write the lab with its images into one file."""
    from labctl import bundle

    return bundle.save_bundle(context, file, workloads=workloads, cache=cache, secrets=secrets)


def load_bundle(context: Context, file: Path, *, force: bool) -> LoadedBundle:
    """Unpack a bundle into the context's directory, and load its images."""
    from labctl import bundle

    return bundle.load_bundle(context, file, force=force)


def forget(directory: Path) -> None:
    """Remove keys, secrets and rendered files. HostError for what cannot go."""
    try:
        shutil.rmtree(directory / ".lab")
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {directory}/.lab") from error
