"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, raise_all

if TYPE_CHECKING:
    from labctl.deploy.decide import Decision
    from labctl.deploy.images import Ask
    from labctl.deploy.plan import Step
    from labctl.doctor.examination import Finding
    from labctl.doctor.fix import AppliedFix
    from labctl.lab.cluster import Cluster
    from labctl.model import Lab, Workload
    from labctl.runs.request import RunOptions

Rows = tuple[tuple[str, str, str], ...]
# Seconds to wait for another `up` or `down` of the same lab.
PATIENCE = 300


def init(directory: Path) -> tuple[str, ...]:
    """Write .env, hosts.txt, hostfiles and workloads where they are missing."""
    from labctl.config import scaffold

    return scaffold.initialise(directory)


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> bool:
    """Install and start what this host lacks; False where it lacked nothing."""
    from labctl.setup import install

    return install.setup(yes=yes, ask=ask, emit=emit)


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
    from labctl.lab import devices as overview

    return {"hosts": overview.devices(context)}


def config(context: Context) -> tuple[Rows, Rows]:
    """The settings in force with their origins, and what follows from them on the hosts with the reason."""
    from labctl.lab import devices as overview

    return context.settings().rows(), overview.decided(context)


def render_files(context: Context) -> tuple[Lab, tuple[str, ...]]:
    """Write every node's files; returns the lab and the paths that changed."""
    from labctl.compose import render
    from labctl.deploy import preflight, provision
    from labctl.lab.cluster import connect, preview_lab
    from labctl.system.files import write_all

    with connect(context, context.settings()) as cluster:
        lab, able = preview_lab(cluster)
        preflight.warn_excluded_hosts(context, able.failed)
        for path in provision.stale_secrets(lab):
            path.unlink()
        return lab, write_all(lab.directory, (*render.render(lab), *provision.secrets(lab)))


def devcontainer(context: Context, program: str, *, force: bool = False) -> dict[str, Any]:
    """Write what attaches VS Code to this lab; ConfigError where a person changed that file, unless forced."""
    from labctl.compose import devcontainer as vscode
    from labctl.deploy.preflight import require_initialised
    from labctl.system.files import write_all

    require_initialised(context)
    settings = context.settings()
    path = context.directory / vscode.PATH
    if path.exists() and not force and not vscode.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = vscode.render(settings.text("LAB_NAME"), settings.text("PROJECT_PATH"), program)
    changed = write_all(context.directory, (file,))
    return {"file": str(path), "folder": str(context.directory), "changed": bool(changed)}


def build(context: Context, *, workload: str = "", update_lock: bool = False) -> dict[str, Any]:
    """Build the image of the nodes, or that which a workload needs; or resolve its pinned versions again."""
    from labctl.deploy.images import build_image
    from labctl.lab.cluster import connect

    with connect(context, settings_for(context, workload)) as cluster:
        return build_image(context, cluster, update_lock=update_lock)


def settings_for(context: Context, workload: str) -> Settings:
    """The settings, with the image that a workload needs where one is named."""
    from labctl.deploy.images import for_workload
    from labctl.runs.request import RunOptions, choose_workload

    settings = context.settings()
    if not workload:
        return settings
    return for_workload(settings, choose_workload(context.directory, workload, RunOptions(), settings))


def up(context: Context, *, workload: str = "", dry_run: bool = False) -> dict[str, Any]:
    """Bring the lab up and return when the launcher has reached every worker; a second call changes nothing.

    With a workload, the nodes get the image that it needs. A host that fails is named once the others are done.
    """
    from labctl.deploy.preflight import require_initialised
    from labctl.lab.cluster import connect

    require_initialised(context)
    with connect(context, settings_for(context, workload)) as cluster:
        return bring_up(context, cluster, dry_run=dry_run)


