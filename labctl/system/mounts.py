"""Paths of a host as containers see them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def mounted_at(directory: Path, mounts: Iterable[tuple[str, str]], *, apart: bool = False) -> str | None:
    """Return a host directory's path in a container, by the deepest mount (source, target) that has it; or None.

    Links on the way to a source are this machine's, unless the host stands ``apart``.
    """
    sources = ((Path(source) if apart else Path(source).resolve(), target) for source, target in mounts)
    holding = [(source, target) for source, target in sources if directory.is_relative_to(source)]
    if not holding:
        return None
    source, target = max(holding, key=lambda mount: len(mount[0].parts))
    return str(PurePosixPath(target, directory.relative_to(source)))
