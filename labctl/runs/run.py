"""The parts of ``labctl run``: what must hold before it, its steps, and the verdict."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl import accelerators, fit, model, naming
from labctl.backends.docker import agent
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import artifacts, images, plan, preflight
from labctl.backends.docker.deploy import steps as executor
from labctl.backends.docker.deploy.steps import LabDeployment, do
from labctl.backends.docker.engine import Backend, connection_to
from labctl.backends.docker.hosts import facts as survey
from labctl.backends.docker.images import catalog
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState, lost
from labctl.config.context import Context
from labctl.config.settings import sounds_secret
from labctl.errors import ConfigError, HostError, raise_all
from labctl.fit import training_script
from labctl.model import HERE, Job, Lab, Metric, Result, Verdict, Workload
from labctl.records import metrics, store
from labctl.records.active import ActiveRun, in_use
from labctl.records.manifest import Manifest
from labctl.runs import checkpoints, evidence, inputs, request
from labctl.runs.request import RunOptions
from labctl.runs.supervise import launch_of, supervise
from labctl.runs.verdict import RunOutcome, error, judge
from labctl.system import procfs, routing
from labctl.workloads import deepspeed_config, external


def why_not_fit(lab: Lab, job: Job, limit: int) -> str | None:
    """Why the workload cannot fit in the memory that the nodes share on this CPU host; None when it may.

    ``limit`` is that of a node in bytes, 0 for none.
    """
    if job.workload.memory is None or job.workload.deepspeed is None or lab.accelerator != "cpu":
        return None
    slots = max(node.slots for node in job.nodes)
    try:
        training = fit.of(job.workload, lab.accelerator, slots, len(job.nodes))
    except ConfigError:
        # A model whose memory is not known may run all the same.
        return None
    reason = fit.check(training, fit.Capacity(device=None, host=node_memory(lab, len(job.nodes), limit)))
    return f"{job.workload.name} {reason}; --rehearse runs the same path shrunk" if reason else None


def how_it_fits(
    lab: Lab, workload: Workload, limit: int, *, nodes: int | None, slots: int | None, device_memory: int | None
) -> fit.FitReport:
    """Estimate the workload's memory on the lab, or on so many nodes and slots; sizes in bytes.

    ``device_memory`` is that of one device. The memory of other machines than this one is unknown.
    """
    count = nodes or len(lab.nodes)
    accelerator = "device" if device_memory and lab.accelerator == "cpu" else lab.accelerator
    if script := external.script_of(workload):
        workload = training_script.described(workload, script)
    workload = deepspeed_config.resolve_bf16(workload, accelerator, lab.hosts)
    training = fit.of(workload, accelerator, slots or max(node.slots for node in lab.nodes), count)
    elsewhere = accelerator != "cpu" and bool(nodes or slots)
    capacity = fit.Capacity(device=device_memory, host=None if elsewhere else node_memory(lab, count, limit))
    return fit.report(workload.name, count, training, capacity)


def node_memory(lab: Lab, nodes: int, limit: int) -> int:
    """Bytes for each of so many nodes; ``limit`` is that of a node, 0 for none.

    Those of one host share what it has: here what is free now, elsewhere what is built in.
    """
    here = lab.hosts[0].name == HERE
    has = procfs.memory_available() if here else min(one.memory for one in lab.hosts)
    share = has // nodes if lab.network == "bridge" else has
    return min(share, limit or share)


def not_up(lab: Lab, containers: tuple[str, ...], observed: ObservedState) -> list[tuple[str, str]]:
    """Those of these containers that are not as the settings and the image now say, with the reason."""
    # Of a large lab no more is rendered than is looked at: a batch does so for each of its jobs.
    names = render.extra_hosts(lab)
    owners = {lab.nodes[0].name if name == model.LAUNCHER else name for name in containers}
    files = tuple(render.render_node(lab, node, names) for node in lab.nodes if node.name in owners)
    places = {name: lab.host_of(name).name for name in containers}
    return [
        one
        for host in dict.fromkeys(places.values())
        for one in plan.not_current(
            lab, files, observed.on(host), tuple(name for name in places if places[name] == host)
        )
    ]


def observe(context: Context, cluster: Cluster, *, dry_run: bool) -> ObservedState | None:
    """What the daemons hold of the lab; None if they do not answer, which is only a warning to a dry run."""
    try:
        return cluster.engine.observe(cluster.settings.text("LAB_NAME"), cluster.image)
    except HostError as error:
        if not dry_run:
            raise
        context.warn(error.message)
        return None


def require_hosts(lab: Lab, job: Job, failed: Mapping[str, HostError]) -> None:
    """HostError of the first host of the run that has failed."""
    for name in job.containers:
        if error := failed.get(lab.host_of(name).name):
            raise error


def require_ready(
    context: Context, cluster: Cluster, lab: Lab, job: Job, observed: ObservedState | None, options: RunOptions
) -> None:
    """HostError or ConfigError for what stops the run; to a dry run, a lab that is not up yet is only a warning."""
    if observed is None:
        return
    lacking = not_up(lab, job.containers, observed)
    if options.dry_run and lacking:
        if not observed.on(lab.hosts[0].name).image:
            images.require_buildable(cluster)
        context.warn(f"lab {lab.name} {_state(lacking)}, so its launcher was not asked for programs and inputs")
        return
    require_up(lab, job, observed, lacking, context.flags)
    require_inputs(lab, job, cluster.engine)
    if options.launcher:
        require_program(lab, job, cluster.engine)


def _state(lacking: list[tuple[str, str]]) -> str:
    """What keeps a lab from being used, by the first of what ``not_up`` names."""
    return "is out of date" if lacking[0][1].endswith(" changed") else "is not up"


def require_up(
    lab: Lab, job: Job, observed: ObservedState, lacking: list[tuple[str, str]], flags: Mapping[str, str]
) -> None:
    """HostError unless the launcher and every node of the run are there, as the settings with ``flags`` have them."""
    require_current(lab, lacking, flags)
    for node in job.nodes:
        container = observed.container(node.name)
        if container and lost(container.reason):
            raise HostError(f"{node.name} is unhealthy: {container.reason}", hint="labctl up", node=node.name)


def require_current(lab: Lab, lacking: list[tuple[str, str]], flags: Mapping[str, str]) -> None:
    """HostError of the first container that is not up as the settings with ``flags`` have it."""
    if lacking:
        name, why = lacking[0]
        wanted = f" (wanted: {lab.image})" if why == "image changed" else ""
        message = f"lab {lab.name} {_state(lacking)}: {name}: {why}{wanted}"
        # Without these overrides `up` would leave the lab as it is.
        overrides = (f"-s {key}={'...' if sounds_secret(key) else shlex.quote(value)}" for key, value in flags.items())
        raise HostError(message, hint=" ".join(("labctl up", *overrides)), node=name)


def require_launcher(context: Context, cluster: Cluster, lab: Lab, workload: Workload) -> None:
    """HostError unless the launcher is there, as the settings and the workload have it: else no run could begin."""
    observed = cluster.engine.observe(lab.name, cluster.image)
    lacking = not_up(lab, (model.LAUNCHER,), observed)
    if lacking and workload.has_own_image:
        images.confirm_image(workload, lab.image, bool(observed.on(lab.hosts[0].name).image), None)
    require_current(lab, lacking, context.flags)


def require_program(lab: Lab, job: Job, engine: Backend) -> None:
    """HostError if the launcher program that a person asked for is not in the lab's image."""
    if job.workload.launcher == "script":
        return
    program = job.argv[0]
    found = engine.exec(naming.container_name(lab, model.LAUNCHER), ("which", program), user=agent.user(lab))
    if found.code:
        hint = f"set LAB_IMAGE in .env to one that has {program}, then `labctl up`"
        if program == "horovodrun":
            own = dict(accelerators.get(lab.accelerator).images).get("horovod", "horovod")
            hint = f"LAB_IMAGE={catalog.tag(own)} in .env, then `labctl up`"
        raise HostError(f"launcher `{program}` not found in image {lab.image}", hint=hint)


