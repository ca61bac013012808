"""Options of `labctl run`, and the job that is built from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import launchers
from labctl.config import hostfile
from labctl.config.settings import Settings
from labctl.errors import ConfigError, nearest
from labctl.jobs import checkpoints, code, inputs, job, program
from labctl.jobs.program import DEEPSPEED
from labctl.model import BOUNDS, Criterion, Job, Lab, Metric, Relative, Workload
from labctl.records import known_metrics, store
from labctl.records.verdict import final
from labctl.system.decode import convert
from labctl.workloads import deepspeed_config, external, script_options
from labctl.workloads.schema import launcher_name

SCRIPT = "script"
"""Launcher of scripts that start their ranks themselves."""


class RunOptions(Struct, frozen=True, kw_only=True):
    """Options of one run."""

    rehearse: bool = False
    timeout: float | None = None
    expect: tuple[Criterion, ...] = ()
    metrics: tuple[Metric, ...] = ()
    """Metrics beside the workload's; one of the same name replaces it."""
    arguments: tuple[tuple[str, str | None], ...] = ()
    """``key, value``: the script gets ``--key value``; ``deepspeed.key`` is a key of DeepSpeed's configuration."""
    words: tuple[str, ...] = ()
    """Additional arguments, passed on unchanged."""
    launcher: str = ""
    launcher_arguments: tuple[str, ...] = ()
    script: Path | None = None
    module: str = ""
    """Module to run as a program (``python -m``)."""
    command: tuple[str, ...] = ()
    """Program of the image to run, with its arguments."""
    project: Path | None = None
    """Root of the code to copy; None for the repository, else the folder."""
    install: bool = False
    """Install the project's Python package."""
    here: Path | None = None
    """Directory that the person stands in."""
    per: Literal["", "rank", "node", "once"] = ""
    """Start the program for each rank, for each node or once in the launcher; empty for as is usual for it."""
    local_rank: bool = False
    deepspeed_config: Path | None = None
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    detach: bool = False
    """Return once it is launched."""
    wait: bool = False
    """Wait for other runs that use its nodes."""
    resume: str = ""
    """Id of the run to resume, or ``latest``."""
    retries: int = 0
    retried: tuple[str, ...] = ()
    """Earlier attempts, and how each ended."""
    batch: str = ""
    """Id of the batch and log of the job that it is a run of; else empty."""


# Options of a single run, which other runs do not take from its record.
OWN = ("detach", "wait", "resume", "retries", "retried", "batch")


class RecordedRequest(Struct, frozen=True):
    """Workload, empty for a program, and options of a run, as ``recorded`` returns them."""

    workload: str
    options: RunOptions


def recorded(workload: Workload, options: RunOptions) -> dict[str, Any]:
    """Return workload (empty for a program), non-empty options that `--resume` uses again, and any batch, as JSON."""
    asked = msgspec.to_builtins(options, enc_hook=lambda path: str(path.absolute()))
    kept = {key: value for key, value in asked.items() if value and key not in OWN}
    of = {"batch": options.batch} if options.batch else {}
    return {"workload": workload.name if workload.directory != Path() else "", "options": kept, **of}


