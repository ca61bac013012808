"""Diagnose hosts, Docker and the lab: the list of checks, in the order of their findings.

A check is a function in ``checks/`` that yields findings; adding one is adding a function and its line here. Functions
are named, not imported: `up` and `run` load only the checks that can stop them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from labctl.doctor.examination import (
    COUNT_SECONDS,
    LIMIT,
    SSH_SECONDS,
    TRAFFIC_SECONDS,
    VENDOR_TOOL_SECONDS,
    CheckContext,
    Finding,
)
from labctl.engines.state import Container


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and where it applies."""

    function: str
    """Module and function below ``labctl.doctor.checks``."""
    scope: Literal["machine", "host", "lab", "node"] = "host"
    """What it is called for: this machine, each host, all hosts as a whole, or each running container."""
    engine: bool = True
    """Whether it needs a Docker daemon that answers."""
    lab: bool = True
    """Whether it needs the lab's devices to be there."""
    stops: str = ""
    """The command that its errors stop, which calls it as preflight."""
    seconds: float = LIMIT

    @property
    def name(self) -> str:
        return self.function.partition(".")[2]

    def run(self, ctx: CheckContext, *container: Container) -> Iterator[Finding]:
        module, _, name = self.function.partition(".")
        findings: Iterator[Finding] = getattr(import_module(f"labctl.doctor.checks.{module}"), name)(ctx, *container)
        return findings


CHECKS: tuple[Check, ...] = (
    Check("host.cores", engine=False),
    Check("host.memory", engine=False),
    Check("host.shared_memory", "machine", engine=False, stops="up"),
    Check("hosts.shared_directory", engine=False, lab=False, stops="up"),
    Check("host.mounts", engine=False, stops="up"),
    Check("host.cache_space", engine=False, lab=False),
    Check("host.run_space", "machine", engine=False, lab=False, stops="run"),
    Check("host.proxies", "machine", engine=False, lab=False),
    Check("host.certificates", "machine", engine=False, lab=False),
    Check("devices.vendor_host", engine=False),
    Check("devices.permissions", engine=False, stops="up"),
    Check("devices.health", engine=False, seconds=VENDOR_TOOL_SECONDS),
    Check("devices.leases", engine=False),
    Check("engine.plugins", "machine", engine=False, lab=False, seconds=2 * LIMIT),
    Check("engine.version", lab=False, stops="up"),
    Check("hosts.ssh_port", stops="up"),
    Check("hosts.master_port", stops="up"),
    Check("hosts.home_space", engine=False, stops="up"),
    Check("hosts.differences", "lab"),
    Check("engine.cgroups"),
    Check("engine.clock", lab=False),
    Check("engine.space", lab=False),
    Check("engine.limits"),
    Check("devices.container_starts", seconds=VENDOR_TOOL_SECONDS),
    Check("files.lab_name", lab=False),
    Check("engine.image", lab=False),
    Check("engine.driver"),
    Check("network.address_pools", lab=False),
    Check("network.mtu", lab=False),
    Check("network.arp_table", engine=False),
    Check("files.keys", "lab"),
    Check("files.rendered", "lab"),
    Check("nodes.states"),
    Check("network.missing"),
    Check("network.members"),
    Check("nodes.ssh", "lab", seconds=SSH_SECONDS),
    Check("network.traffic", "lab", seconds=TRAFFIC_SECONDS),
)
NODE_CHECKS = (
    Check("nodes.inside", "node"),
    Check("devices.framework_count", "node", seconds=COUNT_SECONDS),
)
