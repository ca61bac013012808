"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from labctl import (
    accelerators,
    clones,
    device_requests,
    execute,
    initialise,
    inventory,
    keys,
    leases,
    lock,
    plan,
    prepare,
    render,
    run_request,
    runs,
    store,
)
from labctl import cache as shared_cache
from labctl import devcontainer as vscode
from labctl import setup as host_setup
from labctl.context import Context
from labctl.doctor import Attempt, Examination, Finding, examine, require
from labctl.doctor import mend as repair
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import ConfigError, HostError, LabError
from labctl.files import outdated, write_all
from labctl.model import Lab
from labctl.observe import ROOT
from labctl.settings import Settings

Ask = prepare.Ask
Rows = tuple[tuple[str, str, str], ...]
# Seconds to wait for another `up` or `down` of the same lab.
PATIENCE = 300
# Seconds for an engine that is asked how it does: one that stores a large image is slow to answer.
ANSWERING = 20


def init(directory: Path) -> tuple[str, ...]:
    """Write .env, hostfiles and workloads where they are missing."""
    return initialise.initialise(directory)


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> bool:
    """Install and start what this host lacks; False where it lacked nothing."""
    return host_setup.setup(yes=yes, ask=ask, emit=emit)


def doctor(context: Context, *, node: str = "") -> tuple[Finding, ...]:
    """Look at this host and this lab, or at one node of it."""
    found = context.settings()
    prepare.require_named(context, found)
    engine = DockerEngine(seconds=ANSWERING)
    # What would be warned of is among the findings.
    quiet = replace(context, emit=lambda _: None)
    lacking: LabError | None = None
    try:
        lab = prepare.load_lab(quiet, found, engine if prepare.can_probe(found, engine) else None, anew=True)
    except (HostError, ConfigError) as error:
        # A mistake that has nothing to do with devices is raised anew.
        lacking = error
        lab = prepare.load_lab(quiet, prepare.without_devices(found))
    look = Examination(lab=lab, settings=found, environ=context.environ, engine=engine, only=node)
    return examine(look, lacking=lacking)


def mend(context: Context, ask: Ask | None, *, node: str = "") -> tuple[tuple[Finding, ...], tuple[Attempt, ...]]:
    """Run what mends and touches only labctl's own; ``ask`` is asked before each, where there is somebody to ask."""
    return repair(context, lambda: doctor(context, node=node), ask)


def devices(context: Context) -> dict[str, Any]:
    """What this host has for a lab; works without an engine, and where no lab is."""
    return {"hosts": [inventory.of_host(context.settings(), context.directory)]}


def config(context: Context) -> tuple[Rows, Rows]:
    """The settings in force with their origins, and what follows from them on this host with the reason."""
    found = context.settings()
    accelerator, why = inventory.choice(found)
    if accelerator is None:
        return found.rows(), (("accelerator", "none", why),)
    request = device_requests.described(found, context.directory, DockerEngine())
    return found.rows(), (("accelerator", accelerator, why), ("device request", *request))


def render_files(context: Context) -> tuple[Lab, tuple[str, ...]]:
    """Write every node's files; returns the lab and the paths that changed."""
    lab = prepare.foresee_lab(context, context.settings(), DockerEngine())
    return lab, (*write_all(lab.directory, render.render(lab)), *prepare.write_secrets(lab))


def devcontainer(context: Context, program: str, *, force: bool = False) -> dict[str, Any]:
    """Write what attaches VS Code to this lab; ConfigError where a person changed that file, unless forced."""
    prepare.require_initialised(context)
    found = context.settings()
    path = context.directory / vscode.PATH
    if path.exists() and not force and not vscode.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = vscode.render(found.text("LAB_NAME"), found.text("PROJECT_PATH"), program)
    changed = write_all(context.directory, (file,))
    return {"file": str(path), "folder": str(context.directory), "changed": bool(changed)}