def bring_up(context: Context, cluster: Cluster, *, dry_run: bool = False) -> dict[str, Any]:
    """Decide and carry out what brings the lab up; the answer is its status, or the plan."""
    from labctl.deploy import executor, preflight
    from labctl.lab.status import status_of

    with changing(context, "labctl up", dry_run=dry_run):
        decided = decide_up(context, cluster, dry_run=dry_run)
        if dry_run:
            preflight.warn_excluded_hosts(context, decided.failed)
            return answer(cluster, decided.plan)
        cluster, observed = executor.bring_up(context, decided, wait=PATIENCE)
        return with_runs(context, status_of(context, cluster, observed))


def decide_up(context: Context, cluster: Cluster, *, dry_run: bool) -> Decision:
    """What `up` would do now, and is stopped by."""
    from labctl.deploy import decide
    from labctl.doctor import run as doctor_run

    def check(lab: Lab, cluster: Cluster) -> Cluster:
        return doctor_run.preflight(context, lab, cluster, "up")

    return decide.up(context, cluster, check, dry_run=dry_run)


def changing(context: Context, command: str, *, dry_run: bool) -> AbstractContextManager[None]:
    """Be the only command that changes the lab, unless nothing is changed."""
    from labctl.system import filelock

    if dry_run:
        return nullcontext()
    return filelock.held(context.directory / filelock.LAB, command, wait=PATIENCE, notice=context.notice)


def answer(cluster: Cluster, plan: object) -> dict[str, Any]:
    """What a dry run returns."""
    return {"lab": cluster.settings.text("LAB_NAME"), "plan": str(plan).splitlines()}


def status(context: Context) -> dict[str, Any]:
    """What Docker says of the lab, by its labels; hosts that do not answer are named in it."""
    from labctl.deploy.preflight import require_named
    from labctl.lab.cluster import connect
    from labctl.lab.status import status_of

    settings = context.settings()
    require_named(context, settings)
    with connect(context, settings, demand=False) as cluster:
        return with_runs(context, status_of(context, cluster))


def with_runs(context: Context, status: dict[str, Any]) -> dict[str, Any]:
    """The lab's status with its latest runs."""
    from labctl.runs import store

    latest = [{"run_id": run["run_id"], "state": run["state"]} for run in store.listing(context.directory, 20)]
    return {**status, "runs": latest}