def require_port(lab: Lab, job: Job, engine: Backend, facts: Mapping[str, survey.HostFacts]) -> None:
    """HostError if the port at which the ranks meet is in use, if that is one of a host's own.

    ``facts`` are what the hosts reported before; what runs of this lab had left behind may have been ended since.
    """
    host, port = lab.host_of(job.nodes[0].name).name, lab.master_port
    if lab.network != "host" or port not in facts[host].ports:
        return
    now = survey.read(connection_to(engine, host).run(survey.script()).out, host)
    user = now.facts_at(time.time()).ports.get(port)
    if user is None:
        return
    others = sorted({f"`{one.lab}`" for one in engine.capabilities(host).port_users() if one.lab != lab.name})
    whose = f"; this host has lab {', '.join(others)}, too" if others else ""
    free = routing.free_port(port, {port, lab.ssh_port}.union(*(one.ports for one in facts.values())))
    raise HostError(
        f"{host}: port {port} (LAB_MASTER_PORT) is in use (user {user}){whose}",
        hint=f"wait for it to end, or LAB_MASTER_PORT={free} in .env: two labs on the same hosts need a port each",
        node=host,
    )


def require_inputs(lab: Lab, job: Job, engine: Backend) -> None:
    """ConfigError where a path that was named for the run is not on the launcher's host."""
    host = lab.host_of(model.LAUNCHER)
    runs = lab.directory / inputs.RUNS
    named = inputs.given(job.workload) if naming.sent(host) else ()
    paths = tuple(path for path in named if not inputs.locate(lab, path).is_relative_to(runs))
    if not paths:
        return
    look = ("sh", "-c", 'for path; do [ -e "$path" ] || echo "$path"; done', "sh", *paths)
    absent = engine.exec(naming.container_name(lab, model.LAUNCHER), look, user=agent.user(lab)).out.splitlines()
    if absent:
        raise ConfigError(
            f"{job.workload.name}: {host.name} has no {absent[0]} in its containers",
            hint="HOST_CACHE_PATH is a directory of each host: put it below that here, then `labctl cache --hosts`; of "
            "a clone, hosts get what git tracks",
            node=host.name,
        )


