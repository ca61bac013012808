"""The parts of ``labctl run``: what must hold before it, the launch, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from labctl import fit, model, naming
from labctl.compose import render
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy import plan
from labctl.engines import Backend, agent
from labctl.engines.state import ObservedState, lost
from labctl.errors import ConfigError, HostError
from labctl.hosts import facts as survey
from labctl.model import HERE, Job, Lab, Rank, Result, Verdict, Workload
from labctl.runs import artifacts, inputs, metrics, store
from labctl.runs.supervise import RunOutcome, supervise
from labctl.runs.verdict import judge
from labctl.system import filelock, procfs, routing


def why_not_fit(lab: Lab, task: Job, limit: int) -> str | None:
    """Why the workload cannot fit in the memory that the nodes share on this CPU host; None when it may.

    ``limit`` is that of a node in bytes, 0 for none.
    """
    if task.workload.memory is None or task.workload.deepspeed is None or lab.accelerator != "cpu":
        return None
    slots = max(node.slots for node in task.nodes)
    try:
        training = fit.of(task.workload, lab.accelerator, slots, len(task.nodes))
    except ConfigError:
        # A model whose memory is not known may run all the same.
        return None
    reason = fit.check(training, fit.Capacity(device=None, host=node_memory(lab, len(task.nodes), limit)))
    return f"{task.workload.name} {reason}; --rehearse runs the same path shrunk" if reason else None


def how_it_fits(
    lab: Lab, workload: Workload, limit: int, *, nodes: int | None, slots: int | None, device_memory: int | None
) -> fit.FitReport:
    """Estimate the workload's memory on the lab, or on so many nodes and slots; sizes in bytes.

    ``device_memory`` is that of one device. The memory of other machines than this one is unknown.
    """
    count = nodes or len(lab.nodes)
    accelerator = "device" if device_memory and lab.accelerator == "cpu" else lab.accelerator
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


def not_up(lab: Lab, task: Job, observed: ObservedState) -> list[tuple[str, str]]:
    """The containers of a run that are not there as the settings and the image now say, with the reason."""
    concerned = {model.LAUNCHER, *(node.name for node in task.nodes)}
    files = render.render(lab)
    hosts = [(observed.on(host.name), lab.containers_on(host.name)) for host in lab.hosts]
    return [
        one for there, wanted in hosts for one in plan.not_current(lab, files, there, wanted) if one[0] in concerned
    ]


def require_hosts(lab: Lab, task: Job, failed: Mapping[str, HostError]) -> None:
    """HostError of the first host of the run that has failed."""
    for name in (model.LAUNCHER, *(node.name for node in task.nodes)):
        if error := failed.get(lab.host_of(name).name):
            raise error


def require_up(lab: Lab, task: Job, observed: ObservedState) -> None:
    """HostError unless the launcher and every node of the run are there."""
    for name, why in not_up(lab, task, observed):
        reason = f"lab {lab.name} is not up as its settings say: {name}: {why} (wanted: {lab.image})"
        raise HostError(reason, hint="labctl up", node=name)
    for node in task.nodes:
        container = observed.container(node.name)
        if container and lost(container.reason):
            raise HostError(f"{node.name} is unhealthy: {container.reason}", hint="labctl up", node=node.name)


def require_program(lab: Lab, task: Job, engine: Backend) -> None:
    """HostError where the lab's image lacks the launcher program that a person asked for."""
    if task.launcher == "script":
        return
    program = task.argv[0]
    found = engine.call(naming.container_name(lab, model.LAUNCHER), ("which", program), user=agent.user(lab))
    if found.code:
        hint = f"set LAB_IMAGE in .env to one that has {program}, then `labctl up`"
        if program == "horovodrun":
            hint = "LAB_IMAGE=labctl/horovod in .env, then `labctl up`: its image has all of the CPU image too"
        raise HostError(f"image {lab.image} has no `{program}`, which starts `{task.launcher}`", hint=hint)


def require_port(lab: Lab, task: Job, engine: Backend, facts: Mapping[str, survey.HostFacts]) -> None:
    """HostError where somebody listens to the port at which the ranks meet, if that is one of a host's own.

    ``facts`` are what the hosts told before; what runs of this lab had left behind may have been ended since.
    """
    host, port = lab.host_of(task.nodes[0].name).name, lab.master_port
    there = engine.on(host)
    if lab.network != "host" or port not in facts[host].ports:
        return
    now = survey.read(there.connection.run(survey.script()).out, host)
    user = now.facts_at(time.time()).ports.get(port)
    if user is None:
        return
    others = sorted({f"`{one.lab}`" for one in there.listeners() if one.lab != lab.name})
    whose = f"; on this host there is lab {', '.join(others)}, too" if others else ""
    busy = {port, lab.ssh_port}.union(*(one.ports for one in facts.values()))
    free = routing.free_port(port, busy)
    raise HostError(
        f"{host}: port {port} (LAB_MASTER_PORT), at which the ranks meet, is taken by a program of user {user}{whose}",
        hint=f"wait for it to end, or LAB_MASTER_PORT={free} in .env: two labs on the same hosts need a port each",
        node=host,
    )