def down(context: Context, *, images: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Remove the lab's containers and network; works without the state directory, twice, or on a lab never made.

    With ``images``, hosts lose the lab's image too.
    """
    return remove(context, "labctl down", images=images, dry_run=dry_run)


def clean(context: Context) -> dict[str, Any]:
    """``down``, and the lab's own state goes: keys, rendered files. Runs stay."""
    return remove(context, "labctl clean", state=".lab")


def remove(
    context: Context, command: str, *, images: bool = False, state: str = "", dry_run: bool = False
) -> dict[str, Any]:
    """Decide and carry out what removes the lab, and ``state`` of its directory; the answer is the plan."""
    from labctl.deploy.preflight import require_named
    from labctl.lab.cluster import connect

    settings = context.settings()
    require_named(context, settings)
    with connect(context, settings) as cluster, changing(context, command, dry_run=dry_run):
        return take_down(context, cluster, images=images, state=state, dry_run=dry_run)


def take_down(
    context: Context, cluster: Cluster, *, images: bool = False, state: str = "", dry_run: bool = False
) -> dict[str, Any]:
    """The same on connected hosts; the caller holds the lock."""
    from labctl.deploy import decide, executor, preflight
    from labctl.runs import artifacts  # noqa: F401 - fetches what runs left on hosts
    from labctl.system import filelock

    plan, failed = decide.down(context, cluster, images_too=images, state=state)
    if filelock.is_held(context.directory / filelock.RUN):
        context.warn(f"this ends {filelock.holder(context.directory / filelock.RUN)}")
    if dry_run:
        preflight.warn_excluded_hosts(context, failed)
    else:
        raise_all(executor.carry_out(plan.steps, executor.Deployment(context=context, cluster=cluster), failed))
    return answer(cluster, plan)


def run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> dict[str, Any]:
    """Run a workload on the lab and judge it; the answer is the run's result.

    ``ask`` is asked whether the image that the workload needs may be built and the lab brought up with it.
    """
    from labctl.deploy.images import for_workload
    from labctl.lab.cluster import connect
    from labctl.runs.request import choose_workload, unknown
    from labctl.workloads import external

    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    settings = for_workload(settings, workload)
    for remark in (*external.remarks(workload, external.roots(settings)), *unknown(workload, options)):
        context.warn(remark)
    with connect(context, settings) as cluster:
        return run_on(context, cluster, workload, options, ask)


def run_on(
    context: Context, cluster: Cluster, workload: Workload, options: RunOptions, ask: Ask | None
) -> dict[str, Any]:
    """Job, what must hold before it, plan, launch."""
    from datetime import datetime

    from labctl.deploy import images, preflight
    from labctl.deploy.plan import Plan
    from labctl.doctor import run as doctor_run
    from labctl.lab.cluster import load_lab
    from labctl.runs import run as runs
    from labctl.runs.request import build_job
    from labctl.system import filelock
    from labctl.workloads import external

    now, dry_run = datetime.now().astimezone(), options.dry_run
    first: tuple[Step, ...] = ()
    lab, cluster = load_lab(context, cluster, ask=False)
    job = build_job(lab, workload, options, now)
    external.require_device(workload, lab.accelerator)
    if reason := runs.why_not_fit(lab, job, cluster.settings.number("LAB_MEMORY")):
        return runs.refuse(lab, job, reason, now, dry_run=dry_run)
    observed = runs.observe(context, cluster, lab, dry_run=dry_run)
    if workload.image and observed and runs.not_up(lab, job, observed):
        images.confirm_image(workload, lab.image, bool(observed.on(lab.hosts[0].name).image), ask, dry_run=dry_run)
        if not dry_run:
            bring_up(context, cluster)
            return run_on(context, cluster, workload, options, None)
        first = decide_up(context, cluster, dry_run=True).plan.steps
    failed = preflight.find_foreign_labs(context, lab.name, observed) if observed else {}
    runs.require_hosts(lab, job, {**cluster.failed, **failed})
    doctor_run.preflight(context, lab, cluster, "run")
    runs.require_ready(context, cluster, lab, job, observed, options)
    lock = context.directory / filelock.RUN
    with nullcontext() if dry_run else filelock.held(lock, f"run {job.run_id}"):
        plan = runs.plan_run(lab, job, cluster, observed, dry_run=dry_run)
        if dry_run:
            return answer(cluster, Plan((*first, *plan.steps)))
        return runs.carry_out(context, cluster, lab, job, plan, now)


def cache(context: Context, name: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Fetch ahead what a workload declares to read from the hub; no lab, engine or device is needed."""
    import time
    from dataclasses import asdict

    from labctl.hub import prefetch
    from labctl.runs.request import RunOptions, choose_workload

    began = time.monotonic()
    settings = context.settings()
    wanted = choose_workload(context.directory, name, RunOptions(), settings).cache
    hub = prefetch.reach(settings, context.environ)
    items = prefetch.fetch(context, hub, wanted, dry_run=dry_run)
    return {
        "workload": name,
        "cache": settings.text("HOST_CACHE_PATH"),
        "items": [asdict(item) for item in items],
        "seconds": round(time.monotonic() - began, 3),
    }


def fit(
    context: Context, name: str, options: RunOptions, *, nodes: int | None, slots: int | None, device: int | None
) -> dict[str, Any]:
    """What memory a run of the workload takes, part by part, and whether it is there; ``device`` in bytes."""
    from labctl.lab.cluster import connect, load_lab
    from labctl.runs import run as runs
    from labctl.runs.request import choose_workload

    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    with connect(context, settings) as cluster:
        lab, _ = load_lab(context, cluster, ask=False)
    limit = settings.number("LAB_MEMORY")
    return runs.how_it_fits(lab, workload, limit, nodes=nodes, slots=slots, device_memory=device)