def with_own_port(lab: Lab, active: tuple[ActiveRun, ...]) -> Lab:
    """The lab with a port at which the ranks of no other run meet."""
    taken = {run.port for run in active} | {lab.ssh_port}
    return replace(lab, master_port=next(port for port in itertools.count(lab.master_port) if port not in taken))


# Seconds in which a run that is stopped has ended.
ENDING = 30


def under_way(lab: Lab, engine: Backend, observed: ObservedState, *, dry_run: bool) -> tuple[ActiveRun, ...]:
    """The runs that are under way, less those that were judged while their launcher could not be reached: these end.

    The launcher is not asked where the records tell that none is, as before most runs.
    """
    if not store.unjudged(lab.directory) and not out_of_reach(lab.directory):
        return ()
    active = agent.active(engine, observed)
    judged = {run.id for run in active if store.read_result(lab.directory, run.id)}
    if judged and not dry_run:
        for run_id in judged:
            with suppress(HostError):
                agent.stop(lab, engine, run_id, 1, "it was judged already")
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline and judged & {
            run.id for run in agent.active(engine, engine.observe(lab.name))
        }:
            time.sleep(0.2)
    return tuple(run for run in active if run.id not in judged)


def require_free(job: Job, active: tuple[ActiveRun, ...], options: RunOptions) -> None:
    """InUse where other runs have nodes of the run, unless it is to wait for them."""
    nodes = {node.name for node in job.nodes}
    if not options.wait and (others := [run for run in active if nodes & {*run.nodes}]):
        raise in_use(replace(run, nodes=tuple(name for name in run.nodes if name in nodes)) for run in others)


