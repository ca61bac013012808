"""Clones of the user, as hosts get them: files that git tracks, as in the working tree, up to a size."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import ConfigError
from labctl.model import Lab
from labctl.records import manifest
from labctl.records.manifest import Manifest
from labctl.system import git, human
from labctl.system.files import walk

LARGEST = 200_000_000
"""Size of a clone at most, in bytes: each `up` and `run` reads all of it, here and on every host."""


def scan(lab: Lab) -> dict[str, Manifest]:
    """Return the manifest of each clone to push, by its folder in the lab directory. ConfigError if too large."""
    return {folder: read(Path(path)) for path, folder in lab.clones}


def read(root: Path) -> Manifest:
    """Return the manifest of the files that git tracks in a clone, or of all if none. ConfigError if too large."""
    names = git.files(root, "--cached", "--recurse-submodules") or list(walk(root))
    size = sum(size_of(root / name) for name in names)
    if size > LARGEST:
        raise ConfigError(
            f"{root} holds {human.size(size)} without .git, and labctl sends hosts at most "
            f"{human.size(LARGEST)} of a clone",
            hint="move it away here and clone it on each host at that path, or remove what is large from it",
        )
    return manifest.pick(root, names)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it was removed."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0
