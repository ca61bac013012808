"""The options of `labctl run`, and the job that follows from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import launchers
from labctl.config import hostfile
from labctl.config.settings import Settings
from labctl.errors import ConfigError, nearest
from labctl.jobs import checkpoints, code, inputs, job
from labctl.model import BOUNDS, Criterion, Job, Lab, Relative, Workload
from labctl.records import store
from labctl.records.verdict import final
from labctl.system.files import read_limited
from labctl.workloads import deepspeed_config, external
from labctl.workloads.schema import launcher_name

DEEPSPEED = "deepspeed."
# The launcher of scripts that start their ranks themselves.
SCRIPT = "script"
# Seconds that a script has whose time nobody has limited.
DAY = 24 * 3600


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of one run."""

    rehearse: bool = False
    timeout: float | None = None
    expect: tuple[Criterion, ...] = ()
    arguments: tuple[tuple[str, str | None], ...] = ()
    """``key, value``: the script gets ``--key value``; ``deepspeed.key`` is a key of DeepSpeed's configuration."""
    words: tuple[str, ...] = ()
    """More arguments, as they are."""
    launcher: str = ""
    launcher_arguments: tuple[str, ...] = ()
    script: Path | None = None
    local_rank: bool = False
    deepspeed_config: Path | None = None
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    detach: bool = False
    """Whether it is left once it is launched."""
    wait: bool = False
    """Whether it waits for other runs that have its nodes."""
    resume: str = ""
    """The run that it goes on from, or ``latest``."""
    retries: int = 0
    retried: tuple[str, ...] = ()
    """The attempts before, and how each ended."""
    batch: str = ""
    """The batch and the job that it is a run of."""


# Options of one run alone, which no other takes from its record.
OWN = ("detach", "wait", "resume", "retries", "retried", "batch")


def recorded(workload: Workload, options: RunOptions) -> dict[str, Any]:
    """The workload's name, empty for a script alone, and the options that `--resume` starts it with again, as JSON."""
    asked = msgspec.to_builtins(options, enc_hook=lambda path: str(path.absolute()))
    kept = {key: value for key, value in asked.items() if value and key not in OWN}
    of = {"batch": options.batch} if options.batch else {}
    return {"workload": workload.name if workload.directory != Path() else "", "options": kept, **of}


