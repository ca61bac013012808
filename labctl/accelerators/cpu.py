"""Plain processors: the node's share of the cores is set by its cpuset, not by devices."""

from __future__ import annotations

from pathlib import Path

from labctl.model import DeviceMapping, Host

# Bytes. Larger keeps more than is used, smaller asks the kernel more often: docs/figures.md.
LARGE_BLOCK = "1048576"


def find(root: Path) -> tuple[str, ...]:  # noqa: ARG001
    """No device files: every host has processors."""
    return ()


def mapping(host: Host, devices: tuple[str, ...]) -> DeviceMapping:  # noqa: ARG001
    """DeepSpeed is told to use the CPU, and glibc to give large blocks back when they are freed.

    By itself glibc keeps them after a while, up to a quarter of what a training step needs; mallopt(3).
    """
    return DeviceMapping(
        environment=(
            ("DS_ACCELERATOR", "cpu"),
            ("MALLOC_MMAP_THRESHOLD_", LARGE_BLOCK),
            ("MALLOC_TRIM_THRESHOLD_", LARGE_BLOCK),
        )
    )