def require_inputs(lab: Lab, task: Job, engine: Backend) -> None:
    """ConfigError where a path that was named for the run is not on the launcher's host."""
    host = lab.host_of(model.LAUNCHER)
    runs = lab.directory / inputs.RUNS
    named = inputs.given(task.workload) if naming.sent(host) else ()
    paths = tuple(path for path in named if not inputs.locate(lab, path).is_relative_to(runs))
    if not paths:
        return
    look = ("sh", "-c", 'for path; do [ -e "$path" ] || echo "$path"; done', "sh", *paths)
    absent = engine.call(naming.container_name(lab, model.LAUNCHER), look, user=agent.user(lab)).out.splitlines()
    if absent:
        raise ConfigError(
            f"{task.workload.name}: {host.name} has no {absent[0]} in its containers",
            hint="HOST_CACHE_PATH and HOST_REPO_PATH are directories of the hosts: put it there on each",
            node=host.name,
        )


def end_orphans(context: Context, lab: Lab, engine: Backend) -> None:
    """End what is left of runs whose labctl died before them, and close their records.

    And of the last one, if it lost a node: one whose host could not be reached may have its ranks and results still.
    """
    runs = store.listing(lab.directory)
    if runs and runs[0].cause == "node-lost":
        agent.reap(lab, engine, runs[0].run_id, grace=0)
        path = store.directory(lab.directory, runs[0].run_id)
        artifacts.fetch(lab, runs[0].run_id, engine, path, context.warn)
        store.redact_ranks(path, lab.hidden)
    for run in runs:
        if run.state == "orphaned":
            context.notice(f"run {run.run_id} was left behind: ending it")
            agent.reap(lab, engine, run.run_id, grace=0)
            artifacts.fetch(lab, run.run_id, engine, store.directory(lab.directory, run.run_id), context.warn)
            store.abandon(lab, run.run_id)


def launch(
    context: Context, settings: Settings, lab: Lab, task: Job, engine: Backend, steps: plan.Plan, now: datetime
) -> Result:
    """Record the run, supervise it, and judge it."""
    began = time.monotonic()
    path = store.create(lab, task.run_id, task.files, store.before(lab, settings, task, engine, steps))
    with filelock.held(path / store.LOCK, f"run {task.run_id}"):
        context.notice(f"run {task.run_id}: {task.workload.description}")
        log = store.RunLog(path, lab, (metric.pattern for metric in task.workload.metrics))
        try:
            sent = artifacts.send(lab, task, engine, path, inputs.earlier(lab, task.workload))
            try:
                ended = supervise(lab, task, engine, lambda line: context.line(log.keep(line)))
            finally:
                artifacts.fetch(lab, task.run_id, engine, path, context.warn, sent)
        finally:
            log.close()
        result = conclude(lab, task, ended, log.lines, time.monotonic() - began, now)
        return store.finish(lab.directory, result)


def conclude(lab: Lab, task: Job, ended: RunOutcome, lines: list[str], seconds: float, now: datetime) -> Result:
    """What was printed and how it ended -> the run's result."""
    ranks = store.ranks_of(lines)
    reduced = metrics.reduce_samples(task.workload.metrics, metrics.read_samples(task.workload.metrics, lines))
    verdict = judge(
        task.workload.criteria,
        reduced,
        exit_code=ended.exit_code,
        cause=ended.cause,
        message=ended.message,
        world_size=len(ranks),
        expected_world_size=sum(node.slots for node in task.nodes),
    )
    return result_of(lab, task, verdict, now, ranks=ranks, metrics=dict(reduced), seconds=seconds)


def refuse(lab: Lab, task: Job, reason: str, now: datetime) -> Result:
    """Record a run that is not started because it does not fit into memory."""
    verdict = Verdict(status="ERROR", cause="does-not-fit", message=reason, exit_code=3)
    store.create(lab, task.run_id, task.files, ())
    return store.finish(lab.directory, result_of(lab, task, verdict, now))


def result_of(
    lab: Lab,
    task: Job,
    verdict: Verdict,
    now: datetime,
    *,
    ranks: tuple[Rank, ...] = (),
    metrics: Mapping[str, dict[str, Any]] | None = None,
    seconds: float = 0.0,
) -> Result:
    return Result(
        run_id=task.run_id,
        workload=task.workload.name,
        launcher=task.launcher,
        lab=lab.name,
        verdict=verdict.status,
        cause=verdict.cause,
        message=verdict.message,
        exit_code=verdict.exit_code,
        world_size=len(ranks),
        ranks=ranks,
        metrics=metrics or {},
        checks=verdict.checks,
        seconds=seconds,
        started=now.isoformat(timespec="seconds"),
    )
