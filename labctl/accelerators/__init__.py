"""Accelerators: one module each; a new file is a new accelerator.

Each module has ``find(root) -> devices of its kind on this host`` and
``mapping(host, devices) -> DeviceMapping`` for one node that gets those devices.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from labctl.errors import ConfigError
from labctl.hardware import Device, DeviceMapping, Host

# What `auto` tries, in this order; a machine with none of them is a CPU lab.
PREFERENCE = ("nvidia", "habana", "intel", "cpu")


class AcceleratorModule(Protocol):
    """What a module in this package offers."""

    def find(self, root: Path) -> tuple[Device, ...]: ...

    def mapping(self, host: Host, devices: tuple[Device, ...]) -> DeviceMapping: ...


def names() -> tuple[str, ...]:
    """The accelerators that labctl knows, by the files in this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def get(name: str) -> AcceleratorModule:
    """The module of an accelerator; ConfigError lists the known ones."""
    if name not in names():
        raise ConfigError(f"unknown accelerator `{name}`", hint=f"known: {', '.join(names())}")
    return cast(AcceleratorModule, import_module(f"{__name__}.{name}"))


def detect(root: Path) -> tuple[str, tuple[Device, ...]]:
    """The first accelerator of the preference that this host has, and its devices."""
    for name in PREFERENCE:
        devices = get(name).find(root)
        if devices or name == "cpu":
            return name, devices
    raise AssertionError("cpu always answers")
