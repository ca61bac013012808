"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl import errors
from labctl.accelerators import leases
from labctl.compose import devcontainer as vscode
from labctl.compose import render
from labctl.config import scaffold
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy import drift, executor, ledger, plan, preflight, provision
from labctl.deploy import images as prepare
from labctl.errors import ConfigError, HostError
from labctl.hub import prefetch as shared_cache
from labctl.lab import cluster
from labctl.lab import devices as overview
from labctl.lab.cluster import Cluster
from labctl.lab.spec import hidden
from labctl.lab.status import status_of
from labctl.model import Lab, Workload
from labctl.runs import artifacts, store
from labctl.runs import run as runs
from labctl.runs.request import RunOptions, build_job, choose_workload, unknown
from labctl.setup import install as host_setup
from labctl.system import filelock
from labctl.system.files import outdated, write_all
from labctl.workloads import external

if TYPE_CHECKING:
    from labctl.doctor.examination import Finding
    from labctl.doctor.fix import AppliedFix


Ask = prepare.Ask
Rows = tuple[tuple[str, str, str], ...]
# Seconds to wait for another `up` or `down` of the same lab.
PATIENCE = 300


def init(directory: Path) -> tuple[str, ...]:
    """Write .env, hosts.txt, hostfiles and workloads where they are missing."""
    return scaffold.initialise(directory)


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> bool:
    """Install and start what this host lacks; False where it lacked nothing."""
    return host_setup.setup(yes=yes, ask=ask, emit=emit)


def doctor(context: Context, *, node: str = "") -> tuple[Finding, ...]:
    """Diagnose hosts, Docker and the lab, or one node of it and its host."""
    from labctl.doctor import run as doctor_run

    return doctor_run.findings(context, node=node)


def doctor_fix(
    context: Context, ask: Ask | None, *, node: str = ""
) -> tuple[tuple[Finding, ...], tuple[AppliedFix, ...]]:
    """Apply fixes that only change labctl's own resources, asking before each unless ``ask`` is None."""
    from labctl.doctor import fix

    return fix.apply_fixes(context, lambda: doctor(context, node=node), ask)


def devices(context: Context) -> dict[str, Any]:
    """What each host has for a lab; works without an engine, and where no lab is."""
    return {"hosts": overview.devices(context)}


def config(context: Context) -> tuple[Rows, Rows]:
    """The settings in force with their origins, and what follows from them on the hosts with the reason."""
    return context.settings().rows(), overview.decided(context)


def render_files(context: Context) -> tuple[Lab, tuple[str, ...]]:
    """Write every node's files; returns the lab and the paths that changed."""
    with cluster.connect(context, context.settings()) as where:
        lab, able = cluster.preview_lab(where)
        preflight.tell_failed(context, able.failed)
    return lab, (*write_all(lab.directory, render.render(lab)), *provision.write_secrets(lab))


def devcontainer(context: Context, program: str, *, force: bool = False) -> dict[str, Any]:
    """Write what attaches VS Code to this lab; ConfigError where a person changed that file, unless forced."""
    preflight.require_initialised(context)
    found = context.settings()
    path = context.directory / vscode.PATH
    if path.exists() and not force and not vscode.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = vscode.render(found.text("LAB_NAME"), found.text("PROJECT_PATH"), program)
    changed = write_all(context.directory, (file,))
    return {"file": str(path), "folder": str(context.directory), "changed": bool(changed)}


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


def up(context: Context, *, workload: str = "", dry_run: bool = False) -> dict[str, Any]:
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
        return with_runs(context, status_of(context, where))


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


def status(context: Context) -> dict[str, Any]:
    """What Docker says of the lab, by its labels; hosts that do not answer are named in it."""
    found = context.settings()
    preflight.require_named(context, found)
    with cluster.connect(context, found, demand=False) as where:
        return with_runs(context, status_of(context, where))


def with_runs(context: Context, status: dict[str, Any]) -> dict[str, Any]:
    """The lab's status with its latest runs."""
    latest = [{"run_id": run["run_id"], "state": run["state"]} for run in store.listing(context.directory, 20)]
    return {**status, "runs": latest}


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


def run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> dict[str, Any]:
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


def run_on(context: Context, where: Cluster, task: Workload, options: RunOptions, ask: Ask | None) -> dict[str, Any]:
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
    if reason := runs.why_not_fit(lab, job, where.settings.number("LAB_MEMORY")):
        return runs.refuse(lab, job, reason, now)
    observed = engine.observe(lab.name, lab.image)
    if task.image and runs.not_up(lab, job, observed):
        prepare.offer(task, lab.image, engine.on(lab.hosts[0].name), ask)
        bring_up(context, where)
        observed = engine.observe(lab.name, lab.image)
    runs.require_hosts(lab, job, {**where.failed, **preflight.find_foreign_labs(context, lab.name, observed)})
    doctor_run.preflight(context, lab, where, "run")
    runs.require_up(lab, job, observed)
    runs.require_inputs(lab, job, engine)
    if options.launcher:
        runs.require_program(lab, job, engine)
    with filelock.held(lab.directory / filelock.RUN, f"run {job.run_id}"):
        runs.end_orphans(context, lab, engine)
        runs.require_port(lab, job, engine, where.facts)
        executor.do(steps.steps[0], lab, engine)
        return runs.launch(context, where.settings, lab, job, engine, steps, now)


def cache(context: Context, name: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Fetch ahead what a workload declares to read from the hub; no lab, engine or device is needed."""
    began = time.monotonic()
    found = context.settings()
    wanted = choose_workload(context.directory, name, RunOptions(), found).cache
    hub = shared_cache.reach(found, context.environ)
    items = shared_cache.fetch(context, hub, wanted, dry_run=dry_run)
    return {
        "workload": name,
        "cache": found.text("HOST_CACHE_PATH"),
        "items": [asdict(item) for item in items],
        "seconds": round(time.monotonic() - began, 3),
    }


def fit(
    context: Context, name: str, options: RunOptions, *, nodes: int | None, slots: int | None, device: int | None
) -> dict[str, Any]:
    """What memory a run of the workload takes, part by part, and whether it is there; ``device`` in bytes."""
    found = context.settings()
    task = choose_workload(context.directory, name, options, found)
    with cluster.connect(context, found) as where:
        lab, _ = cluster.load_lab(context, where, ask=False)
    limit = found.number("LAB_MEMORY")
    return runs.how_it_fits(lab, task, limit, nodes=nodes, slots=slots, device_memory=device)


def forget(directory: Path) -> None:
    """Remove keys, secrets and rendered files. HostError for what cannot go."""
    try:
        shutil.rmtree(directory / ".lab")
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {directory}/.lab") from error