def unfinished(lab: Path, active: Mapping[str, ActiveRun], among: Iterable[str]) -> dict[str, str]:
    """The runs to end before another one, with the reason: those that nobody can follow any more, ``among`` some.

    And one that was out of reach when it was judged. The launcher was asked for ``active`` after ``among`` were known:
    others may have been launched since.
    """
    orphaned = [run_id for run_id in among if store.state(lab, run_id, active) == "orphaned"]
    lost = out_of_reach(lab)
    return {**dict.fromkeys(lost, "it lost a node"), **dict.fromkeys(orphaned, "its launcher was restarted")}


def out_of_reach(lab: Path) -> tuple[str, ...]:
    """The last run that was judged, if it lost a node or one was paused: its ranks and results may be there still."""
    judged = ((run_id, store.read_result(lab, run_id)) for run_id in store.ids(lab))
    run_id, result = next(((run_id, result) for run_id, result in judged if result), ("", None))
    return (run_id,) if result and result.cause in ("node-lost", "stalled") else ()


# How a run ends that may well succeed when it is started again.
LOST: tuple[model.Cause, ...] = ("node-lost", "device-lost")


def gather(context: Context, cluster: Cluster, lab: Lab, run_id: str, known: Mapping[str, ActiveRun]) -> None:
    """Bring here what an earlier run has left in its containers' directories, once it is ended in all of them."""
    site = LabDeployment(context=context, cluster=cluster, lab=lab)
    if why := unfinished(lab.directory, known, (run_id,)).get(run_id):
        do(plan.EndRun(paths=(f"runs/{run_id}",), cause=why), site)
    else:
        artifacts.collect(lab, run_id, cluster.engine, context.warn)


def without_lost(
    context: Context, cluster: Cluster, options: RunOptions, ended: Result, error: HostError
) -> RunOptions:
    """The options without the nodes that did not come up again; ``error``, which says why, where none are left."""
    observed, able = preflight.observe(context, cluster)
    usable = {one.node for one in observed.containers if one.state == "running" and not lost(one.reason)}
    usable = {node for node in usable if able.placement.get(node) not in able.failed}
    nodes = [node.name for node in store.job(store.directory(context.directory, ended.run_id)).nodes]
    gone = tuple(node for node in nodes if node not in usable)
    if not gone or len(gone) == len(nodes) or model.LAUNCHER not in usable:
        raise error
    context.warn(f"{error.message}; going on without {', '.join(gone)}")
    return request.without(options, gone)


def again(context: Context, lab: Lab, workload: Workload, options: RunOptions, ended: Result) -> RunOptions:
    """The options to start a run again with, from its last whole checkpoint or from the beginning."""
    found, why = None, f"`{workload.name}` does not say how it resumes"
    if workload.resume:
        found, why = checkpoints.last(lab.directory, ended.run_id, workload.resume)
    retried = (*options.retried, f"{ended.run_id}: {ended.cause}: {ended.message}")
    where = f"goes on from {found}" if found else f"begins from the start: {why}"
    context.notice(f"retry {len(retried)} of {options.retries} {where}")
    return replace(options, resume=ended.run_id if found else "", retried=retried)


