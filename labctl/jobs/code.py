"""Code of a run: a copy of the workload's folder, or of a person's project, which ranks may change."""

from __future__ import annotations

import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePath

from msgspec import Struct
from msgspec.structs import replace

from labctl.config import context
from labctl.errors import ConfigError
from labctl.jobs import inputs
from labctl.jobs import project as projects
from labctl.jobs.job import WORK
from labctl.model import Copy, File, Lab, Project, Workload
from labctl.system import git, human
from labctl.system.files import PASSWORDS, SKIPPED, leads_out, walk

LARGEST = 50_000_000
"""Largest file beside the script to copy, in bytes: data belong into the cache."""
MOST_BYTES, MOST_FILES = 500_000_000, 50_000
"""Largest folder to copy."""
DIFFERENCE, MOST_DIFFERENCE = "project.diff", 1_000_000
"""File of a run's record with what its project has that its commit has not, and most of its characters."""
NOT_CHECKED_OUT = "a submodule that is not checked out: git submodule update --init"
SHOWN = 5
"""Files that a warning names."""
LARGEST_FOLDERS = 3
"""Folders that the refusal of too large a project names."""


class Code(Struct, frozen=True):
    """Files to copy into a run, and the names that are left out, with the reason."""

    copies: tuple[Copy, ...]
    left_out: tuple[str, ...] = ()
    difference: str = ""
    """Changes since the last commit of its repository, as a patch, at most MOST_DIFFERENCE characters."""

    @property
    def files(self) -> tuple[File, ...]:
        """Return the file with the git difference for the run's record; none if nothing differs."""
        return (File(path=DIFFERENCE, content=self.difference),) if self.difference else ()


def choose(lab: Lab, workload: Workload) -> tuple[Workload, Code]:
    """Return the workload with its script relative to the start folder, and code to copy. ConfigError if unfit.

    It is raised if a script cannot be started, the folder to copy is too large, or git fails.
    """
    inputs.require_unix_lines(workload)
    path = Path(workload.script)
    if workload.project is None and not path.is_absolute():
        folder = workload.directory.resolve()
        names: Iterable[str] = walk(folder) if workload.script else ()
        return workload, _read(folder, names, WORK, workload.script, hint="move data below HOST_CACHE_PATH")
    path = workload.directory / path
    if workload.script:
        inputs.require_script(lab, replace(workload, script=str(path)))
    project = workload.project or Project(root=path.resolve().parent)
    root, placed = project.root, replace(workload, project=project)
    script = _below(root, path.resolve()) if workload.script else ""
    names, ignored = _listed(root, script)
    others = (name for name in names if name != script)
    work = f"{WORK}/{root.name}"
    wanted = (*filter(None, (script,)), *_outside_labs(lab, root, others))
    leaves_out = ".gitignore leaves files out, " if git.root(root) else ""
    hint = f"--project DIR names a smaller one, {leaves_out}LAB_MOUNTS mounts data"
    code = _read(root, wanted, work, script, hint=hint)
    relative = os.path.relpath(script, project.start) if script else ""
    changes = git.difference(root)[:MOST_DIFFERENCE]
    return replace(placed, script=relative), replace(code, left_out=(*code.left_out, *ignored), difference=changes)


def _below(root: Path, script: Path) -> str:
    """Return the path of a script relative to its project. ConfigError if it is outside of it."""
    if not script.is_relative_to(root):
        raise ConfigError(f"script {script} is not in the project {root}", hint="name a folder that contains it")
    return str(script.relative_to(root))


def _listed(root: Path, script: str) -> tuple[Iterable[str], Iterable[str]]:
    """Return a project's file names and notes on ignored ones; all but hidden without git; none of home or ``/``."""
    if projects.is_all(root):
        return (), (f"the rest of {root} (it is not a single project; --project DIR names one)",)
    # Git lists the files of submodules only among those that it tracks.
    listed = git.files(root, "--cached", "--recurse-submodules") + git.files(root, "--exclude-standard", "--others")
    # If git ignores the folder itself, its list is empty: copy all.
    return (dict.fromkeys(listed), _ignored(root, script)) if listed else (walk(root, hidden=False), ())


