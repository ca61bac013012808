"""Input paths of a run: checked before it starts, and translated to paths in the containers."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from labctl import naming
from labctl.errors import ConfigError, nearest
from labctl.model import Lab, Workload
from labctl.system.files import read_limited

RUNS = "runs"
LONGEST_FIRST_LINE = 256
"""Bytes of a script's first line that the kernel reads."""


def resolve(lab: Lab, workload: Workload) -> Workload:
    """Return the workload with input paths as container paths. ConfigError if one is missing or cannot be used.

    It is raised for an input that is required and missing, not found, of another kind, or not mounted.
    """
    require(workload)
    return _with_paths(workload, lambda option, value, kind: _resolve(lab, workload.name, option, value, kind))


def named_models(workload: Workload, place: str) -> Workload:
    """Return the workload with model inputs such as ``facebook/opt-350m`` as paths below ``place``."""

    def located(_: str, value: str, kind: str) -> str:
        """Return the path below ``place`` if the value is the name of a model; else the value."""
        named = kind == "model" and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value)
        return f"{place}/{value}" if named else value

    return _with_paths(workload, located)


def _with_paths(workload: Workload, path_of: Callable[[str, str, str], str]) -> Workload:
    """Return the workload with each given input's path replaced by ``path_of(option, path, kind)``."""
    arguments = list(workload.arguments)
    for index, option, value, kind in _given(workload):
        path = path_of(option, value, kind)
        arguments[index] = f"{option}={path}" if arguments[index].startswith(f"{option}=") else path
    return replace(workload, arguments=tuple(arguments))


def require(workload: Workload) -> None:
    """Raise ConfigError if the workload's arguments lack a required input."""
    options = [*map(_option, workload.arguments)]
    for name in workload.required_inputs:
        if _option(f"--{name}") not in options:
            raise ConfigError(f"{workload.name} needs a path for --{name}", hint=f"--set {name}=PATH, or --rehearse")


def given(workload: Workload) -> tuple[str, ...]:
    """Return the paths that a workload's arguments give for its declared inputs."""
    return tuple(value for _, _, value, _ in _given(workload))


def earlier(lab: Lab, workload: Workload) -> tuple[str, ...]:
    """Return sorted ids of runs whose files a workload reads: by its inputs, or by paths in its words."""
    runs = lab.directory / RUNS
    places = (locate(lab, path) for path in given(workload))
    inside = (place.relative_to(runs) for place in places if place.is_relative_to(runs))
    declared = {path.parts[0] for path in inside if path.parts and not path.parts[0].startswith(".")}
    return tuple(sorted(declared | _named(lab, runs, (*workload.command, *workload.arguments))))


def _named(lab: Lab, runs: Path, words: Iterable[str]) -> set[str]:
    """Return ids of existing runs whose container path is in one of the words; none if runs/ is not mounted.

    What a program reads is not declared: its ``--resume=/workspace/runs/ID/ckpt.pt`` may be in a shell's command.
    """
    target = next((mount.target for mount in lab.mounts if mount.source == str(runs)), None)
    if target is None:
        return set()
    pattern = re.compile(rf"{re.escape(target)}/(\w[\w.-]*)")
    ids = chain.from_iterable(map(pattern.findall, words))
    return {run for run in ids if (runs / run).is_dir() and not (runs / run).is_symlink()}


def _given(workload: Workload) -> Iterator[tuple[int, str, str, str]]:
    """Yield (argument index, option, path, kind) of each input given; the last one counts if it is repeated."""
    arguments = workload.arguments
    # The last of a repeated argument counts: the path it replaces need not exist.
    last = {_option(argument): index for index, argument in enumerate(arguments)}
    for name, kind in workload.inputs:
        if (index := last.get(_option(f"--{name}"))) is None:
            continue
        option, equals, value = arguments[index].partition("=")
        if equals:
            yield index, option, value, kind
        elif index + 1 < len(arguments):
            yield index + 1, option, arguments[index + 1], kind


def _option(argument: str) -> str:
    """Return an argument's option with ``-`` for ``_``, without its value: `--data-path` of `--data_path=mnist`."""
    return argument.partition("=")[0].replace("_", "-")


def _resolve(lab: Lab, workload: str, option: str, value: str, kind: str) -> str:
    """Return an input's path in the containers. ConfigError if it is missing on this host, or is not mounted."""
    path = locate(lab, value)
    # Paths on other hosts are checked there by the launcher; runs are all on this machine.
    elsewhere = naming.sent(lab.hosts[0]) and not path.is_relative_to(lab.directory / RUNS)
    problem = None if elsewhere else _problem(path, kind)
    if problem:
        hint = f"checked {path}; relative paths are below {cache_of(lab)} (HOST_CACHE_PATH)"
        raise ConfigError(f"{workload}: {option} {shlex.quote(value)}: {problem}", hint=hint)
    inside = in_container(lab, path)
    if inside is None:
        mount = shlex.quote(f"{path}:/data")
        raise ConfigError(
            f"{workload}: {option} {shlex.quote(value)}: {path} is not mounted in the containers",
            hint=f"move it below {cache_of(lab)} (HOST_CACHE_PATH), or add {mount} to LAB_MOUNTS in .env",
        )
    return inside


