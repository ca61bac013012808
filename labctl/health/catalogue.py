"""The subjects of every host, in the order of tables."""

from __future__ import annotations

from labctl.health import clock, disk, ethernet, infiniband, kernel, memory, pcie, processes, processor
from labctl.health.model import Subject

HOST: tuple[Subject, ...] = (
    pcie.SUBJECT,
    infiniband.SUBJECT,
    ethernet.SUBJECT,
    processor.SUBJECT,
    memory.SUBJECT,
    disk.SUBJECT,
    processes.SUBJECT,
    clock.SUBJECT,
    kernel.SUBJECT,
)
