"""The files of a directory that git tracks or ignores."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from labctl.errors import ConfigError
from labctl.system import process
from labctl.system.process import CompletedProcess


def root(folder: Path) -> Path | None:
    """Return the root of the repository that a folder is in; None outside a repository."""
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)


def ignores(repository: Path, folder: Path) -> bool:
    """Return True if git ignores a folder of the repository; False for its root."""
    if folder == repository:
        return False
    return _git(repository, "check-ignore", "-q", str(folder)).code == 0


def difference(folder: Path) -> str:
    """Return the changes to tracked files since the last commit, as a patch; empty without any, and outside git."""
    words = ("diff", "--no-ext-diff", "--no-textconv", "--ignore-submodules", "HEAD", "--", str(folder))
    return _apart(folder, *words)[1]


def commit(folder: Path) -> tuple[str, bool]:
    """Return the commit that a folder is at, empty outside git, and True if its files differ from it."""
    words = ("--no-optional-locks", "status", "--porcelain", "--ignore-submodules=all", "--", str(folder))
    at, changes = _apart(folder, *words)
    return at, bool(changes)


def _apart(folder: Path, *words: str) -> tuple[str, str]:
    """Return a folder's commit and a git command's output, run with a temporary GIT_DIR; both empty outside git."""
    where = _git(folder, "rev-parse", "HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects")
    if where.code:
        return "", ""
    at, top, index, objects = where.out.splitlines()
    with tempfile.TemporaryDirectory() as own:
        # With a separate git directory: that of a mounted clone, which containers may write, can name programs to run.
        for name in ("refs", "objects"):
            Path(own, name).mkdir()
        Path(own, "HEAD").write_text(f"{at}\n")
        paths = {"GIT_INDEX_FILE": folder / index, "GIT_OBJECT_DIRECTORY": folder / objects}
        places = {"GIT_DIR": own, "GIT_WORK_TREE": top, **{name: str(path) for name, path in paths.items()}}
        argv = ("git", "-C", top, *words)
        return at, process.run(argv, env={"LC_ALL": "C", **places}, check=False, errors="replace").out


def _git(folder: Path, *words: str) -> CompletedProcess:
    """Run a git command in a folder; never a program that the repository's configuration names as its monitor."""
    git = ("git", "-c", "core.fsmonitor=false", "-C", str(folder))
    return process.run([*git, *words], env={"LC_ALL": "C"}, check=False, errors="surrogateescape")


def files(folder: Path, *options: str) -> list[str]:
    """Return the paths below a folder that ``git ls-files`` lists; none outside a repository. ConfigError if git fails.

    ConfigError if git fails: otherwise ignored files, such as keys, would be taken too.
    """
    if root(folder) is None:
        return []
    done = _git(folder, "ls-files", "-z", *options)
    if done.code == 0:
        return sorted(set(filter(None, done.out.split("\0"))))
    # If only the repository's own folder is missing, git words it differently: that is an error, as ignored files are
    # unknown.
    if "not a git repository (or any" in done.err:
        return []
    git_hint = re.search(r"git config --global --add safe\.directory \S+", done.err)
    raise ConfigError(
        f"git cannot list the files of {folder}: {done.err.partition(chr(10))[0]}",
        hint=git_hint[0]
        if git_hint
        else f"git -C {shlex.quote(str(folder))} status, or copy the files out of the repository",
    )