def locate(lab: Lab, value: str) -> Path:
    """Return the host path of an input: a container path translated back, a relative one below the cache."""
    for mount in lab.mounts:
        if PurePosixPath(value).is_relative_to(mount.target):
            return Path(mount.source) / PurePosixPath(value).relative_to(mount.target)
    return Path(cache_of(lab)) / Path(value).expanduser()


def cache_of(lab: Lab) -> str:
    """Return the host path of the folder mounted as ``.cache``."""
    return next(mount.source for mount in lab.mounts if mount.target.endswith("/.cache"))


def in_container(lab: Lab, path: Path) -> str | None:
    """Return a host path's path in the containers, links followed; None if it is not mounted."""
    from labctl.system.mounts import mounted_at

    return mounted_at(path.resolve(), ((mount.source, mount.target) for mount in lab.mounts))


def _lies_in_mount(lab: Lab, path: Path) -> bool:
    """Tell if a path, links not followed, is in a mounted folder."""
    from labctl.system.mounts import mounted_at

    named = Path(os.path.normpath(path))
    mounts = [(mount.source, mount.target) for mount in lab.mounts]
    return any(mounted_at(named, mounts, apart=apart) for apart in (False, True))


def _problem(path: Path, kind: str) -> str | None:
    """Return why an input of this kind cannot be used, such as ``no such file``; None if it can."""
    if kind == "path":
        return None if path.exists() else "no such file or directory"
    if kind == "file":
        return None if path.is_file() else "no such file"
    if not path.is_dir():
        return "no such directory"
    return _model_problem(path / "config.json") if kind == "model" else None


def _model_problem(config: Path) -> str | None:
    """Return why a model's config.json cannot be used: missing or not JSON; None if it can."""
    if not config.is_file():
        return "not a model directory (no config.json)"
    try:
        json.loads(read_limited(config))
    except (OSError, ValueError, RecursionError) as error:
        return f"config.json cannot be read: {error}"
    return None


def require_mounted(lab: Lab, workload: Workload) -> None:
    """Raise ConfigError if a workload declares a project or script outside of the mounted folders."""
    path, project = Path(workload.script), workload.project
    own = workload.directory.resolve()
    if project and not project.root.is_relative_to(own) and in_container(lab, project.root) is None:
        folder = shlex.quote(f"{project.root}:{project.root}:ro")
        raise ConfigError(
            f"{workload.declared.partition(':')[0]}: `project` {project.root} is not in a folder that the lab mounts",
            hint=f"add {folder} to LAB_MOUNTS in .env",
        )
    if path.is_absolute() and path.is_file() and in_container(lab, path) is None:
        folder = shlex.quote(f"{path.parent}:{path.parent}:ro")
        raise ConfigError(
            f"{workload.declared.partition(':')[0]}: `script` {path} is not in a folder that the lab mounts",
            hint=f"add {folder} to LAB_MOUNTS in .env, or: "
            f"labctl run {workload.name} --script {shlex.quote(str(path))}",
        )


def require_unix_lines(workload: Workload) -> None:
    """Raise ConfigError if a script of a workload has Windows line ends."""
    if path := windows_script(workload):
        raise ConfigError(f"{workload.name}: {path} has Windows line ends (CRLF)", hint=to_unix(path))


def windows_script(workload: Workload) -> Path | None:
    """Return the first script that the kernel cannot start, as its interpreter's name ends with a carriage return."""
    for name in filter(None, (workload.script, workload.prepare)):
        path = workload.directory / name
        # Python itself reads either kind of lines.
        if path.suffix == ".py" or not path.is_file() or not os.access(path, os.R_OK):
            continue
        with path.open("rb") as file:
            first = file.readline(LONGEST_FIRST_LINE)
        if first.startswith(b"#!") and first.endswith(b"\r\n"):
            return path
    return None


def to_unix(path: Path) -> str:
    """Return the command that gives a file Unix line ends."""
    return f"sed -i 's/\\r$//' {shlex.quote(str(path))}"


def require_script(lab: Lab, workload: Workload) -> None:
    """Raise ConfigError if a script is missing, a directory, not executable, or a link out of a mount."""
    path = Path(workload.script)
    if path.is_dir():
        raise ConfigError(f"{workload.name}: {path} is a directory", hint="name the script in it")
    if not path.is_file():
        near = nearest(path.name, [sibling.name for sibling in path.parent.glob("*") if sibling.is_file()])
        raise ConfigError(f"script not found: {path}", hint=f"did you mean `{near}`?" if near else "")
    if path.suffix != ".py" and not os.access(path, os.X_OK):
        hint = f"chmod +x {shlex.quote(str(path))}, or use the suffix .py for Python"
        raise ConfigError(f"{workload.name}: {path} is neither Python nor executable", hint=hint)
    if _lies_in_mount(lab, path) and in_container(lab, path) is None:
        raise ConfigError(
            f"{workload.name}: {path} is a link to a file outside the mounted folders, where containers may write",
            hint=f"name the file itself: --script {shlex.quote(str(path.resolve()))}",
        )