def build(context: Context, *, workload: str = "", update_lock: bool = False) -> dict[str, Any]:
    """Build the image of the nodes, or that which a workload needs; or resolve its pinned versions anew."""
    found = context.settings()
    if workload:
        found = prepare.for_workload(
            found, run_request.choose_workload(context.directory, workload, run_request.RunOptions(), found)
        )
    return prepare.build_image(context, found, update_lock=update_lock)


def up(context: Context, *, workload: str = "", dry_run: bool = False) -> dict[str, Any]:
    """Bring the lab up and return when the launcher has reached every worker; a second call changes nothing.

    With a workload, the nodes get the image that it needs.
    """
    found = context.settings()
    engine = DockerEngine()
    prepare.require_initialised(context)
    if workload:
        found = prepare.for_workload(
            found, run_request.choose_workload(context.directory, workload, run_request.RunOptions(), found)
        )
    if dry_run:
        steps = plan_up(context, prepare.foresee_lab(context, found, engine), engine)
        return {"lab": found.text("LAB_NAME"), "plan": str(steps).splitlines()}
    prepare.ensure_image(context, found, engine)
    lab = prepare.load_lab(context, found, engine)
    if found.text("LAB_ACCELERATOR") == "auto":
        unserved = accelerators.unserved(ROOT)
        tell = context.warn if unserved and lab.accelerator == "cpu" else context.notice
        tell(f"accelerator {lab.accelerator} ({inventory.choice(found)[1]})")
        for remark in unserved if lab.accelerator != "cpu" else ():
            context.warn(remark)
    require(Examination(lab=lab, settings=found, environ=context.environ, engine=engine), "up")
    own = lock.held(lab.directory / lock.LAB, "labctl up", wait=PATIENCE, notice=context.notice)
    with own, leases.granting(lab, wait=PATIENCE, notice=context.notice):
        steps = plan_up(context, lab, engine)
        prepare.require_no_run(context, steps)
        prepare.prepare(lab, engine.image_id(lab.image))
        execute.carry_out(steps, lab, engine, context.emit)
    return describe(context, found, engine)


def plan_up(context: Context, lab: Lab, engine: DockerEngine) -> plan.Plan:
    """What `up` would do now."""
    observed = engine.observe(lab.name, lab.image)
    prepare.require_own(context, lab.name, observed)
    leases.require_free(lab)
    files = render.render(lab)
    return plan.up(lab, files, outdated(lab.directory, files), observed, keyless=keys.missing(lab))


def status(context: Context) -> dict[str, Any]:
    """What Docker says of the lab, by its labels."""
    found = context.settings()
    prepare.require_named(context, found)
    return describe(context, found, DockerEngine())


def describe(context: Context, found: Settings, engine: DockerEngine) -> dict[str, Any]:
    """The lab's state, nodes and latest runs in the form that scripts rely on."""
    observed = engine.observe(found.text("LAB_NAME"))
    wanted = {render.LAUNCHER, *(f"worker-{index}" for index in range(found.number("LAB_NODES")))}
    up_now = {container.node for container in observed.containers if container.state == "running"}
    there = {container.node for container in observed.containers}
    state = "down" if not there else "up" if up_now == wanted == there else "partial"
    nodes = [
        {
            "name": container.node,
            "role": container.role,
            "host": "local",
            "state": container.state,
            "health": container.health,
            "reason": container.reason,
            "slots": container.slots,
            "devices": list(container.devices),
        }
        for container in observed.containers
    ]
    latest = [{"run_id": run["run_id"], "state": run["state"]} for run in store.listing(context.directory, 20)]
    return {"lab": found.text("LAB_NAME"), "state": state, "nodes": nodes, "runs": latest}


def down(context: Context, *, dry_run: bool = False) -> dict[str, Any]:
    """Remove the lab's containers and network; works without the state directory, twice, or on a lab never made."""
    found = context.settings()
    prepare.require_named(context, found)
    if dry_run:
        steps = plan_down(context, found, DockerEngine())
        return {"lab": found.text("LAB_NAME"), "plan": str(steps).splitlines()}
    with lock.held(context.directory / lock.LAB, "labctl down", wait=PATIENCE, notice=context.notice):
        return remove(context, found)


