"""Which machines a lab was laid over: one that is not listed any more keeps its nodes until somebody says so.

A machine is known by its engine's identity: names and addresses come to mean another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from labctl.files import write

FILES = ".lab/laid"
Listed = Mapping[str, str]
"""The hosts of a list and what machines they are; empty for one that did not answer."""


@dataclass(frozen=True, slots=True, order=True)
class Laid:
    """A machine that has got nodes, and its name then."""

    host: str
    machine: str

    @property
    def path(self) -> str:
        return f"{FILES}/{self.host}@{quote(self.machine, safe='')}"


def note(directory: Path, host: str, machine: str) -> None:
    """A host has got nodes of this lab."""
    write(directory / Laid(host, machine).path, "")


def forget(directory: Path, machines: Collection[str]) -> None:
    """These machines have nothing of it any more."""
    for one in noted(directory):
        if one.machine in machines:
            (directory / one.path).unlink(missing_ok=True)


def noted(directory: Path) -> tuple[Laid, ...]:
    found = (path.name.partition("@") for path in (directory / FILES).glob("*@*"))
    return tuple(sorted(Laid(host, unquote(machine)) for host, _, machine in found))


def moved(directory: Path, listed: Listed) -> tuple[Laid, ...]:
    """The machines that are not listed any more by the name that they had, as far as those answer that are."""
    return tuple(one for one in noted(directory) if listed.get(one.host) not in ("", one.machine))


def left_over(directory: Path, listed: Listed) -> tuple[Laid, ...]:
    """The machines that have nodes of it and are not listed any more by any name."""
    return tuple(one for one in moved(directory, listed) if one.machine not in listed.values())


def former(directory: Path, listed: Listed) -> dict[str, tuple[str, ...]]:
    """The names that listed hosts had before, when they got nodes."""
    names = moved(directory, listed)
    return {
        host: tuple(one.host for one in names if one.machine == machine) for host, machine in listed.items() if machine
    }
