"""The answer of `labctl devices`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from labctl.model import Device, Fabric


class DetectedDevice(Device, frozen=True, kw_only=True):
    """A device of a host, its accelerator, the lab's node that gets it, and who holds its lease on this machine."""

    kind: str
    node: str | None
    leased_by: str


class NodeShare(Struct, frozen=True, kw_only=True):
    """What a node of the lab gets of its host; ``devices`` by id."""

    name: str
    slots: int
    cpus: tuple[int, ...]
    devices: tuple[str, ...]


class HostDevices(Struct, frozen=True, kw_only=True):
    """What a host has for a lab, ``memory`` in bytes; ``accelerator`` is None if the wanted kind was not found."""

    name: str
    accelerator: str | None
    reason: str
    cpus: tuple[int, ...]
    numa: tuple[tuple[int, ...], ...]
    memory: int
    devices: tuple[DetectedDevice, ...]
    drivers: Mapping[str, str]
    groups: tuple[int, ...]
    infiniband: tuple[str, ...]
    fabrics: tuple[Fabric, ...]
    nodes: tuple[NodeShare, ...]
    warnings: tuple[str, ...]


class DeviceReport(Struct, frozen=True):
    """The devices of each host."""

    hosts: tuple[HostDevices, ...]
