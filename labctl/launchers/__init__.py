"""Launcher programs: one module each; a new file is a new launcher.

Each module has ``argv(plan) -> the launcher's command`` and ``files(plan) -> what it reads``; both are pure.
The program that it starts on every rank is one script, ``rank.sh``, so that nothing a person wrote passes
through a launcher's own quoting.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from labctl.errors import ConfigError
from labctl.model import File, Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launcher needs to know of a run."""

    entries: tuple[tuple[str, int], ...]
    """Nodes and their slots, in rank order."""
    directory: str
    """The run's directory in the containers."""
    program: str
    """What each rank executes."""
    master_port: int
    ssh_port: int
    variables: Pairs
    """What must be in the environment on every node before the program starts; no blanks in the values."""


class LauncherModule(Protocol):
    """What a module in this package offers."""

    def argv(self, launch: Launch) -> tuple[str, ...]: ...

    def files(self, launch: Launch) -> tuple[File, ...]: ...


def names() -> tuple[str, ...]:
    """The launchers that labctl knows, by the files in this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def get(name: str) -> LauncherModule:
    """The module of a launcher; ConfigError lists the known ones."""
    if name not in names():
        raise ConfigError(f"unknown launcher `{name}`", hint=f"known: {', '.join(names())}")
    return cast(LauncherModule, import_module(f"{__name__}.{name}"))
