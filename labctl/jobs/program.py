"""Programs that no workload declares: a script, a module or a command, as `labctl run` is given them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from labctl.errors import ConfigError
from labctl.jobs import project
from labctl.model import ONCE, PER_NODE, Project, Workload
from labctl.workloads.schema import launcher_name

if TYPE_CHECKING:
    from labctl.jobs.request import RunOptions

DEEPSPEED = "deepspeed."
"""Prefix of options that are keys of DeepSpeed's configuration."""
DAY = 24 * 3600
"""Default time limit of a program, in seconds."""
Per = Literal["rank", "node", "once"]
FLAGS: Mapping[str, str] = {"rank": "--per-rank", "node": "--per-node", "once": "--once"}
"""Options of `labctl run` that say how often a program starts."""
STARTERS: Mapping[str, Per] = {
    "accelerate": "node",
    "torchrun": "node",
    "torch.distributed.run": "node",
    "torch.distributed.launch": "node",
}
"""Programs and modules that start the ranks of their node themselves."""
BY_HOSTFILE = {"deepspeed": "deepspeed", "horovodrun": "horovod", "mpiexec": "mpirun", "mpirun": "mpirun"}
"""Programs that start all ranks, by a hostfile, and labctl's launcher of each."""


def of(options: RunOptions) -> Workload:
    """Build a workload of the options' script, module or command. ConfigError for none, both, or --rehearse."""
    script = plain(options.script) if options.script else None
    _require_one(options)
    if options.rehearse:
        raise ConfigError("--rehearse shrinks a workload; a program is run as it is", hint="leave it out")
    configured = options.deepspeed_config or any(key.startswith(DEEPSPEED) for key, _ in options.arguments)
    stem = script.stem if script else options.module or Path(options.command[0]).name
    return Workload(
        name=re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:40] or "script",
        description=text(options),
        declared=text(options),
        directory=Path(),
        launcher=launcher(options),
        script=str(script or ""),
        module=options.module,
        command=options.command,
        project=project_of(options),
        arguments=(),
        environment=(),
        timeout=DAY,
        metrics=(),
        criteria=(),
        deepspeed={} if configured else None,
    )


def plain(script: Path) -> Path:
    """Return the absolute path of a script, without ``..``."""
    path = script.absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def project_of(options: RunOptions) -> Project | None:
    """Return the project of the options' program; None if there is none to copy."""
    return project.choose(options.script, given=options.project, here=options.here, install=options.install)


def _require_one(options: RunOptions) -> None:
    """Raise ConfigError unless exactly one of script, module and command is given."""
    given = [options.script, options.module, options.command]
    if not any(given):
        hint = "labctl run WORKLOAD, as `labctl workloads` lists them, --script FILE, -m MODULE, or -- COMMAND"
        raise ConfigError("name a workload or a program", hint=hint)
    if sum(map(bool, given)) > 1:
        raise ConfigError("--script and -m both name a program", hint="leave one of them out")


def text(options: RunOptions) -> str:
    """Return what names the program to `labctl run`: ``--script FILE``, ``-m MODULE`` or ``-- COMMAND``."""
    if options.script:
        return f"--script {shlex.quote(str(options.script))}"
    return f"-m {options.module}" if options.module else f"-- {shlex.join(options.command)}"


def per(options: RunOptions) -> Per:
    """Return ``rank``, ``node`` or ``once``, by options or the program's name. ConfigError for mpirun and alike."""
    if options.per:
        return options.per
    command = options.command
    named = Path(command[0]).name if command else options.module
    if re.fullmatch(r"python[\d.]*", named) and command[1:2] == ("-m",):
        named = "".join(command[2:3])
    _require_all_nodes(named, command)
    return STARTERS.get(named, "rank")


def _require_all_nodes(named: str, command: Sequence[str]) -> None:
    """Raise ConfigError for `mpirun` and the like, or `accelerate launch` without --num_machines."""
    if used := BY_HOSTFILE.get(named):
        raise ConfigError(
            f"{named} starts the ranks itself, and so does labctl",
            hint=f"labctl run --launcher {used} --script FILE -- ARGUMENTS; or --once, with $LABCTL_HOSTFILE",
        )
    machines = ("--num_machines", "--num-machines", "--config_file", "--config-file")
    names_machines = any(word.startswith(machines) for word in command)
    if named == "accelerate" and command[1:2] == ("launch",) and not names_machines:
        raise ConfigError(
            "accelerate launch starts ranks on one machine only, unless --num_machines names more",
            hint="docs/bring-your-own.md has the command; --per-node starts this one as it is",
        )


def launcher(options: RunOptions) -> str:
    """Return the launcher for the program. ConfigError if --launcher does not fit --per-node or --once."""
    often, asked = per(options), launcher_name(options.launcher)
    if often == "rank":
        runs_python = options.module or options.command or options.script is None or options.script.suffix == ".py"
        return asked or ("torchrun" if runs_python else "mpirun")
    usual = PER_NODE if often == "node" else ONCE
    if asked and asked != usual:
        flag = FLAGS[often]
        hint = "--per-rank starts it for each rank" if not options.per else f"leave out {flag} or --launcher"
        raise ConfigError(f"{text(options)} runs {flag[2:].replace('-', ' ')}, not under `{asked}`", hint=hint)
    return usual


def remarks(options: RunOptions) -> Iterator[str]:
    """Yield notes on how often a program starts if that was not asked for, and on what its project is."""
    often, is_program = per(options), bool(options.command or options.module)
    if is_program and not options.per and often != "rank":
        place = "on each node" if often == "node" else "in the launcher"
        why = f"it starts its ranks itself, so it runs once {place}; --per-rank starts it for each rank"
        yield f"{text(options)}: {why}"
    if options.project or not (is_program or options.script):
        return
    if said := project.remark(project_of(options), script=options.script, here=options.here):
        yield said