def clean(context: Context) -> dict[str, Any]:
    """``down``, and the lab's own state goes: keys, rendered files. Runs stay."""
    found = context.settings()
    prepare.require_named(context, found)
    with lock.held(context.directory / lock.LAB, "labctl clean", wait=PATIENCE, notice=context.notice):
        answer = remove(context, found)
        prepare.forget(context.directory)
        return answer


def remove(context: Context, found: Settings) -> dict[str, Any]:
    """Carry out what `down` plans; the caller holds the lock."""
    engine = DockerEngine()
    steps = plan_down(context, found, engine)
    if lock.is_held(context.directory / lock.RUN):
        context.warn(f"this ends {lock.holder(context.directory / lock.RUN)}")
    execute.remove_all(steps, engine, context.emit)
    return {"lab": found.text("LAB_NAME"), "plan": str(steps).splitlines()}


def plan_down(context: Context, found: Settings, engine: DockerEngine) -> plan.Plan:
    """What `down` would do now."""
    name = found.text("LAB_NAME")
    observed = engine.observe(name)
    prepare.require_own(context, name, observed)
    return plan.down(observed)


def run(context: Context, name: str, options: run_request.RunOptions, ask: Ask | None = None) -> dict[str, Any]:
    """Run a workload on the lab and judge it; the answer is the run's result.

    ``ask`` is asked whether the image that the workload needs may be built and the lab brought up with it.
    """
    found = context.settings()
    task = run_request.choose_workload(context.directory, name, options, found)
    found = prepare.for_workload(found, task)
    for remark in clones.remarks(task, clones.roots(found)):
        context.warn(remark)
    engine = DockerEngine()
    lab = prepare.load_lab(context, found)
    now = datetime.now().astimezone()
    job = run_request.build_job(lab, task, options, now)
    steps = plan.run(job)
    if options.dry_run:
        return {"lab": lab.name, "plan": str(steps).splitlines()}
    clones.require_device(task, lab.accelerator)
    if reason := runs.why_not_fit(lab, job, found.number("LAB_MEMORY")):
        return runs.refuse(lab, job, reason, now)
    observed = engine.observe(lab.name, lab.image)
    if task.image and runs.not_up(lab, job, observed):
        prepare.offer(task, lab.image, engine, ask)
        up(context, workload=name)
        observed = engine.observe(lab.name, lab.image)
    prepare.require_own(context, lab.name, observed)
    require(Examination(lab=lab, settings=found, environ=context.environ, engine=engine), "run")
    runs.require_up(lab, job, observed)
    if options.launcher:
        runs.require_program(lab, job, engine)
    with lock.held(lab.directory / lock.RUN, f"run {job.run_id}"):
        runs.end_orphans(context, lab, engine)
        execute.do(steps.steps[0], lab, engine)
        return runs.launch(context, found, lab, job, engine, steps, now)


def cache(context: Context, name: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Fetch ahead what a workload declares to read from the hub; no lab, engine or device is needed."""
    began = time.monotonic()
    found = context.settings()
    wanted = run_request.choose_workload(context.directory, name, run_request.RunOptions(), found).cache
    hub = shared_cache.reach(found, context.environ)
    items = shared_cache.fetch(context, hub, wanted, dry_run=dry_run)
    return {
        "workload": name,
        "cache": found.text("HOST_CACHE_PATH"),
        "items": [asdict(item) for item in items],
        "seconds": round(time.monotonic() - began, 3),
    }


def fit(
    context: Context,
    name: str,
    options: run_request.RunOptions,
    *,
    nodes: int | None,
    slots: int | None,
    device: int | None,
) -> dict[str, Any]:
    """What memory a run of the workload takes, part by part, and whether it is there; ``device`` in bytes."""
    found = context.settings()
    task = run_request.choose_workload(context.directory, name, options, found)
    lab = prepare.load_lab(context, found)
    limit = found.number("LAB_MEMORY")
    return runs.how_it_fits(lab, task, limit, nodes=nodes, slots=slots, device_memory=device)
