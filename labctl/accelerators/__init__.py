"""Accelerators: one module each; a new file is a new accelerator.

Each module has ``SOUGHT``, the words for what it looks for, ``find(root) -> devices of its kind on this host``,
``driver(root) -> version of their kernel driver`` and ``mapping(host, devices) -> DeviceMapping`` for one node that
gets those devices.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from labctl.errors import ConfigError, HostError
from labctl.model import Device, DeviceMapping, Host
from labctl.system import pci

# What `auto` tries, in this order; a machine with none of them is a CPU lab.
PREFERENCE = ("nvidia", "habana", "intel", "cpu")


class AcceleratorModule(Protocol):
    """What a module in this package offers."""

    SOUGHT: str

    def find(self, root: Path) -> tuple[Device, ...]: ...

    def driver(self, root: Path) -> str: ...

    def mapping(self, host: Host, devices: tuple[Device, ...]) -> DeviceMapping: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The accelerator of a lab on this host, the devices that it may use, and why it is this one."""

    name: str
    devices: tuple[Device, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Maker:
    """Who makes a card, the accelerator that it belongs to, if labctl knows one, and the drivers that serve it."""

    name: str
    accelerator: str = ""
    drivers: tuple[str, ...] = ()
    files: str = ""
    """The command that makes the first device file, where the driver leaves that to a program."""


# By PCI vendor. Source: the PCI ID repository.
MAKERS = {
    "0x10de": Maker("an NVIDIA card", "nvidia", ("nvidia",), "sudo nvidia-modprobe -c0 -u"),
    "0x1da3": Maker("a Gaudi", "habana", ("habanalabs",)),
    "0x8086": Maker("an Intel GPU", "intel", ("i915", "xe")),
    "0x1002": Maker("an AMD card"),
}


def names() -> tuple[str, ...]:
    """The accelerators that labctl knows: the modules in this folder that are not helpers of all."""
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    return tuple(sorted(modules - {"detect", "leases", "vendor_tools"}))


def get(name: str) -> AcceleratorModule:
    """The module of an accelerator; ConfigError lists the known ones."""
    if name not in names():
        raise ConfigError(f"unknown accelerator `{name}`", hint=f"known: {', '.join(names())}")
    return cast(AcceleratorModule, import_module(f"{__name__}.{name}"))


def choose(wanted: str, root: Path) -> Detection:
    """The accelerator that the setting asks for; ``auto`` takes what is there.

    Graphics inside the processor serve only who asks for them, and only where there is no card. HostError where no
    device of the wanted kind is here.
    """
    if wanted == "auto":
        return detect_accelerator(root)
    found = get(wanted).find(root)
    if not found and wanted != "cpu":
        raise HostError(
            f"this host has no {wanted} device: " + "; ".join((f"no {get(wanted).SOUGHT}", *remarks(root))),
            hint="labctl devices; set LAB_ACCELERATOR=auto or LAB_ACCELERATOR=cpu in .env",
        )
    return Detection(name=wanted, devices=cards_of(found) or found, why="asked for by LAB_ACCELERATOR")


def detect_accelerator(root: Path) -> Detection:
    """The first accelerator of the preference that this host has, and what was looked for before it."""
    missed: list[str] = []
    for name in PREFERENCE[:-1]:
        module = get(name)
        found = module.find(root)
        if devices := cards_of(found):
            here = f"found {len(devices)} ({module.SOUGHT})"
            return Detection(name=name, devices=devices, why=", ".join((*missed, here)))
        own = f", but for the processor's own (LAB_ACCELERATOR={name} takes it)" if found else ""
        missed.append(f"no {module.SOUGHT}{own}")
    return Detection(name=PREFERENCE[-1], devices=(), why=", ".join(missed))


def cards_of(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Those that are no part of the processor."""
    return tuple(device for device in devices if not device.integrated)


def find_all(root: Path) -> dict[str, tuple[Device, ...]]:
    """The devices of every accelerator that this host has some of, in the order of the preference."""
    found = ((name, get(name).find(root)) for name in PREFERENCE)
    return {name: devices for name, devices in found if devices}


def remarks(root: Path) -> tuple[str, ...]:
    """What is said of the cards that no lab can use: without a driver, with another's, or of another kind."""
    return tuple(remark(card, maker) for card, maker in unused(root))


def unserved(root: Path) -> tuple[str, ...]:
    """What is said of those of them that `auto` would take, were they served as they should be."""
    cards = ((card, maker) for card, maker in unused(root) if maker.accelerator and not is_npu(card, maker))
    return tuple(remark(card, maker) for card, maker in cards if card.address != pci.INTEGRATED)


def unused(root: Path) -> tuple[tuple[pci.PciDevice, Maker], ...]:
    """The cards of known makers that no device file leads to."""
    found = find_all(root)
    mapped = {device.pci for devices in found.values() for device in devices}
    # Without addresses it cannot be told which of the cards a device file is.
    unclear = {name for name, devices in found.items() if not all(device.pci for device in devices)}
    return tuple(
        (card, maker)
        for card in pci.cards(root)
        if (maker := MAKERS.get(card.vendor)) and card.address not in mapped
        if not (maker.accelerator in unclear and card.driver in maker.drivers)
    )


def is_npu(card: pci.PciDevice, maker: Maker) -> bool:
    """Whether this is no GPU but a part of Intel's processors that has the same class as a Gaudi."""
    return maker.accelerator == "intel" and not card.display and card.driver not in maker.drivers


def remark(card: pci.PciDevice, maker: Maker) -> str:
    """Why a card is not among the devices."""
    if not maker.accelerator:
        return f"{maker.name} at {card.address} is left alone: labctl has no accelerator for it"
    if is_npu(card, maker):
        return f"an Intel NPU at {card.address} is left alone: it is no GPU"
    wanted = " or ".join(maker.drivers)
    if not card.driver:
        return f"{maker.name} at {card.address} has no driver; {wanted} would serve it"
    if card.driver not in maker.drivers:
        return f"{maker.name} at {card.address} is held by the driver {card.driver}, not by {wanted}"
    mended = f" (`{maker.files}` makes the first)" if maker.files else ""
    return f"{maker.name} at {card.address} has its driver, {card.driver}, but no device file{mended}"
