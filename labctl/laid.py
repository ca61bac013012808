"""Which hosts a lab was laid over: one that is not listed any more keeps its nodes until somebody says so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.files import write

FILES = ".lab/laid"


def note(directory: Path, host: str) -> None:
    """A host has got nodes of this lab."""
    write(directory / FILES / host, "")


def forget(directory: Path, hosts: Iterable[str]) -> None:
    """These hosts have nothing of it any more."""
    for host in hosts:
        (directory / FILES / host).unlink(missing_ok=True)


def left_over(directory: Path, listed: Iterable[str]) -> tuple[str, ...]:
    """The hosts that have nodes of it and are not listed any more."""
    noted = {path.name for path in (directory / FILES).glob("*")}
    return tuple(sorted(noted - set(listed)))
