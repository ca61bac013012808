"""Plain processors: the node's share of the cores is set by its cpuset, not by devices."""

from __future__ import annotations

from pathlib import Path

from labctl.model import Device, DeviceMapping, Host

SOUGHT = "processor"


def find(root: Path) -> tuple[Device, ...]:  # noqa: ARG001
    """No device files: every host has processors."""
    return ()


def driver(root: Path) -> str:  # noqa: ARG001
    """Processors need none."""
    return ""


def mapping(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:  # noqa: ARG001
    """DeepSpeed is told to use the CPU, so that it does not look for anything else."""
    return DeviceMapping(environment=(("DS_ACCELERATOR", "cpu"),))
