"""Which files of a directory git tracks or ignores."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from labctl.errors import ConfigError
from labctl.system import process


def files(folder: Path, *options: str) -> list[str]:
    """The files of a folder that ``git ls-files`` lists with these options; none where it is in no repository.

    ConfigError where git fails: what it ignores, such as keys, would be taken too.
    """
    if not any((one / ".git").exists() for one in (folder, *folder.parents)):
        return []
    # A repository's own configuration may name a program to be asked for changes.
    git = ("git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z")
    done = process.run([*git, *options], env={"LC_ALL": "C"}, check=False, errors="surrogateescape")
    if done.code == 0:
        return sorted(set(filter(None, done.out.split("\0"))))
    # A repository whose own folder is gone is named: what it ignores is not known.
    if "not a git repository (or any" in done.err:
        return []
    own = re.search(r"git config --global --add safe\.directory \S+", done.err)
    raise ConfigError(
        f"git does not say which files belong to {folder}: {done.err.partition(chr(10))[0]}",
        hint=own[0] if own else f"git -C {shlex.quote(str(folder))} status, or copy the files out of the repository",
    )