def remark(code: Code) -> str:
    """Return ``not copied into the run: ...`` with the first names that were left out; empty if none was."""
    if not code.left_out:
        return ""
    return f"not copied into the run: {human.listed(code.left_out, SHOWN)}"


def _outside_labs(lab: Lab, folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are not in labctl's own folders of a lab directory, of this lab or another."""

    @cache
    def is_lab(directory: Path) -> bool:
        return directory == lab.directory or context.is_lab(directory)

    for name in names:
        parts = PurePath(name).parts
        if not any(part in context.OWN and is_lab(folder.joinpath(*parts[:at])) for at, part in enumerate(parts)):
            yield name


def _ignored(root: Path, script: str) -> Iterator[str]:
    """Yield ``NAME (ignored by git)`` for each ignored path of a project, but not for the script or hidden ones."""
    for name in git.files(root, "--exclude-standard", "--others", "--ignored", "--directory"):
        path = Path(name)
        if name != script and path.name not in SKIPPED and not any(part.startswith(".") for part in path.parts):
            yield f"{shlex.quote(name)} (ignored by git)"


def _read(folder: Path, names: Iterable[str], work: str, script: str, *, hint: str) -> Code:
    """Split names into files to copy below ``work`` and left-out ones with reasons. ConfigError if it is too much.

    ConfigError with this ``hint`` if it is more than a run copies, also if the script cannot be copied.
    """

    @cache
    def is_real(directory: Path) -> bool:
        return directory == folder or (is_real(directory.parent) and stat.S_ISDIR(directory.lstat().st_mode))

    copies: list[Copy] = []
    left_out: list[str] = []
    sizes: Counter[str] = Counter()
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
        top, is_below, _ = name.partition("/")
        if not is_script:
            sizes[top if is_below else "."] += status.st_size
        copies.append(Copy(path=f"{work}/{name}", root=folder, name=name))
    if sizes.total() > MOST_BYTES or len(copies) > MOST_FILES:
        raise ConfigError(_too_much(folder, copies, sizes), hint=hint)
    return Code(tuple(copies), tuple(left_out))


def _too_much(folder: Path, copies: Sequence[Copy], sizes: Counter[str]) -> str:
    """Return the error text that a folder holds more than a run copies, with its largest subfolders."""
    many = Counter(copy.name.partition("/")[0] for copy in copies if "/" in copy.name)
    by_share = sorted(many, key=lambda name: -max(many[name] / MOST_FILES, sizes[name] / MOST_BYTES))
    largest = [f"{name}/ {human.count(many[name], 'file')}, {human.size(sizes[name])}" for name in by_share]
    holds = f"{human.count(len(copies), 'file')}, {human.size(sizes.total())}"
    text = f"{folder} holds more than a run copies: {holds}, not {MOST_FILES:,} files and {human.size(MOST_BYTES)}"
    return f"{text}; largest: {'; '.join(largest[:LARGEST_FOLDERS])}" if largest else text


def _reason(folder: Path, name: str, status: os.stat_result) -> str:
    """Return why a name is not copied: a link out, a repository, no file, passwords, unreadable; empty to copy it."""
    if stat.S_ISLNK(status.st_mode):
        return "a link that points outside" if leads_out(name, str((folder / name).readlink())) else ""
    if stat.S_ISDIR(status.st_mode):
        # Git lists a folder as a file if that is a repository, or is to be one.
        is_empty = os.access(folder / name, os.R_OK) and not any((folder / name).iterdir())
        return NOT_CHECKED_OUT if is_empty else "its own git repository"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if PurePath(name).name in PASSWORDS:
        return "may contain passwords"
    return "" if os.access(folder / name, os.R_OK) else "not readable"