def plan_run(
    lab: Lab,
    job: Job,
    cluster: Cluster,
    observed: ObservedState | None,
    options: RunOptions,
    origin: Future[dict[str, Any]] | None = None,
    *,
    dry_run: bool,
) -> plan.Plan:
    """All that a run does; a dry run does not ask for versions, which only the record's content needs.

    ``origin`` is what ``provenance`` finds out meanwhile.
    """
    left = [run_id for run_id in store.unjudged(lab.directory) if store.state(lab.directory, run_id) == "orphaned"]
    known = agent.runs(cluster.engine, observed) if observed and left else {}
    ended = unfinished(lab.directory, known, left)
    if dry_run and observed and not ended:
        require_port(lab, job, cluster.engine, cluster.facts)
    image_id = observed.on(lab.hosts[0].name).image if observed else None
    engine = {} if dry_run else cluster.engine.capabilities(lab.hosts[0].name).versions()
    versions = {} if dry_run else store.versions(lab, engine, image_id)
    versions |= origin.result() if origin else {}
    return plan.run(
        job,
        store.record(lab, cluster.settings, job, versions, preview=dry_run),
        hosts=tuple(host.name for host in artifacts.hosts_apart(lab, job)),
        reads=inputs.earlier(lab, job.workload),
        ended=ended,
        detach=options.detach,
        wait=options.wait,
    )


@dataclass(kw_only=True)
class RunDeployment(LabDeployment):
    """A run under way: what its steps hand on to each other."""

    job: Job
    now: datetime
    held: ExitStack
    """What is to be closed at the end, however that comes."""
    began: float = field(init=False)
    log: store.RunLog = field(init=False)
    seconds: float = 0
    """That it took, where it was launched before."""
    pushed: Manifest | None = None
    outcome: RunOutcome = field(init=False)
    result: Result | store.RunSummary = field(init=False)

    @property
    def path(self) -> Path:
        return store.directory(self.lab.directory, self.job.run_id)


@do.register
def _(step: plan.EndRun, site: LabDeployment) -> None:
    lab, engine, path = site.lab, site.cluster.engine, site.lab.directory / step.paths[0]
    # Asked first: what comes from the run and its hosts cannot end it.
    orphaned = store.state(lab.directory, path.name) != "done"
    known = store.job(path)
    nodes = tuple(node.name for node in known.nodes if node.name in lab.containers)
    agent.reap(lab, engine, path.name, 0, nodes=nodes, lasted=store.age(path), launcher=known.launcher)
    try:
        artifacts.collect(lab, path.name, engine, site.context.warn)
        if orphaned:
            evidence.write(lab, store.abandon(lab, path.name), site.context.warn)
        else:
            store.redact_ranks(path, lab.hidden)
    except HostError as error:
        # Whatever a workload made of its directory: this run goes on.
        site.context.warn(f"run {path.name}: {error.message}")


@do.register
def _(step: plan.StageRun, site: RunDeployment) -> None:
    require_port(site.lab, site.job, site.cluster.engine, site.cluster.facts)
    site.began = time.monotonic()
    store.create(site.lab, step.run_id, step.job, step.record, step.code)
    site.log = store.RunLog(site.path, site.lab, site.job.workload)
    site.held.callback(site.log.close)
    site.context.notice(f"run {step.run_id}: {site.job.workload.description}")


@do.register
def _(step: plan.PushRun, site: RunDeployment) -> None:
    site.pushed = artifacts.send(site.lab, site.job, site.cluster.engine, step.reads)


@do.register
def _(step: plan.LaunchJob, site: RunDeployment) -> None:
    keep = site.log.keep_and_show(site.context.lines)
    lab, run_id = site.lab, step.job.run_id
    patience = 0 if step.detach else site.cluster.settings.number("LAB_RUN_PATIENCE")
    stall = site.cluster.settings.number("LAB_STALL_SECONDS")
    launch = launch_of(lab, step.job, patience=patience, stall=stall, detach=step.detach, wait=step.wait)
    if step.detach:
        agent.start(lab, site.cluster.engine, launch)
        observed = site.cluster.engine.observe(lab.name)
        site.result = store.summary(lab.directory, run_id, agent.runs(site.cluster.engine, observed))
        return
    try:
        with site.context.showing(site.log.progress, time.monotonic() - site.began, step.job.timeout):
            site.outcome = supervise(lab, step.job, site.cluster.engine, keep, launch, notice=site.context.notice)
    except BaseException:
        collect(site)
        raise


