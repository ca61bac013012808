"""Report of `labctl devices`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from labctl.model import Device, Fabric


class DetectedDevice(Device, frozen=True, kw_only=True):
    """A device of a host, its accelerator, the lab's node that gets it, and the holder of its lease here."""

    kind: str
    node: str | None
    leased_by: str


class NodeShare(Struct, frozen=True, kw_only=True):
    """Share that a node of the lab has of its host; ``devices`` by id."""

    name: str
    slots: int
    cpus: tuple[int, ...]
    devices: tuple[str, ...]


class HostDevices(Struct, frozen=True, kw_only=True):
    """Devices of a host for a lab, ``memory`` in bytes; ``accelerator`` is None if the asked kind was not found."""

    name: str
    accelerator: str | None
    reason: str
    processor: str = ""
    """Model of the processor; empty if unknown."""
    cpus: tuple[int, ...]
    numa: tuple[tuple[int, ...], ...]
    memory: int
    devices: tuple[DetectedDevice, ...]
    drivers: Mapping[str, str]
    groups: tuple[int, ...]
    group_names: Mapping[str, int] = {}
    """Names of these groups on the host, as far as they have one."""
    infiniband: tuple[str, ...]
    fabrics: tuple[Fabric, ...]
    nodes: tuple[NodeShare, ...]
    warnings: tuple[str, ...]


class DeviceReport(Struct, frozen=True):
    """The devices of each host."""

    hosts: tuple[HostDevices, ...]