def resumed(directory: Path, name: str, options: RunOptions) -> tuple[str, RunOptions]:
    """The workload and the options of the run that these are to go on from; what is given now comes on top.

    ConfigError for a run that is not there, is running, or is one of another workload than ``name``.
    """
    run_id = store.find(directory, options.resume)
    if store.state(directory, run_id) == "running":
        raise ConfigError(f"run {run_id} is still running", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    known = store.job(store.directory(directory, run_id))
    if known.request is None:
        hint = f"labctl run {known.workload}, with what it was given then"
        raise ConfigError(
            f"run {run_id} has no record of its options: it was stopped early or is an old one", hint=hint
        )
    if name and name != known.workload:
        raise ConfigError(f"run {run_id} is one of `{known.workload}`, not of `{name}`", hint="leave out the workload")
    before = msgspec.convert(known.request["options"], RunOptions, dec_hook=lambda kind, value: kind(value))
    return known.request["workload"], replace(over(before, options), resume=run_id)


def over(before: RunOptions, now: RunOptions) -> RunOptions:
    """Options with those that are given now in place of the same ones of before; of ``--set`` both, key by key."""
    nodes = ("hostfile", "include", "exclude")
    kept = [key for key in RunOptions.__struct_fields__ if key not in (*OWN, "arguments")]
    if any(getattr(now, key) for key in nodes):
        kept = [key for key in kept if key not in nodes]
    values = {key: getattr(now, key) or getattr(before, key) for key in kept}
    return replace(now, **values, arguments=tuple({**dict(before.arguments), **dict(now.arguments)}.items()))


def without(options: RunOptions, nodes: tuple[str, ...]) -> RunOptions:
    """The options with these nodes left out, by DeepSpeed's --include or --exclude."""
    named = options.include or options.exclude
    parts = [part for part in re.split("@" if ":" in named else "[@,]", named) if part]
    if options.include:
        return replace(options, include="@".join(part for part in parts if part.partition(":")[0] not in nodes))
    return replace(options, exclude="@".join((*parts, *nodes)))


def choose_workload(directory: Path, name: str, options: RunOptions, settings: Settings) -> Workload:
    """The declared workload, or the script alone where no name is given, with the options of this run."""
    chosen = (
        external.load(
            directory / "workloads", name, launchers.known(), external.roots(settings), rehearse=options.rehearse
        )
        if name
        else of_script(options)
    )
    known = {metric.name for metric in chosen.metrics}
    for criterion in options.expect:
        if criterion.metric not in known:
            hint = f"it has {', '.join(sorted(known))}" if known else "declare it in a workload.yml: docs/workloads.md"
            raise ConfigError(f"--expect: {chosen.name} has no metric `{criterion.metric}`", hint=hint)
    launcher = launcher_name(options.launcher) or chosen.launcher
    launchers.get(launcher)
    if launcher != chosen.launcher and SCRIPT in (launchers.name(launcher), chosen.launcher):
        itself = "starts its ranks itself" if chosen.launcher == SCRIPT else "does not start its ranks itself"
        raise ConfigError(f"{name} {itself}, so it cannot run under `{launcher}`", hint="leave out --launcher")
    same = launchers.name(launcher) == launchers.name(chosen.launcher)
    given = ((key, value) for key, value in options.arguments if not key.startswith(DEEPSPEED))
    extra = (argument for key, value in given for argument in external.words(chosen, key, value))
    if options.words:
        external.require_arguments(chosen, "arguments")
    return replace(
        chosen,
        arguments=(*chosen.arguments, *extra, *options.words),
        criteria=(*chosen.criteria, *options.expect),
        local_rank=chosen.local_rank or options.local_rank,
        launcher=launcher,
        # Declared launcher arguments are for the declared launcher only.
        launcher_arguments=(*(chosen.launcher_arguments if same else ()), *options.launcher_arguments),
        script=str(options.script.absolute()) if options.script else chosen.script,
        deepspeed=choose_config(chosen, options),
    )


def bounded(directory: Path, workload: Workload) -> Workload:
    """The workload with the bounds of its relative criteria. ConfigError where the run of one has not that metric."""
    return replace(workload, criteria=tuple(_bounded(directory, workload.name, one) for one in workload.criteria))


def _bounded(directory: Path, workload: str, criterion: Criterion) -> Criterion:
    if criterion.relative is None:
        return criterion
    sign, share, run = criterion.relative
    if getattr(criterion, BOUNDS[sign]) is not None:
        # Those of a batch are found once, before its first run.
        return criterion
    run_id = latest(directory, workload) if run == "latest" else store.find(directory, run)
    result = store.read_result(directory, run_id)
    metric = result.metrics.get(criterion.metric, {}) if result else {}
    value = metric.get(final(metric))
    if not isinstance(value, (int, float)):
        raise ConfigError(
            f"run {run_id} has recorded no `{criterion.metric}`, which a criterion of {workload} is relative to",
            hint=f"labctl show {run_id}",
        )
    bound = value + share * abs(value)
    return replace(criterion, relative=Relative(sign, share, run_id), **{BOUNDS[sign]: bound})


def latest(directory: Path, workload: str) -> str:
    """The id of the workload's latest run that passed. ConfigError where none has."""
    for run_id in store.ids(directory):
        result = store.read_result(directory, run_id)
        if result and (result.workload, result.verdict) == (workload, "PASS"):
            return run_id
    raise ConfigError(
        f"no run of {workload} has passed yet, and a criterion is relative to the latest",
        hint="labctl run without it first, or name a run: 'throughput>=-5% of RUN'",
    )


def of_script(options: RunOptions) -> Workload:
    """What is run and how, for a script that no workload declares. ConfigError without one."""
    if options.script is None:
        hint = "labctl run WORKLOAD, as `labctl workloads` lists them, or labctl run --script FILE"
        raise ConfigError("neither a workload nor a script is named", hint=hint)
    if options.rehearse:
        raise ConfigError("--rehearse shrinks a workload; a script is run as it is", hint="leave it out")
    script = options.script.absolute()
    configured = options.deepspeed_config or any(key.startswith(DEEPSPEED) for key, _ in options.arguments)
    return Workload(
        name=re.sub(r"[^A-Za-z0-9]+", "-", script.stem).strip("-")[:40] or "script",
        description=str(script),
        declared=f"--script {options.script}",
        directory=Path(),
        launcher=launcher_name(options.launcher) or ("torchrun" if script.suffix == ".py" else "mpirun"),
        script=str(script),
        arguments=(),
        environment=(),
        timeout=DAY,
        metrics=(),
        criteria=(),
        deepspeed={} if configured else None,
    )


def choose_config(chosen: Workload, options: RunOptions) -> deepspeed_config.Config | None:
    """The DeepSpeed configuration: the workload's or that of --deepspeed-config, with the keys of --set."""
    config = chosen.deepspeed
    if options.deepspeed_config:
        config = deepspeed_config.parse(read_text(options.deepspeed_config), str(options.deepspeed_config))
    for key, value in options.arguments:
        if key.startswith(DEEPSPEED):
            if value is None:
                raise ConfigError(f"--set {key}: no value", hint=f"--set {key}=VALUE")
            config = deepspeed_config.assign(config or {}, key.removeprefix(DEEPSPEED), value)
    if config is not None and chosen.deepspeed is None:
        raise ConfigError(
            f"{chosen.name} takes no DeepSpeed configuration",
            hint=f"{chosen.declared} declares no `deepspeed` section; `labctl workloads` lists the others",
        )
    deepspeed_config.check_sections(config or {}, config_source(chosen, options))
    return config


def unknown(workload: Workload, options: RunOptions) -> Iterator[str]:
    """Warnings for unknown launcher options, script options and DeepSpeed keys, which are passed on."""
    yield from launchers.unknown_options(workload.launcher, workload.launcher_arguments)
    given = [key for key, _ in options.arguments if not key.startswith(DEEPSPEED)]
    scripts = workload.directory.rglob("*.py") if given and not Path(workload.script).is_absolute() else ()
    known = {option for path in scripts for option in options_of(path)}
    for key in given:
        # argparse takes unique beginnings, too.
        if known and not any(option.startswith(key) for option in known):
            near = nearest(key, known)
            hint = f"; did you mean `{near}`?" if near else ""
            yield f"--set {key}: no script of {workload.name} has an option `--{key}`; passed on as it is{hint}"
    yield from deepspeed_config.unknown_keys(workload.deepspeed or {}, config_source(workload, options))


def options_of(script: Path) -> list[str]:
    """The options that a script declares; none where it cannot be read."""
    try:
        text = read_limited(script).decode("utf-8", "replace")
    except OSError:
        return []
    return re.findall(r"""["']--([\w-]+)["']""", text)


def config_source(workload: Workload, options: RunOptions) -> str:
    """The source of the DeepSpeed configuration that errors name: --set, a file, or the declaration."""
    if any(key.startswith(DEEPSPEED) for key, _ in options.arguments):
        return "--set"
    return str(options.deepspeed_config or workload.declared)


def build_job(
    lab: Lab, workload: Workload, options: RunOptions, now: datetime, warn: Callable[[str], None] = lambda _: None
) -> Job:
    """Build the job of a run, with a new id, on the chosen nodes; checks the workload's inputs on this host."""
    source = str(options.hostfile or "hostfile")
    chosen = job.choose(lab, entries(options), source, include=options.include, exclude=options.exclude)
    run_id = store.new_id(workload.name, now)
    directory = job.run_directory(lab, run_id)
    asked, checkpoint = recorded(workload, options), ""
    if options.resume:
        ranks = sum(len(slots) for _, slots in chosen)
        workload, checkpoint = checkpoints.going_on(lab, workload, options.resume, ranks)
    name = hostfile.job_name(options.hostfile.name) if options.hostfile else ""
    workload = bounded(lab.directory, workload)
    workload = inputs.resolve(lab, external.at(workload, name or f"{len(chosen)}xN", directory))
    if not options.script:
        inputs.require_mounted(lab, workload)
    workload, chosen_code = code.choose(lab, workload)
    if text := code.remark(chosen_code):
        warn(text)
    timeout = options.timeout or workload.timeout
    configured = config_source(workload, options)
    built = job.build(lab, workload, run_id, chosen, timeout, code=chosen_code.copies, config_source=configured)
    return replace(built, request=asked, resumed=checkpoint, retried=options.retried)


def entries(options: RunOptions) -> tuple[tuple[str, int], ...]:
    """The lines of the hostfile, as names and slots; none where none is given. ConfigError."""
    return hostfile.parse(read_text(options.hostfile), str(options.hostfile)) if options.hostfile else ()


def renamed(lab: Lab, options: RunOptions) -> str:
    """Which node each machine of the hostfile is, as text; empty where they are called as the lab calls them."""
    names = tuple(name for name, _ in entries(options))
    nodes = job.nodes_of(lab, names, str(options.hostfile))
    return ", ".join(f"{name} is {node.name}" for name, node in zip(names, nodes, strict=True) if name != node.name)


def read_text(path: Path) -> str:
    """Read a file named by an option. ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
