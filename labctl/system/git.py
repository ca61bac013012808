"""The files of a directory that git tracks or ignores."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from labctl.errors import ConfigError
from labctl.system import process


def files(folder: Path, *options: str) -> list[str]:
    """Return the paths below a folder that ``git ls-files`` lists; none outside a repository. ConfigError if git fails.

    ConfigError if git fails: otherwise ignored files, such as keys, would be taken too.
    """
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return []
    # The repository's configuration may name a program to run as file system monitor.
    git = ("git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z")
    done = process.run([*git, *options], env={"LC_ALL": "C"}, check=False, errors="surrogateescape")
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
