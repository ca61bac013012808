"""Where the files that come with labctl are, and whether a path stays below a directory."""

from __future__ import annotations

import posixpath
from itertools import dropwhile
from pathlib import Path, PurePosixPath

_PACKAGE = Path(__file__).resolve().parent


def path(*parts: str) -> Path:
    """A packaged file or folder: from the installed wheel's ``_data``, else from the checkout."""
    installed = _PACKAGE / "_data"
    return (installed if installed.is_dir() else _PACKAGE.parent).joinpath(*parts)


def is_below(path: str) -> bool:
    """Whether a path, joined to a directory, names something in it: it is relative, without ``..``."""
    return not path.startswith("/") and ".." not in path.split("/")


def leads_out(name: str, target: str) -> bool:
    """Whether a symbolic link, by its name below a directory, leads out of it or may do so through another link."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return not is_below(end) or climbs_late(target)


def climbs_late(target: str) -> bool:
    """Whether a link goes up after it went down: where that leads depends on other links."""
    return ".." in dropwhile(lambda part: part == "..", PurePosixPath(target).parts)
