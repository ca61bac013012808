"""What a machine has, and what a container gets of it. Frozen data; nothing here acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HERE = "local"
"""The name of this machine among hosts."""
BRIDGED = "eth0"
"""The interface of a lab's bridge network, as a container on it sees it."""

Request = Literal["reservation", "cdi", "runtime"]
"""How an engine is asked for an NVIDIA GPU: a device reservation, a CDI device, or the runtime ``nvidia``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator of a host, as its kernel shows it; name, memory (bytes), uuid and health are its vendor's words.

    ``health`` is empty while nothing is known to be wrong.
    """

    id: str
    """How it is asked for: the index of a GPU or Gaudi, or a render node such as ``/dev/dri/renderD128``."""
    path: str
    """Its device file."""
    pci: str = ""
    """PCI address, such as ``0000:3b:00.0``."""
    module: str = ""
    """Module id of a Gaudi: indices may change with a reboot, this does not."""
    numa: int | None = None
    cpus: tuple[int, ...] = ()
    """Cores near it."""
    link: str = ""
    """Name below ``/dev/dri/by-path``."""
    integrated: bool = False
    """Part of the processor, without memory of its own."""
    name: str = ""
    memory: int | None = None
    uuid: str = ""
    health: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """An RDMA device, such as ``mlx5_0``: ``layer`` is InfiniBand or Ethernet (RoCE), ``state`` that of its port."""

    name: str
    layer: str
    state: str
    numa: int | None = None
    interface: str = ""
    """Its network interface, where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with a Docker daemon, as it was found. ``memory`` in bytes."""

    name: str
    number: int = 0
    """Its place among the lab's hosts."""
    address: str = ""
    """The IPv4 address by which nodes on other hosts reach it."""
    interface: str = BRIDGED
    """What nodes use to talk to each other, by its name in the containers."""
    home: str = ""
    """The person's home there."""
    directory: str = ""
    """The lab's directory there; empty where it is the lab directory itself."""
    slots: int = 0
    """Slots that the list of hosts gives it; 0 where it says nothing."""
    cpus: tuple[int, ...]
    memory: int
    mtu: int
    uid: int
    gid: int
    devices: tuple[Device, ...] = ()
    """Those of the lab's accelerator."""
    driver: str = ""
    """Version of their kernel driver."""
    request: Request = "reservation"
    groups: tuple[int, ...] = ()
    """Numeric render and video groups of this host."""
    numa: tuple[tuple[int, ...], ...] = ()
    """The cores of each NUMA node."""
    infiniband: tuple[str, ...] = ()
    """Character devices of RDMA, such as ``/dev/infiniband/uverbs0``."""
    gaudinet: str | None = None
    """Path of Gaudi's network description on this host, where it has one."""
    locks: str = "/run/lock"
    """Where the locks of its devices lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bind mount: an absolute path on the node's host to an absolute path in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMapping:
    """What an accelerator asks of a container; one template turns it into YAML."""

    devices: tuple[Device, ...] = ()
    """Which they are."""
    runtime: str | None = None
    driver: str = ""
    """The engine's device driver that gets ``requests``: ``nvidia`` or ``cdi``."""
    requests: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    """Device files that are mapped under their own names."""
    links: tuple[tuple[str, str], ...] = ()
    """Names below ``/dev/dri/by-path`` and where they lead."""
    environment: tuple[tuple[str, str], ...] = ()
    cap_add: tuple[tuple[str, str], ...] = ()
    """Capability and the reason for it."""
    group_add: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()