def resumed(directory: Path, name: str, options: RunOptions) -> tuple[str, RunOptions]:
    """Return workload and options to resume a run, overridden by those given now. ConfigError if it cannot be.

    It is raised if the run does not exist, is running, or is of another workload than ``name``.
    """
    run_id = store.find(directory, options.resume)
    if store.state(directory, run_id) == "running":
        raise ConfigError(f"run {run_id} is still running", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    run = store.job(store.directory(directory, run_id))
    try:
        before = convert(run.request, RecordedRequest)
    except ValueError as error:
        hint = f"labctl run {run.workload}, with the options that it had"
        raise ConfigError(
            f"run {run_id} has no record of its options: it was stopped early, an earlier labctl recorded it,"
            " or its job.json is damaged",
            hint=hint,
        ) from error
    if name and name != run.workload:
        raise ConfigError(f"run {run_id} ran `{run.workload}`, not `{name}`", hint="leave out the workload")
    return before.workload, replace(over(before.options, options), resume=run_id)


def over(before: RunOptions, now: RunOptions) -> RunOptions:
    """Return ``now`` with unset options of ``before``, except OWN; ``--set`` merged by key, nodes not merged."""
    nodes = ("hostfile", "include", "exclude")
    kept = [key for key in RunOptions.__struct_fields__ if key not in (*OWN, "arguments")]
    if any(getattr(now, key) for key in nodes):
        kept = [key for key in kept if key not in nodes]
    values = {key: getattr(now, key) or getattr(before, key) for key in kept}
    return replace(now, **values, arguments=tuple({**dict(before.arguments), **dict(now.arguments)}.items()))


def without(options: RunOptions, nodes: tuple[str, ...]) -> RunOptions:
    """Return options that exclude these nodes: removed from --include if given, else added to --exclude."""
    named = options.include or options.exclude
    parts = [part for part in re.split("@" if ":" in named else "[@,]", named) if part]
    if options.include:
        return replace(options, include="@".join(part for part in parts if part.partition(":")[0] not in nodes))
    return replace(options, exclude="@".join((*parts, *nodes)))


def choose_workload(directory: Path, name: str, options: RunOptions, settings: Settings) -> Workload:
    """Load the workload, or build the program's without a name, with the options applied. ConfigError if unfit."""
    chosen = _declared(directory, name, options, settings) if name else program.of(options)
    chosen = with_metrics(chosen, options, is_program=not name)
    launcher = _launcher(name, chosen, options)
    same = launchers.name(launcher) == launchers.name(chosen.launcher)
    given = [(key, value) for key, value in options.arguments if not key.startswith(DEEPSPEED)]
    extra = chain.from_iterable(external.words(chosen, key, value) for key, value in given)
    if options.words:
        external.require_arguments(chosen, "arguments")
    return replace(
        chosen,
        arguments=(*chosen.arguments, *extra, *options.words),
        local_rank=chosen.local_rank or options.local_rank,
        launcher=launcher,
        # Declared launcher arguments are for the declared launcher only.
        launcher_arguments=(*(chosen.launcher_arguments if same else ()), *options.launcher_arguments),
        script=str(options.script.absolute()) if options.script else chosen.script,
        project=program.project_of(options) if options.script else chosen.project,
        deepspeed=choose_config(chosen, options),
    )


def _declared(directory: Path, name: str, options: RunOptions, settings: Settings) -> Workload:
    """Load a workload of the lab or an external family. ConfigError if not found, or for options of programs."""
    if options.module or options.per:
        flag = "-m" if options.module else program.FLAGS[options.per]
        raise ConfigError(f"{flag}: `{name}` is a workload, which names its program itself", hint=f"leave out {name}")
    if (options.project or options.install) and not options.script:
        raise ConfigError(f"--project and --install: `{name}` is a workload", hint="`project:` in its workload.yml")
    roots = external.roots(settings)
    return external.load(directory / "workloads", name, launchers.accepted(), roots, rehearse=options.rehearse)


def with_metrics(workload: Workload, options: RunOptions, *, is_program: bool) -> Workload:
    """Return the workload with options' metrics and criteria. ConfigError for a criterion on an unknown metric.

    Without metrics of its own it has all that are printed in known ways, else those that criteria are about.
    ConfigError for a criterion on another metric, unless it is a program, which no file describes.
    """
    metrics = {metric.name: metric for metric in (*workload.metrics, *options.metrics)}
    asked = (*workload.criteria, *options.expect)
    criteria = tuple(criterion if criterion.metric in metrics else _on_found(criterion) for criterion in asked)
    undeclared = [criterion.metric for criterion in criteria if criterion.metric not in metrics]
    if not is_program:
        _require_known(workload.name, metrics, undeclared)
    how: Literal["none", "asked", "all"] = "asked" if undeclared else "none"
    return replace(
        workload,
        metrics=tuple(metrics.values()),
        criteria=criteria,
        known_metrics=how if workload.metrics else "all",
    )


def _on_found(criterion: Criterion) -> Criterion:
    """Return a criterion on the name that its metric gets when it is found in the output."""
    return replace(criterion, metric=known_metrics.found_name(criterion.metric))


def _require_known(workload: str, declared: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError for a metric name that labctl cannot find in output, with declared ones as hint."""
    for name in names:
        if not known_metrics.name_of(name):
            has = ", ".join(sorted(declared))
            hint = f"declare it in its workload.yml, or by `labctl run --metric '{name}=REGEX'`"
            hint = f"it has {has}; {hint}" if has else hint
            raise ConfigError(f"{workload} has no metric `{name}`", hint=hint)


def _launcher(name: str, workload: Workload, options: RunOptions) -> str:
    """Return the launcher to use: the option's, else the workload's. ConfigError if unknown or it cannot be used."""
    launcher = (launcher_name(options.launcher) if name else "") or workload.launcher
    launchers.get(launcher)
    if launcher != workload.launcher and SCRIPT in (launchers.name(launcher), workload.launcher):
        itself = "starts its ranks itself" if workload.launcher == SCRIPT else "does not start its ranks itself"
        raise ConfigError(f"{name} {itself}, so it cannot run under `{launcher}`", hint="leave out --launcher")
    return launcher


def bounded(directory: Path, workload: Workload) -> Workload:
    """Return the workload with bounds for relative criteria, from their reference run. ConfigError if it has none."""
    return replace(
        workload, criteria=tuple(_bounded(directory, workload.name, criterion) for criterion in workload.criteria)
    )


def _bounded(directory: Path, workload: str, criterion: Criterion) -> Criterion:
    """Return a relative criterion with its bound and run; others unchanged. ConfigError if no value is recorded."""
    if criterion.relative is None:
        return criterion
    sign, share, run = criterion.relative
    if getattr(criterion, BOUNDS[sign]) is not None:
        # In a batch the bounds are set once, before its first run.
        return criterion
    run_id = latest(directory, workload) if run == "latest" else store.find(directory, run)
    result = store.read_result(directory, run_id)
    recorded = result.metrics if result else {}
    name = criterion.metric if criterion.metric in recorded else known_metrics.stand_in(criterion.metric, recorded)
    metric = recorded.get(name, {})
    value = metric.get(final(metric))
    if not isinstance(value, (int, float)):
        raise ConfigError(
            f"run {run_id} has no `{criterion.metric}`, to which a criterion of {workload} is relative",
            hint=f"labctl show {run_id}",
        )
    bound = value + share * abs(value)
    return replace(criterion, relative=Relative(sign, share, run_id), **{BOUNDS[sign]: bound})


def latest(directory: Path, workload: str) -> str:
    """Return the id of the workload's latest run with verdict PASS. ConfigError if there is none."""
    for run_id in store.ids(directory):
        result = store.read_result(directory, run_id)
        if result and (result.workload, result.verdict) == (workload, "PASS"):
            return run_id
    raise ConfigError(
        f"no run of {workload} has passed yet, and a criterion is relative to the latest",
        hint="labctl run without it first, or name a run: 'throughput>=-5% of RUN'",
    )


def choose_config(chosen: Workload, options: RunOptions) -> deepspeed_config.Config | None:
    """Return DeepSpeed's configuration of file or workload with --set's keys; None if none. ConfigError if unfit.

    It is raised if the workload takes none, or a key has no value.
    """
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
    """Yield remarks on the program and warnings on unknown launcher options, script options and DeepSpeed keys."""
    yield from program.remarks(options)
    yield from launchers.unknown_options(workload.launcher, workload.launcher_arguments)
    given = [key for key, _ in options.arguments if not key.startswith(DEEPSPEED)]
    known = bool(given) and script_options.are_all_declared(workload.directory, workload.script)
    declared = script_options.declared(workload.directory.rglob("*.py")) if known else frozenset()
    for key in given:
        # argparse accepts unique prefixes too.
        if declared and not any(option.startswith(key) for option in declared):
            near = nearest(key, declared)
            hint = f"; did you mean `{near}`?" if near else ""
            yield f"--set {key}: no script of {workload.name} has an option `--{key}`; passed on as it is{hint}"
    yield from deepspeed_config.unknown_keys(workload.deepspeed or {}, config_source(workload, options))


def config_source(workload: Workload, options: RunOptions) -> str:
    """Return where DeepSpeed's configuration is from, for errors: `--set`, the file, or the workload's."""
    if any(key.startswith(DEEPSPEED) for key, _ in options.arguments):
        return "--set"
    return str(options.deepspeed_config or workload.declared)


def build_job(
    lab: Lab,
    workload: Workload,
    options: RunOptions,
    now: datetime,
    warn: Callable[[str], None] = lambda _: None,
    *,
    run_id: str = "",
) -> Job:
    """Build a run's job by its options, nothing written; warn of files not copied. ConfigError if unfit.

    ``warn`` is told of files that are not copied. It is also raised for inputs missing on this host.
    """
    source = str(options.hostfile or "hostfile")
    chosen = job.choose(lab, entries(options), source, include=options.include, exclude=options.exclude)
    run_id = run_id or store.new_id(workload.name, now)
    directory = job.run_directory(lab, run_id)
    asked, checkpoint = recorded(workload, options), ""
    if options.resume:
        ranks = sum(len(slots) for _, slots in chosen)
        workload, checkpoint = checkpoints.going_on(lab, workload, options.resume, ranks)
    workload = bounded(lab.directory, workload)
    workload = inputs.resolve(lab, external.at(workload, job_name(options, len(chosen)), directory))
    if workload.directory != Path() and not options.script:
        inputs.require_mounted(lab, workload)
    workload, chosen_code = code.choose(lab, workload)
    if text := code.remark(chosen_code):
        warn(text)
    timeout = options.timeout or workload.timeout
    configured = config_source(workload, options)
    built = job.build(lab, workload, run_id, chosen, timeout, code=chosen_code.copies, config_source=configured)
    files = (*built.files, *chosen_code.files)
    return replace(built, files=files, request=asked, resumed=checkpoint, retried=options.retried)


def job_name(options: RunOptions, nodes: int) -> str:
    """Return the job's name from the hostfile's name, such as ``2xN_batch0001``; else ``2xN`` for two nodes."""
    name = hostfile.job_name(options.hostfile.name) if options.hostfile else ""
    return name or f"{nodes}xN"


def entries(options: RunOptions) -> tuple[tuple[str, int], ...]:
    """Return name and slots of each line of the options' hostfile; () without one. ConfigError if invalid."""
    if options.hostfile is None:
        return ()
    return hostfile.parse(read_text(options.hostfile), str(options.hostfile))


def renamed(lab: Lab, options: RunOptions) -> str:
    """Return hostfile names that differ from the lab's nodes, as "a is worker-0, ..."; empty if none does."""
    names = tuple(name for name, _ in entries(options))
    nodes = job.nodes_of(lab, names, str(options.hostfile))
    return ", ".join(f"{name} is {node.name}" for name, node in zip(names, nodes, strict=True) if name != node.name)


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text. ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
