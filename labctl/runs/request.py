"""What a person asks of one run, and the job that comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from labctl import launchers
from labctl.config import hostfile
from labctl.config.settings import Settings
from labctl.errors import ConfigError
from labctl.model import Criterion, Job, Lab, Pairs, Workload
from labctl.runs import inputs, job, store
from labctl.workloads import deepspeed_config, external
from labctl.workloads.schema import launcher_name

DEEPSPEED = "deepspeed."
# The launcher of scripts that start their ranks by themselves.
SCRIPT = "script"


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
    chosen = external.load(
        directory / "workloads", name, launchers.known(), external.roots(found), rehearse=options.rehearse
    )
    known = {metric.name for metric in chosen.metrics}
    for criterion in options.expect:
        if criterion.metric not in known:
            hint = f"it has {', '.join(sorted(known))}"
            raise ConfigError(f"--expect: {name} has no metric `{criterion.metric}`", hint=hint)
    launcher = launcher_name(options.launcher) or chosen.launcher
    launchers.get(launcher)
    if launcher != chosen.launcher and SCRIPT in (launchers.name(launcher), chosen.launcher):
        itself = "starts its ranks by itself" if chosen.launcher == SCRIPT else "does not start its ranks by itself"
        raise ConfigError(f"{name} {itself}, so it cannot run under `{launcher}`", hint="leave out --launcher")
    same = launchers.name(launcher) == launchers.name(chosen.launcher)
    given = ((key, value) for key, value in options.arguments if not _of_deepspeed(key))
    words = (word for key, value in given for word in external.words(chosen, key, value))
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
        deepspeed_config.check_sections(config, where)
    for key, value in options.arguments:
        if _of_deepspeed(key):
            config = deepspeed_config.assign(config or {}, key.removeprefix(DEEPSPEED), value)
    if config is not None and chosen.deepspeed is None:
        raise ConfigError(
            f"{chosen.name} takes no DeepSpeed configuration",
            hint=f"{chosen.declared} declares no `deepspeed` section; `labctl workloads` lists the others",
        )
    return config


def unknown(task: Workload, options: RunOptions) -> Iterator[str]:
    """Warnings for options of the launcher and keys of DeepSpeed that labctl does not know and passes on."""
    yield from launchers.unknown_options(task.launcher, task.launcher_arguments)
    yield from deepspeed_config.unknown_keys(task.deepspeed or {}, config_source(task, options))


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
    task = inputs.resolve(lab, external.at(task, len(chosen), directory))
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
