"""The parts of ``labctl run``: the job as asked for, what must hold before it, the launch, and the verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from labctl import (
    clones,
    deepspeed_config,
    execute,
    fit,
    host,
    hostfile,
    inputs,
    job,
    launchers,
    lock,
    metrics,
    plan,
    record,
    render,
    store,
)
from labctl.containers import Observed, lost
from labctl.context import Context
from labctl.engines import Engine
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import ConfigError, HostError
from labctl.model import Criterion, Job, Lab, Pairs, Rank, Result, Verdict, Workload
from labctl.settings import Settings
from labctl.supervise import Ended, supervise
from labctl.verdict import judge

DEEPSPEED = "deepspeed."
# The launcher of scripts that start their ranks by themselves.
OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a person may ask of one run beside its workload's name."""

    rehearse: bool = False
    timeout: float | None = None
    expect: tuple[Criterion, ...] = ()
    arguments: Pairs = ()
    """``key, value``: the script gets ``--key value``; ``deepspeed.key`` is a key of DeepSpeed's configuration."""
    launcher: str = ""
    launcher_arguments: tuple[str, ...] = ()
    script: Path | None = None
    deepspeed_config: Path | None = None
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    dry_run: bool = False


def choose_workload(directory: Path, name: str, options: RunOptions, found: Settings) -> Workload:
    """The declared workload with what a person changes of it for this run."""
    chosen = clones.load(
        directory / "workloads", name, launchers.known(), clones.roots(found), rehearse=options.rehearse
    )
    known = {metric.name for metric in chosen.metrics}
    for criterion in options.expect:
        if criterion.metric not in known:
            hint = f"it has {', '.join(sorted(known))}"
            raise ConfigError(f"--expect: {name} has no metric `{criterion.metric}`", hint=hint)
    launcher = options.launcher or chosen.launcher
    launchers.get(launcher)
    if launcher != chosen.launcher and OWN in (launchers.name(launcher), chosen.launcher):
        itself = "starts its ranks by itself" if chosen.launcher == OWN else "does not start its ranks by itself"
        raise ConfigError(f"{name} {itself}, so it cannot run under `{launcher}`", hint="leave out --launcher")
    same = launchers.name(launcher) == launchers.name(chosen.launcher)
    given = ((key, value) for key, value in options.arguments if not _of_deepspeed(key))
    words = (word for key, value in given for word in clones.words(chosen, key, value))
    return replace(
        chosen,
        arguments=(*chosen.arguments, *words),
        criteria=(*chosen.criteria, *options.expect),
        launcher=launcher,
        # Another launcher would not know the words that were declared for this one.
        launcher_arguments=(*(chosen.launcher_arguments if same else ()), *options.launcher_arguments),
        script=str(options.script.absolute()) if options.script else chosen.script,
        deepspeed=choose_config(chosen, options),
    )


def choose_config(chosen: Workload, options: RunOptions) -> deepspeed_config.Config | None:
    """DeepSpeed's configuration: the workload's own or a person's file, with the keys that are set for this run."""
    config = chosen.deepspeed
    if options.deepspeed_config:
        where = str(options.deepspeed_config)
        config = deepspeed_config.parse(read_text(options.deepspeed_config), where)
        deepspeed_config.check_keys(config, where)
    for key, value in options.arguments:
        if _of_deepspeed(key):
            config = deepspeed_config.assign(config or {}, key.removeprefix(DEEPSPEED), value)
    if config is not None and chosen.deepspeed is None:
        raise ConfigError(
            f"{chosen.name} takes no DeepSpeed configuration",
            hint=f"{chosen.declared} declares no `deepspeed` section; `labctl workloads` lists the others",
        )
    return config


def config_source(task: Workload, options: RunOptions) -> str:
    """What a person changed of DeepSpeed's configuration, for errors to name; else where it is declared."""
    if any(_of_deepspeed(key) for key, _ in options.arguments):
        return "--set"
    return str(options.deepspeed_config or task.declared)


def _of_deepspeed(key: str) -> bool:
    return key.startswith(DEEPSPEED)


def build_job(lab: Lab, task: Workload, options: RunOptions, now: datetime) -> Job:
    """The workload on the nodes that are asked for, as a job with a new id; its inputs are checked on the host."""
    chosen = job.choose(
        lab,
        read_hostfile(options.hostfile),
        str(options.hostfile or "hostfile"),
        include=options.include,
        exclude=options.exclude,
    )
    run_id = store.new_id(task.name, now)
    directory = f"{lab.project_path}/runs/{run_id}"
    task = inputs.resolve(lab, clones.at(task, len(chosen), directory))
    task, folder, copied = inputs.place_script(lab, task, directory)
    built = job.build(
        lab,
        task,
        run_id,
        chosen,
        options.timeout or task.timeout,
        script_directory=folder,
        config_source=config_source(task, options),
    )
    return replace(built, files=(*built.files, *copied))


