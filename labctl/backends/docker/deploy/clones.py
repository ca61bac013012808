"""A person's clones as hosts get them: what git tracks of them, as it is in the working tree, up to a size."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import ConfigError
from labctl.model import Lab
from labctl.records import manifest
from labctl.records.manifest import Manifest
from labctl.system import git
from labctl.system.files import walk
from labctl.system.progress import amount

LARGEST = 200_000_000
"""Bytes of a clone that is sent: code, not data, is read again by each `up` and `run`, here and on every host."""


def scan(lab: Lab) -> dict[str, Manifest]:
    """The manifest of each clone that hosts are sent, by where it lies below the lab's directory there.

    ConfigError for one that is too large.
    """
    return {folder: read(Path(path)) for path, folder in lab.clones}


def read(root: Path) -> Manifest:
    """What git tracks of a clone; where that is nothing, all of it. ConfigError where it is too large."""
    names = git.files(root, "--cached", "--recurse-submodules") or list(walk(root))
    size = sum(size_of(root / name) for name in names)
    if size > LARGEST:
        raise ConfigError(
            f"{root} holds {amount(size)} without .git, and hosts are sent at most {amount(LARGEST)} of a clone",
            hint="move it away here and clone it on each host at that path, or remove what is large from it",
        )
    return manifest.pick(root, names)


def size_of(path: Path) -> int:
    """Bytes; none of what was removed."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0
