"""What each command does, a handful of lines each: read, decide, act, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from labctl import execute, fit, host, job, keys, launchers, lock, metrics, plan, record, render, settings, store, workload
from labctl import lab as lab_of
from labctl.engines import Observed
from labctl.engines.local import LocalEngine
from labctl.errors import ConfigError, HostError
from labctl.files import make_private, write_all
from labctl.limits import granted
from labctl.model import Criterion, Event, File, Lab, Limits, Result, Verdict
from labctl.observe import observe
from labctl.supervise import Ended, supervise
from labctl.verdict import judge

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a command works: the lab's directory, the process's environment, flags that override settings."""

    directory: Path
    environ: Mapping[str, str]
    emit: Emit
    flags: Mapping[str, str]

    def settings(self) -> settings.Settings:
        """The settings in force; ConfigError with ``file:line`` for what cannot be read."""
        found = settings.load(self.directory, self.environ, self.flags)
        for warning in found.warnings:
            self.warn(warning)
        return found

    def warn(self, text: str) -> None:
        self.emit(Event(kind="warning", text=text))

    def notice(self, text: str) -> None:
        self.emit(Event(kind="notice", text=text))


def load_lab(context: Context, found: settings.Settings, limits: Limits) -> Lab:
    """The lab that the settings describe, on this host as it is."""
    accelerator, here = observe(found.text("LAB_ACCELERATOR"))
    return lab_of.build(found, context.directory, accelerator, here, limits)


def image_name(found: settings.Settings) -> str:
    accelerator, _ = observe(found.text("LAB_ACCELERATOR"))
    return found.text("LAB_IMAGE") or f"labctl/{accelerator}"


def lab_limits(context: Context, found: settings.Settings, engine: LocalEngine | None) -> Limits:
    """The kernel limits that this daemon grants; what is known already where there is no engine to ask."""
    return granted(found, context.directory, image_name(found), engine, context.warn)


# --- setting up ----------------------------------------------------------------------------------------------


def doctor(context: Context) -> tuple[Any, ...]:
    """Everything that was looked at on this host and in this lab."""
    from labctl.doctor import examine

    found = context.settings()
    return examine(load_lab(context, found, lab_limits(context, found, engine=None)), LocalEngine())


# --- the lab -------------------------------------------------------------------------------------------------


def render_files(context: Context) -> tuple[Lab, tuple[str, ...]]:
    """Write every node's files; returns the lab and the paths that changed."""
    found = context.settings()
    lab = load_lab(context, found, lab_limits(context, found, engine=None))
    return lab, write_all(lab.directory, (*render.render(lab), *secret_files(lab)))


def up(context: Context, *, dry_run: bool = False) -> dict[str, Any]:
    """Bring the lab up and return when the launcher has reached every worker; a second call changes nothing."""
    found = context.settings()
    engine = LocalEngine()
    ensure_image(context, found, engine)
    lab = load_lab(context, found, lab_limits(context, found, engine))
    require_mounts(lab)
    with lock.held(lab.directory / ".lab/lock", "labctl up", wait=120, notice=context.notice):
        files = render.render(lab)
        observed = engine.observe(lab.name, lab.image)
        changed = tuple(file.path for file in files if not same(lab.directory / file.path, file.content))
        steps = plan.up(lab, files, changed, observed)
        if dry_run:
            return {"lab": lab.name, "plan": str(steps).splitlines()}
        prepare(lab, observed)
        execute.carry_out(steps, lab, engine, context.emit)
    return status(context)


