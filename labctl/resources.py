"""Where the files that come with labctl are: templates, Dockerfiles, workloads, hostfiles."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def path(*parts: str) -> Path:
    """A packaged file or folder: from the installed wheel's ``_data``, else from the checkout."""
    installed = _PACKAGE / "_data"
    return (installed if installed.is_dir() else _PACKAGE.parent).joinpath(*parts)
