"""Code of a run: a copy of the workload's folder, or of a script's folder, which ranks may change."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePath

from msgspec import Struct
from msgspec.structs import replace

from labctl.config import context
from labctl.errors import ConfigError
from labctl.jobs import inputs
from labctl.jobs.job import WORK
from labctl.model import Copy, Lab, Workload
from labctl.system import git, human
from labctl.system.files import PASSWORDS, SKIPPED, leads_out, walk

LARGEST = 50_000_000
"""Largest file beside the script to copy, in bytes: data belong into the cache."""
MOST_BYTES, MOST_FILES = 500_000_000, 10_000
"""Largest folder to copy."""
KEPT = (".env", ".lab", ".devcontainer", "runs")
"""Files and folders of labctl in a lab directory, which are not copied."""
SHOWN = 5
"""Files that a warning names."""


class Code(Struct, frozen=True):
    """Files to copy into a run, and the names that are left out, with the reason."""

    copies: tuple[Copy, ...]
    left_out: tuple[str, ...] = ()


class _TooMuchError(Exception):
    """A folder has more than MOST_BYTES or MOST_FILES."""


def choose(lab: Lab, workload: Workload) -> tuple[Workload, Code]:
    """Return the workload with its script relative to the folder to copy, and the folder's files. ConfigError if unfit.

    It is raised if a script cannot be started, a workload's folder is too large, or git fails.
    """
    path = Path(workload.script)
    if not path.is_absolute():
        try:
            folder = workload.directory.resolve()
            return workload, _read(folder, walk(folder), workload.script)
        except _TooMuchError:
            raise ConfigError(
                f"{workload.directory} holds more than a run copies: {MOST_FILES} files, {human.size(MOST_BYTES)}",
                hint="move data below HOST_CACHE_PATH",
            ) from None
    inputs.require_script(lab, workload)
    path = path.resolve()
    listed = git.files(path.parent, "--exclude-standard", "--cached", "--others")
    # If git ignores the folder itself, its list is empty: copy all.
    names, ignored = (listed, _ignored(path)) if listed else (walk(path.parent, hidden=False), ())
    others = (name for name in names if name != path.name)
    try:
        code = _read(path.parent, (path.name, *_outside_labs(lab, path.parent, others)), path.name)
        code = replace(code, left_out=(*code.left_out, *ignored))
    except _TooMuchError:
        alone = f"the rest of {path.parent}, which holds more than {MOST_FILES} files or {human.size(MOST_BYTES)}"
        code = Code(
            _read(path.parent, [path.name], path.name).copies, (f"{alone} (give the script a folder of its own)",)
        )
    return replace(workload, script=path.name), code


def remark(code: Code) -> str:
    """Return a warning about files that are not copied; empty if there are none."""
    if not code.left_out:
        return ""
    return f"not copied into the run: {human.listed(code.left_out, SHOWN)}"


def _outside_labs(lab: Lab, folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names except labctl's own files in a lab directory, of this lab or another."""

    @cache
    def is_lab(directory: Path) -> bool:
        return directory == lab.directory or context.is_lab(directory)

    for name in names:
        parts = PurePath(name).parts
        if not any(part in KEPT and is_lab(folder.joinpath(*parts[:at])) for at, part in enumerate(parts)):
            yield name


def _ignored(script: Path) -> Iterator[str]:
    """Yield ``NAME (ignored by git)`` for each path beside a script that git ignores, but not hidden ones."""
    for name in git.files(script.parent, "--exclude-standard", "--others", "--ignored", "--directory"):
        path = Path(name)
        if path.name not in (script.name, *SKIPPED) and not any(part.startswith(".") for part in path.parts):
            yield f"{shlex.quote(name)} (ignored by git)"


def _read(folder: Path, names: Iterable[str], script: str) -> Code:
    """Sort names into files to copy and left out; the script may have any size. _TooMuchError if there are too many.

    _TooMuchError if it is more than a run copies, ConfigError if the script cannot be copied.
    """

    @cache
    def is_real(directory: Path) -> bool:
        return directory == folder or (is_real(directory.parent) and stat.S_ISDIR(directory.lstat().st_mode))

    copies: list[Copy] = []
    left_out: list[str] = []
    size = 0
    for name in names:
        try:
            # Git may list removed files, and files below a folder that is now a file or link.
            if not is_real((folder / name).parent):
                continue
            status = (folder / name).lstat()
        except FileNotFoundError:
            continue
        is_script, reason = name == script, _reason(folder, name, status)
        if is_script and reason:
            path = folder / name
            raise ConfigError(f"script {path} cannot be copied into the run: {reason}", hint=f"ls -l {path}")
        if not is_script and status.st_size > LARGEST:
            reason = reason or human.size(status.st_size)
        if reason:
            left_out.append(f"{shlex.quote(name)} ({reason})")
            continue
        size += 0 if is_script else status.st_size
        copies.append(Copy(path=f"{WORK}/{name}", root=folder, name=name))
        if size > MOST_BYTES or len(copies) > MOST_FILES:
            raise _TooMuchError
    return Code(tuple(copies), tuple(left_out))


def _reason(folder: Path, name: str, status: os.stat_result) -> str:
    """Return the reason to leave a name out; empty to copy it."""
    if stat.S_ISLNK(status.st_mode):
        return "a link that leads out" if leads_out(name, str((folder / name).readlink())) else ""
    if stat.S_ISDIR(status.st_mode):
        return "a repository of its own"
    if not stat.S_ISREG(status.st_mode):
        return "no file"
    if PurePath(name).name in PASSWORDS:
        return "may contain passwords"
    return "" if os.access(folder / name, os.R_OK) else "not readable"