def read_hostfile(path: Path | None) -> tuple[tuple[str, int], ...]:
    """The entries of a hostfile; none for no file. A file that is not there is an error, never a local run."""
    if path is None:
        return ()
    return hostfile.parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A person's file; ConfigError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}") from error


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
    reason = fit.check(training, fit.Capacity(device=None, host=node_memory(len(task.nodes), limit)))
    return f"{task.workload.name} {reason}; --rehearse runs the same path shrunk" if reason else None


def how_it_fits(
    lab: Lab, task: Workload, limit: int, *, nodes: int | None, slots: int | None, device_memory: int | None
) -> dict[str, Any]:
    """What the workload takes on the lab, or on so many nodes and slots, and whether that is there; sizes in bytes.

    ``device_memory`` makes them devices with memory of their own. What other machines than this have is not known.
    """
    count = nodes or len(lab.nodes)
    accelerator = "device" if device_memory and lab.accelerator == "cpu" else lab.accelerator
    training = fit.of(task, accelerator, slots or max(node.slots for node in lab.nodes), count)
    elsewhere = accelerator != "cpu" and bool(nodes or slots)
    capacity = fit.Capacity(device=device_memory, host=None if elsewhere else node_memory(count, limit))
    return {"workload": task.name, "nodes": count, **fit.document(training, capacity)}


def node_memory(nodes: int, limit: int) -> int:
    """Bytes for each of the nodes that share this host; ``limit`` is that of a node, 0 for none."""
    share = host.memory_available() // nodes
    return min(share, limit or share)


def not_up(lab: Lab, task: Job, observed: Observed) -> list[tuple[str, str]]:
    """The containers of a run that are not there as the settings and the image now say, with the reason."""
    concerned = {render.LAUNCHER, *(node.name for node in task.nodes)}
    return [one for one in plan.not_current(lab, render.render(lab), observed) if one[0] in concerned]


def require_up(lab: Lab, task: Job, observed: Observed) -> None:
    """HostError unless the launcher and every node of the run are there."""
    for name, why in not_up(lab, task, observed):
        reason = f"lab {lab.name} is not up as its settings say: {name}: {why} (wanted: {lab.image})"
        raise HostError(reason, hint="labctl up", node=name)
    for node in task.nodes:
        container = observed.container(node.name)
        if container and lost(container.reason):
            raise HostError(f"{node.name} is unhealthy: {container.reason}", hint="labctl up", node=node.name)


def require_program(lab: Lab, task: Job, engine: Engine) -> None:
    """HostError where the lab's image lacks the launcher program that a person asked for."""
    program = task.argv[0]
    found = engine.call(render.container_name(lab, render.LAUNCHER), ("which", program), user=execute.user(lab))
    if found.code:
        hint = f"set LAB_IMAGE in .env to one that has {program}, then `labctl up`"
        if program == "horovodrun":
            hint = "LAB_IMAGE=labctl/horovod in .env, then `labctl up`: its image has all of the CPU image too"
        raise HostError(f"image {lab.image} has no `{program}`, which starts `{task.launcher}`", hint=hint)


def end_orphans(context: Context, lab: Lab, engine: DockerEngine) -> None:
    """End what is left of runs whose labctl died before them, and close their records."""
    for run in store.listing(lab.directory):
        if run["state"] == "orphaned":
            context.notice(f"run {run['run_id']} was left behind: ending it")
            execute.reap(lab, engine, run["run_id"], grace=0)
            store.abandon(lab, run["run_id"])


def launch(
    context: Context, settings: Settings, lab: Lab, task: Job, engine: DockerEngine, steps: plan.Plan, now: datetime
) -> dict[str, Any]:
    """Record, run under watch, judge; the answer is the run's result."""
    began = time.monotonic()
    path = store.create(lab, task.run_id, task.files, record.before(lab, settings, task, engine, steps))
    with lock.held(path / store.LOCK, f"run {task.run_id}"):
        context.notice(f"run {task.run_id}: {task.workload.describe}")
        recorder = store.Recorder(path, lab, (metric.pattern for metric in task.workload.metrics))
        try:
            ended = supervise(lab, task, engine, lambda line: context.line(recorder.keep(line)))
        finally:
            recorder.close()
        result = conclude(lab, task, ended, recorder.lines, time.monotonic() - began, now)
        return store.finish(lab.directory, result)


def conclude(lab: Lab, task: Job, ended: Ended, lines: list[str], seconds: float, now: datetime) -> Result:
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
    return result_of(lab, task, verdict, now, ranks=ranks, reduced=reduced, seconds=seconds)


def refuse(lab: Lab, task: Job, reason: str, now: datetime) -> dict[str, Any]:
    """The result of a run that is not started because it cannot fit; it is recorded like any other."""
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
    reduced: tuple[tuple[str, dict[str, Any]], ...] = (),
    seconds: float = 0.0,
) -> Result:
    return Result(
        run_id=task.run_id,
        workload=task.workload.name,
        launcher=task.launcher,
        lab=lab.name,
        verdict=verdict,
        world_size=len(ranks),
        ranks=ranks,
        metrics=reduced,
        seconds=seconds,
        started=now.isoformat(timespec="seconds"),
    )
