"""Project of a run: the folder of a person's code to copy, and the directory in it that ranks start in."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

from labctl.config import context
from labctl.errors import ConfigError
from labctl.model import Project
from labctl.system import git


def choose(
    script: Path | None, *, given: Path | None = None, here: Path | None = None, install: bool = False
) -> Project | None:
    """Return the project that holds a script or ``here``, and its start folder; None if none. ConfigError if unfit.

    It is ``given``, else the repository, else the script's folder or ``here``, but never the home directory or ``/``.
    Ranks start ``here`` if that is in it, else in the script's folder or, if the project is given, in its root.
    ConfigError if the given project is no such folder, or lacks the script.
    """
    here = here.resolve() if here else None
    script = script.resolve() if script else None
    folder = script.parent if script else here
    root = _given(given, script) if given else _root(folder)
    if root is None:
        if install:
            raise ConfigError("--install: no project to install", hint="--project DIR names its root")
        return None
    start = root if given or folder is None or not folder.is_relative_to(root) else folder
    if here and here.is_relative_to(root) and (here == root or not context.is_lab(here)):
        start = here
    return Project(root=root, start=str(start.relative_to(root)), install=install)


def remark(chosen: Project | None, *, script: Path | None, here: Path | None) -> str:
    """Return a note if nothing is copied for a module or command, or git ignores the folder; empty otherwise."""
    folder = script.resolve().parent if script else here and here.resolve()
    if folder is None:
        return ""
    if chosen is None:
        # Of a script, `code` says the same.
        none = f"nothing is copied into the run: {folder} is not a single project; --project DIR names one"
        return "" if script else none
    repository = git.root(folder)
    if chosen.root != folder or not repository or is_all(repository) or _is_of_lab(folder):
        return ""
    if not git.ignores(repository, folder):
        return ""
    whole = shlex.quote(str(repository))
    return f"the project is {folder} alone, as its repository ignores it; --project {whole} has all"


def _given(given: Path, script: Path | None) -> Path:
    """Return the folder that --project names, resolved. ConfigError if none, too large, or without the script."""
    root = given.resolve()
    if not root.is_dir():
        raise ConfigError(f"--project {shlex.quote(str(given))}: not a directory")
    if is_all(root):
        raise ConfigError(f"--project {root}: not copied, as it is not a single project", hint="name a folder in it")
    if script and not script.is_relative_to(root):
        raise ConfigError(f"script {script} is not in the project {root}", hint="leave out --project, or name another")
    return root


def _root(folder: Path | None) -> Path | None:
    """Return the git repository that a folder is in, else the folder; None for no folder, home or ``/``.

    What a repository ignores, and the copy that an earlier run had, is no part of it.
    """
    if folder is None:
        return None
    repository = git.root(folder)
    if repository and not is_all(repository) and not _is_of_lab(folder) and not git.ignores(repository, folder):
        return repository
    return None if is_all(folder) else folder


def _is_of_lab(folder: Path) -> bool:
    """Tell if a folder is in one of labctl's own folders of a lab directory."""
    above = pairwise((folder, *folder.parents))
    return any(inner.name in context.OWN and context.is_lab(outer) for inner, outer in above)


def is_all(folder: Path) -> bool:
    """Tell if a folder is ``/``, the home directory, or one above it."""
    return Path.home().resolve().is_relative_to(folder)
