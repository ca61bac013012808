"""Fictitious Zeta cards: everything that a new accelerator needs besides its compose fragment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labctl.accelerators import AcceleratorModule, Advice, PciVendor, Tool, Watch
from labctl.model import Device, DeviceMapping, Host
from labctl.system import pci
from labctl.system.hostpath import HostPath
from labctl.system.procfs import read

VENDOR = PciVendor("0x7e7a", "a Zeta card", ("zeta",))


def find(root: HostPath) -> tuple[Device, ...]:
    """Return the cards that have a device file, in bus order, by which the files are numbered."""
    cards = [card.address for card in pci.cards(root) if card.vendor == VENDOR.id]
    return tuple(
        Device(
            id=str(index), path=f"/dev/zeta{index}", pci=address, name=read(folder(root, address) / "model").strip(),
            cpus=pci.cpus(folder(root, address), root),
        )
        for index, address in enumerate(cards)
        if (root / f"dev/zeta{index}").exists()
    )  # fmt: skip


def folder(root: HostPath, address: str) -> HostPath:
    return root / "sys/bus/pci/devices" / address


def container(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Return the device files and variables for these cards; ZETA_CARDS is ``none`` in the launcher."""
    ids = ",".join(device.id for device in devices)
    return DeviceMapping(
        paths=tuple(device.path for device in devices),
        environment=(("ZETA_CARDS", ids), ("ZETA_INTERFACE", host.interface)),
        launcher_environment=(("ZETA_CARDS", "none"),),
    )


def host_checks(host: Host, read: Callable[[str], str]) -> Iterator[Advice]:
    """Yield one advice: fine if zeta_level is 1, else a sysctl command as its fix."""
    level = read("proc/sys/kernel/zeta_level")
    if level == "1":
        yield Advice("LAB-ZETA-001", "zeta level 1")
    else:
        summary = f"zeta level {level or 'unknown'} for {len(host.devices)} cards"
        yield Advice("LAB-ZETA-001", summary, "cards are slow", "sysctl -w kernel.zeta_level=1")


MODULE = AcceleratorModule(
    sought="/dev/zeta<N>",
    find=find,
    container=container,
    driver=lambda root: read(root / "sys/module/zeta/version").strip(),
    pci=VENDOR,
    tool=Tool(("zeta-smi", "--csv")),
    watch=Watch(files=("zeta[0-9]*",), tool=("zeta-smi", "-L"), line="Zeta [0-9]+"),
    attributes=("model",),
    texts=("sys/module/zeta/version",),
    reset="zeta-smi --reset {device}",
    host_checks=host_checks,
)