def same(path: Path, content: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == content
    except OSError:
        return False


def prepare(lab: Lab, observed: Observed) -> None:
    """Directories, keys and secrets, which no plan shows; what removed nodes had is removed with them."""
    for name in (".lab", "runs", "workloads"):
        make_private(lab.directory / name)
    keys.ensure(lab)
    write_all(lab.directory, secret_files(lab))
    kept = {node.name for node in lab.nodes}
    for path in (lab.directory / ".lab/nodes").iterdir():
        if path.name not in kept and path.name in {container.node for container in observed.containers}:
            import shutil

            shutil.rmtree(path)


def secret_files(lab: Lab) -> tuple[File, ...]:
    """The secrets of every node, each a 0600 file that compose mounts under /run/secrets."""
    return tuple(
        File(path=f"{render.node_directory(node.name)}/secrets/{name}", content=value.reveal())
        for node in lab.nodes
        for name, value in lab.secrets
    )


def require_mounts(lab: Lab) -> None:
    """Every mount's source is there; the lab's own and the default cache are made. HostError names the others."""
    own = {str(lab.directory / "workloads"), str(lab.directory / "runs"), str(Path.home() / ".cache/labctl")}
    for mount in lab.mounts:
        source = Path(mount.source)
        if mount.source in own:
            make_private(source)
        elif not source.is_dir():
            raise HostError(f"{mount.source}, mounted at {mount.target}, is not there", hint=f"mkdir -p {mount.source}")


def ensure_image(context: Context, found: settings.Settings, engine: LocalEngine) -> None:
    """Build the lab's image when it is not there; say so when it was built from other files than these."""
    image = image_name(found)
    if engine.image_id(image) is None:
        context.notice(f"image {image} is not there yet: building it (minutes, once)")
        build_image(context)
    elif not found.text("LAB_IMAGE"):
        from labctl import build

        if build.is_stale(engine.image_labels(image), image.removeprefix("labctl/")):
            context.warn(f"image {image} was built from other files than labctl's own now; `labctl build` makes it anew")


def build_image(context: Context, *, update_lock: bool = False) -> dict[str, Any]:
    """Build the lab's image from this host's package sources."""
    from labctl import build

    found = context.settings()
    accelerator, _ = observe(found.text("LAB_ACCELERATOR"))
    request = build.request(found, accelerator, context.directory)
    return build.update_lock(request, context.notice) if update_lock else build.build(request, context.notice)


def status(context: Context) -> dict[str, Any]:
    """What Docker says of the lab, by its labels."""
    found = context.settings()
    name = found.text("LAB_NAME")
    observed = LocalEngine().observe(name, found.text("LAB_IMAGE") or "labctl/cpu")
    running = [container for container in observed.containers if container.state == "running"]
    wanted = {render.LAUNCHER, *(f"worker-{index}" for index in range(found.number("LAB_NODES")))}
    missing = wanted - {container.node for container in running}
    state = "down" if not observed.containers else "partial" if missing or len(running) != len(observed.containers) else "up"
    nodes = [
        {"name": c.node, "role": c.role, "host": "local", "state": c.state, "health": c.health, "slots": c.slots, "devices": []}
        for c in observed.containers
    ]
    runs = [{"run_id": run["run_id"], "state": run["state"]} for run in store.listing(context.directory)[:20]]
    return {"lab": name, "state": state, "nodes": nodes, "runs": runs}


def down(context: Context, *, dry_run: bool = False) -> dict[str, Any]:
    """Remove the lab's containers and network; works without the state directory, twice, or on a lab never made."""
    name = context.settings().text("LAB_NAME")
    engine = LocalEngine()
    with lock.held(context.directory / ".lab/lock", "labctl down", wait=120, notice=context.notice):
        observed = engine.observe(name, "labctl/cpu")
        steps = plan.down(observed)
        if not dry_run:
            execute.remove_all(steps, engine, context.emit)
    return {"lab": name, "plan": str(steps).splitlines()}


# --- a run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a person may ask of one run beside its workload's name."""

    rehearse: bool = False
    timeout: float | None = None
    expect: tuple[Criterion, ...] = ()
    arguments: tuple[str, ...] = ()
    hostfile: Path | None = None
    dry_run: bool = False


def run(context: Context, name: str, options: RunOptions) -> dict[str, Any]:
    """Run a workload on the lab and judge it; the answer is the run's result."""
    found = context.settings()
    chosen = prepare_workload(context, name, options)
    engine = LocalEngine()
    lab = load_lab(context, found, Limits())
    entries = read_hostfile(options.hostfile)
    now = datetime.now().astimezone()
    task = job.build(lab, chosen, store.new_id(name, now), entries, options.timeout or chosen.timeout)
    steps = plan.run(task)
    if options.dry_run:
        return {"lab": lab.name, "plan": str(steps).splitlines()}
    if does_not_fit := fits(lab, task):
        return refuse(lab, task, does_not_fit, now)
    require_up(lab, engine.observe(lab.name, lab.image))
    with lock.held(lab.directory / ".lab/run.lock", f"run {task.run_id}"):
        execute.reach(lab, engine, tuple(node.name for node in task.nodes), 15)
        return launch(context, found, lab, task, engine, steps, now)


def prepare_workload(context: Context, name: str, options: RunOptions) -> Any:
    """The declared workload with this run's own arguments and criteria."""
    chosen = workload.load(context.directory / "workloads", name, launchers.names(), rehearse=options.rehearse)
    known = {metric.name for metric in chosen.metrics}
    for criterion in options.expect:
        if criterion.metric not in known:
            raise ConfigError(f"--expect: {name} has no metric `{criterion.metric}`", hint=f"it has {', '.join(sorted(known))}")
    return replace(
        chosen, arguments=(*chosen.arguments, *options.arguments), criteria=(*chosen.criteria, *options.expect)
    )


def launch(
    context: Context, found: settings.Settings, lab: Lab, task: Any, engine: LocalEngine, steps: plan.Plan, now: datetime
) -> dict[str, Any]:
    """Record, run under watch, judge."""
    began = time.monotonic()
    path = store.create(lab, task.run_id, task.files, record.before(lab, found, task, engine, steps))
    with lock.held(path / store.LOCK, f"run {task.run_id}"):
        context.notice(f"run {task.run_id}: {task.workload.describe}")
        recorder = store.Recorder(path, lab)
        try:
            ended = supervise(lab, task, engine, lambda line: context.emit(Event(kind="line", text=recorder.keep(line))))
        finally:
            recorder.close()
        result = conclude(lab, task, ended, recorder.lines, time.monotonic() - began, now)
        return store.finish(lab.directory, result)


def conclude(lab: Lab, task: Any, ended: Ended, lines: list[str], seconds: float, now: datetime) -> Result:
    """Lines and how it ended -> the run's result."""
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
    return _result(lab, task, verdict, ranks, reduced, seconds, now)


def refuse(lab: Lab, task: Any, reason: str, now: datetime) -> dict[str, Any]:
    """The result of a run that is not started because it cannot fit."""
    verdict = Verdict(status="ERROR", cause="does-not-fit", message=reason, exit_code=3)
    return store.result_document(_result(lab, task, verdict, (), (), 0.0, now))


def _result(lab: Lab, task: Any, verdict: Verdict, ranks: Any, reduced: Any, seconds: float, now: datetime) -> Result:
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


def read_hostfile(path: Path | None) -> tuple[tuple[str, int], ...]:
    """The entries of a hostfile; none for no file. A file that is not there is an error, never a local run."""
    from labctl import hostfile

    if path is None:
        return ()
    try:
        return hostfile.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}") from error


def fits(lab: Lab, task: Any) -> str | None:
    """Why the workload cannot fit in the memory that the nodes share on this CPU host; None when it may."""
    memory = task.workload.memory
    if memory is None or lab.accelerator != "cpu":
        return None
    nodes = task.nodes
    return fit.check(memory, nodes[0].slots, sum(node.slots for node in nodes), host.memory_available() // len(nodes))


def require_up(lab: Lab, observed: Observed) -> None:
    """HostError unless the launcher and every node of the lab run."""
    for name in (render.LAUNCHER, *(node.name for node in lab.nodes)):
        container = observed.container(name)
        if container is None or container.state != "running":
            state = container.state if container else "not there"
            raise HostError(f"lab {lab.name} is not up: {name} is {state}", hint="labctl up", node=name)
    plan.require_own_name(lab, observed)


def clean(context: Context) -> dict[str, Any]:
    """``down``, and the lab's state: keys, rendered files. Runs stay."""
    import shutil

    answer = down(context)
    shutil.rmtree(context.directory / ".lab", ignore_errors=True)
    return answer