@do.register
def _(step: plan.CollectResults, site: RunDeployment) -> None:  # noqa: ARG001
    collect(site)


def collect(site: RunDeployment) -> None:
    artifacts.collect(site.lab, site.job.run_id, site.cluster.engine, site.context.warn, site.pushed)


@do.register
def _(step: plan.WriteResult, site: RunDeployment) -> None:  # noqa: ARG001
    write_result(site)


def conclude_record(site: RunDeployment) -> None:
    """Collect what a run has written and judge it."""
    collect(site)
    write_result(site)


def write_result(site: RunDeployment) -> None:
    site.log.close()
    seconds = site.seconds or time.monotonic() - site.began
    result = conclude(site.lab, site.job, site.outcome, site.log, seconds, site.now)
    site.result = store.finish(site.lab, result)
    evidence.write(site.lab, site.result, site.context.warn, site.cluster.engine)
    with suppress(HostError):
        agent.forget(site.lab, site.cluster.engine, site.job.run_id)
    for metric in unmatched(site.job.workload, result):
        site.context.warn(f"metric `{metric.name}`: no line of the output matches `{metric.pattern}`")


def carry_out(
    context: Context,
    cluster: Cluster,
    lab: Lab,
    job: Job,
    steps: plan.Plan,
    now: datetime,
    early: agent.EarlyReach | None,
) -> Result | store.RunSummary:
    """Every step of a run; returns its result. HostError for a step that fails."""
    with ExitStack() as held:
        site = RunDeployment(context=context, cluster=cluster, lab=lab, early=early, job=job, now=now, held=held)
        raise_all(executor.carry_out(steps.steps, site))
        return site.result


def conclude(lab: Lab, job: Job, ended: RunOutcome, log: store.RunLog, seconds: float, now: datetime) -> Result:
    """What was printed and how it ended -> the run's result."""
    ranks = store.ranks_of(log.lines)
    reduced = metrics.reduce_values(job.workload.metrics, log.values)
    notes = metrics.read_notes(job.workload.notes, log.lines)
    verdict, progress = judge(job, reduced, ended, len(ranks)), log.progress()
    if verdict.status != "PASS" and progress.step is not None:
        notes[store.REACHED] = f"{progress.counts} {progress.step}" + (
            f" of {progress.steps}" if progress.steps else ""
        )
    said = {"metrics": reduced, "notes": notes, "ranks": ranks, "world_size": len(ranks)}
    return result_of(lab, job, verdict, now, seconds=seconds, **said)


def unmatched(workload: Workload, result: Result) -> list[Metric]:
    """The metrics that a run which passed has no number for; of another one the message says enough."""
    missing = [metric for metric in workload.metrics if metric.name not in result.metrics and not metric.optional]
    return missing if result.verdict == "PASS" else []


def refuse(lab: Lab, job: Job, reason: str, now: datetime, *, dry_run: bool = False) -> Result:
    """The result of a run that cannot fit, recorded like any other; HostError for a dry run, which records nothing."""
    if dry_run:
        raise HostError(reason, hint=f"labctl fit {job.workload.name}")
    store.create(lab, job.run_id, job.files)
    return store.finish(lab, result_of(lab, job, error("does-not-fit", reason), now))


def result_of(lab: Lab, job: Job, verdict: Verdict, now: datetime, **measured: Any) -> Result:
    return Result(
        run_id=job.run_id,
        workload=job.workload.name,
        launcher=job.workload.launcher,
        lab=lab.name,
        verdict=verdict.status,
        cause=verdict.cause,
        message=verdict.message,
        exit_code=verdict.exit_code,
        checks=verdict.checks,
        started=now.isoformat(timespec="seconds"),
        resumed=job.resumed,
        retried=job.retried,
        replays=job.replays,
        **measured,
    )
