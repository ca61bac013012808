"""PCI devices as sysfs shows them: address, vendor, driver, NUMA node, nearby cores.

Source: Documentation/ABI/testing/sysfs-bus-pci of the kernel.
"""

from __future__ import annotations

import re

from msgspec import Struct

from labctl.system import procfs
from labctl.system.hostpath import HostPath

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_CLASSES = ("0x03", "0x12")
"""Display controllers and processing accelerators, by the first byte of the class."""


class PciDevice(Struct, frozen=True, kw_only=True):
    """A display controller or accelerator; ``vendor`` as ``0x10de``, ``driver`` empty if none is bound."""

    address: str
    vendor: str
    display: bool
    driver: str


def cards(root: HostPath) -> tuple[PciDevice, ...]:
    """Return every display controller and processing accelerator of this host, with or without a driver."""
    folders = sorted((root / "sys/bus/pci/devices").glob("*"))
    classes = ((folder, procfs.read(folder / "class")[:4]) for folder in folders)
    return tuple(
        PciDevice(
            address=folder.name,
            vendor=procfs.read(folder / "vendor").strip(),
            display=kind == _CLASSES[0],
            driver=driver(folder),
        )
        for folder, kind in classes
        if kind in _CLASSES
    )


def address(text: str) -> str:
    """Return the first PCI address in a text as sysfs writes it: ``0000:3b:00.0`` for ``00000000:3B:00.0``; or ""."""
    match = _ADDRESS.search(text)
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def address_of(folder: HostPath) -> str:
    """Return the PCI address that a device's sysfs folder resolves to; empty if it is not a PCI device."""
    name = folder.resolve().name
    return name if _ADDRESS.fullmatch(name) else ""


def order(address: str) -> tuple[int, ...]:
    """Sort key of a PCI address, for bus order."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def driver(folder: HostPath) -> str:
    """Return the name of the driver bound to a device; empty if none is."""
    link = folder / "driver"
    return link.resolve().name if link.is_symlink() else ""


def cpus(folder: HostPath, root: HostPath) -> tuple[int, ...]:
    """Return the usable cores near a device."""
    usable = set(procfs.cpus(root))
    return tuple(core for core in procfs.parse_cpulist(procfs.read(folder / "local_cpulist")) if core in usable)
