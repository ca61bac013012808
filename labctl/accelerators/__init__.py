"""Accelerators: one module per vendor, which owns all that labctl knows of it; a new file is a new accelerator.

A module of this package is an accelerator if it has ``MODULE``. What it adds to a compose file is in
``compose/<name>.yml.j2``, its image in ``docker/<name>.Dockerfile``. ``docker/<name>_sampler.py`` samples its devices,
as ``docker/sampler.py`` describes.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module

from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import ConfigError, HostError
from labctl.model import Device, DeviceMapping, Host, Request
from labctl.system import pci, procfs
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT

CPU = "cpu"
"""What a machine without devices is."""


class PciVendor(Struct, frozen=True):
    """A vendor's PCI devices: its id, what messages call one, and the kernel drivers that serve it."""

    id: str
    name: str
    drivers: tuple[str, ...] = ()
    first_file: str = ""
    """The command that makes the first device file, where the driver leaves that to a program."""
    other: str = ""
    """What a device of the same classes that is no display controller is: not one of these."""
    integrated: str = ""
    """The address of what is part of the processor."""


class Tool(Struct, frozen=True):
    """A vendor's command that prints one line of CSV a device, and what its columns are. Memory is in MiB."""

    argv: tuple[str, ...]
    columns: tuple[str, ...] = ("index", "pci", "name", "memory", "uuid")
    lists_all: bool = True
    """Whether it knows every device that its vendor's driver serves."""

    @property
    def name(self) -> str:
        return self.argv[0]


class EngineAccess(Struct, frozen=True, kw_only=True):
    """The ways in which an engine hands devices in; one that has none of them gets device files."""

    cdi: str = ""
    """Kind of the CDI devices, such as ``example.com/gpu``."""
    driver: str = ""
    """The engine's device driver for reservations."""
    runtime: str = ""
    """Name of the container runtime."""
    noun: str = ""
    hint: str = ""
    """What to do where the engine has none of the ways."""
    program: str = ""
    """What the package brings that has to be installed, and where the package is from."""
    package: str = ""
    source: str = ""
    configure: str = ""
    """As root: what tells the engine of the runtime; where empty, daemon.json is written."""
    generate_cdi: str = ""
    """As root: what writes the CDI specification into ``{folder}``."""
    enable_cdi: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the engine decides which of several ways it is."""
        return len(self.ways) > 1

    @property
    def ways(self) -> tuple[Request, ...]:
        names: dict[Request, str] = {"cdi": self.cdi, "reservation": self.driver, "runtime": self.runtime}
        return tuple(way for way, name in names.items() if name)


class Watch(Struct, frozen=True, kw_only=True):
    """What shows that a node still has its devices; the node agent is given it as JSON."""

    files: tuple[str, ...]
    """Patterns below /dev of what programs open; the first one matches one file for each device."""
    tool: tuple[str, ...] = ()
    line: str = ""
    """A regular expression for the tool's line of a device."""


class Advice(Struct, frozen=True):
    """What a vendor's check found, for doctor; without an impact all is well. An empty ``fix`` is a new image."""

    code: str
    summary: str
    impact: str = ""
    fix: str = ""
    """A command to run as root; ``{sudo}`` stands before further ones."""


Variables = Callable[[], Mapping[str, str]]


class AcceleratorModule(Struct, frozen=True, kw_only=True):
    """All that labctl knows of a vendor. Only the first three members are needed; they and those after are pure."""

    sought: str
    """What is looked for, in words."""
    find: Callable[[HostPath], tuple[Device, ...]]
    """Its devices on the host whose files are below a root directory."""
    container: Callable[[Host, tuple[Device, ...]], DeviceMapping]
    """What only this vendor's devices ask of a container; see ``mapping``."""
    aliases: tuple[str, ...] = ()
    """What people write for its name."""
    missed: str = ""
    """A pattern of what programs say that find none of its devices."""
    kernel: str = ""
    """A pattern of the kernel's messages about its devices and driver."""
    out_of_memory: str = ""
    """A pattern of what programs say whose devices have no memory left, beside the usual words."""
    order: int = 50
    """Its place among what ``auto`` tries."""
    driver: Callable[[HostPath], str] = lambda _: ""
    """Version of the kernel driver; empty where it is not loaded."""
    pci: PciVendor | None = None
    tool: Tool | None = None
    engine: EngineAccess = EngineAccess()
    watch: Watch | None = None
    attributes: tuple[str, ...] = ()
    """What is read of another host: patterns below a device's folder in sysfs, and below its root directory."""
    texts: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Files of which only the existence counts; those that exist are in ``Host.files``."""
    count: tuple[str, str] | None = None
    """The module of torch that counts its devices, and TensorFlow's kind of them: ``docker/count_devices.py``."""
    reset: str = ""
    """As root: what resets ``{device}``, which is not in use."""
    host_checks: Callable[[Host, Callable[[str], str]], Iterable[Advice]] = lambda *_: ()
    """What it asks of a host, whose files are read by path."""
    image_check: Callable[[str, str, str, Variables], Advice | None] = lambda *_: None
    """Why a driver's version does not support an image, by its name, what it was built on and its environment.

    The summary is empty where it does; None where that is unknown.
    """
    require_image: Callable[[str], None] = lambda _: None
    """HostError where the image cannot serve under this host's driver."""
    base_image: Callable[[], str] = lambda: ""
    """What its image is built on, where this host decides that."""

    torch_index: str = ""
    """Where its image's torch comes from, if not from the package index."""
    images: tuple[tuple[str, str], ...] = ()
    """Which of labctl's images it has in the place of one that a workload asks for."""
    resources: tuple[str, ...] = ()
    """Names that device plugins of Kubernetes give its devices, the usual one first."""
    launchers: tuple[tuple[str, str], ...] = ()
    """Which way of a launcher its images have, where that is not the usual one."""

    def mapping(self, host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
        """What one node with these devices asks of its container; RDMA only where the host has it."""
        own = self.container(host, devices)
        if not devices:
            return own
        ways = self.engine.ways
        way = host.request if host.request in ways else ways[-1] if ways else None
        kind = f"{self.engine.cdi}=" if way == "cdi" else ""
        rdma = (("IPC_LOCK", "root pins memory for RDMA; ranks by memlock"),) if host.infiniband else ()
        return replace(
            own,
            devices=devices,
            runtime=self.engine.runtime if way == "runtime" else None,
            driver={"reservation": self.engine.driver, "cdi": "cdi"}.get(way or "", ""),
            requests=tuple(f"{kind}{device.id}" for device in devices) if way in ("reservation", "cdi") else (),
            paths=(*own.paths, *host.infiniband),
            cap_add=(*own.cap_add, *rdma),
        )


class Detection(Struct, frozen=True, kw_only=True):
    """The accelerator of a lab on this host, the devices that it may use, and why it is this one."""

    name: str
    devices: tuple[Device, ...]
    why: str


UNSUPPORTED = PciVendor("0x1002", "an AMD card")


def modules() -> dict[str, AcceleratorModule]:
    """Every accelerator by name, in the order in which ``auto`` tries them; a CPU lab is the last."""
    return _modules(tuple(__path__))


@lru_cache
def _modules(path: tuple[str, ...]) -> dict[str, AcceleratorModule]:
    found = {one.name: import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(path)}
    every = {name: one.MODULE for name, one in found.items() if hasattr(one, "MODULE")}
    return dict(sorted(every.items(), key=lambda item: (item[1].order, item[0])))


def get(name: str) -> AcceleratorModule:
    """The module of an accelerator; ConfigError lists the known ones."""
    known = modules()
    if name not in known:
        raise ConfigError(f"unknown accelerator `{name}`", hint=f"known: {', '.join(sorted(known))}")
    return known[name]


def choose(wanted: str, root: HostPath) -> Detection:
    """The accelerator that the setting asks for; ``auto`` takes what is there.

    Graphics inside the processor serve only who asks for them, and only where there is no card. HostError where the
    host has no device of the wanted kind.
    """
    if wanted == "auto":
        return detect_accelerator(root)
    module = get(wanted)
    found = module.find(root)
    if not found and wanted != CPU:
        raise HostError(
            f"this host has no {wanted} device: " + "; ".join((f"no {module.sought}", *remarks(root))),
            hint="labctl devices; set LAB_ACCELERATOR=auto or LAB_ACCELERATOR=cpu in .env",
        )
    return Detection(name=wanted, devices=cards_of(found) or found, why="asked for by LAB_ACCELERATOR")


def detect_accelerator(root: HostPath) -> Detection:
    """The first accelerator in order that this host has, and what was looked for before it."""
    missed: list[str] = []
    for name, module in modules().items():
        if name == CPU:
            continue
        found = module.find(root)
        if devices := cards_of(found):
            here = f"found {len(devices)} ({module.sought})"
            return Detection(name=name, devices=devices, why=", ".join((*missed, here)))
        own = f", but for the processor's own (LAB_ACCELERATOR={name} takes it)" if found else ""
        missed.append(f"no {module.sought}{own}")
    return Detection(name=CPU, devices=(), why=", ".join(missed))


def cards_of(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Those that are no part of the processor."""
    return tuple(device for device in devices if not device.integrated)


def find_all(root: HostPath) -> dict[str, tuple[Device, ...]]:
    """The devices of every accelerator that this host has some of, in the order in which ``auto`` tries them."""
    found = {name: module.find(root) for name, module in modules().items()}
    return {name: devices for name, devices in found.items() if devices}


def remarks(root: HostPath) -> tuple[str, ...]:
    """Why each card that no lab can use is not among the devices."""
    return tuple(remark(card, vendor) for card, vendor in unused(root))


def unserved(root: HostPath) -> tuple[str, ...]:
    """The same of those cards that ``auto`` would take if they had their driver and device file."""
    cards = ((card, vendor) for card, vendor in unused(root) if vendor.drivers and not is_other(card, vendor))
    return tuple(remark(card, vendor) for card, vendor in cards if card.address != vendor.integrated)


def unused(root: HostPath) -> Iterator[tuple[pci.PciDevice, PciVendor]]:
    """The cards of known vendors that no device file leads to."""
    found = find_all(root)
    mapped = {device.pci for devices in found.values() for device in devices}
    # Without addresses a device file cannot be matched to its card.
    unclear = {get(name).pci for name, devices in found.items() if not all(device.pci for device in devices)}
    vendors = {one.id: one for one in (UNSUPPORTED, *(module.pci for module in modules().values())) if one}
    for card in pci.cards(root):
        vendor = vendors.get(card.vendor)
        if vendor and card.address not in mapped and not (vendor in unclear and card.driver in vendor.drivers):
            yield card, vendor


def is_other(card: pci.PciDevice, vendor: PciVendor) -> bool:
    """Whether this is something else of the same vendor and class."""
    return bool(vendor.other) and not card.display and card.driver not in vendor.drivers


def remark(card: pci.PciDevice, vendor: PciVendor) -> str:
    """Why a card is not among the devices."""
    what, wanted = f"{vendor.name} at {card.address}", " or ".join(vendor.drivers)
    if not vendor.drivers:
        return f"{what} is left alone: labctl has no accelerator for it"
    if is_other(card, vendor):
        return f"{vendor.other} at {card.address} is left alone: it is no GPU"
    if not card.driver:
        return f"{what} has no driver; {wanted} would serve it"
    if card.driver not in vendor.drivers:
        return f"{what} is held by the driver {card.driver}, not by {wanted}"
    fix = f" (`{vendor.first_file}` makes the first)" if vendor.first_file else ""
    return f"{what} has its driver, {card.driver}, but no device file{fix}"


def observe(wanted: str, root: HostPath = ROOT) -> tuple[str, Host]:
    """The accelerator that the setting asks for (``auto`` takes what is there) and the host whose files are below root.

    Paths are as that host knows them. Raises HostError when there is no device of the wanted kind.
    """
    choice = choose(wanted, root)
    module = get(choice.name)
    return choice.name, Host(
        name="local",
        cpus=procfs.cpus(root),
        memory=procfs.memory(root),
        mtu=procfs.default_mtu(root),
        uid=os.getuid(),
        gid=os.getgid(),
        bf16=procfs.has_bf16(root),
        devices=choice.devices,
        driver=module.driver(root),
        groups=groups(choice.devices, root),
        numa=procfs.numa_nodes(root),
        infiniband=procfs.infiniband(root),
        files=tuple(path for path in module.present if (root / path.lstrip("/")).is_file()),
        locks=f"/{procfs.lock_directory(root).removeprefix(str(root)).lstrip('/')}",
    )


def groups(devices: tuple[Device, ...], root: HostPath) -> tuple[int, ...]:
    """The groups that may open these devices, and ``render`` and ``video`` where the host names them; never root's.

    Who opens a device is decided by the number of its group.
    """
    named = procfs.groups("render", "video", root=root)
    owning = (procfs.group_of(device.path, root) for device in devices)
    return tuple(sorted({*named, *owning} - {0}))
