"""Accelerators: a module or package per vendor, which holds everything specific to it; a new one adds an accelerator.

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
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import ConfigError, HostError
from labctl.health.model import Subject
from labctl.model import Device, DeviceMapping, Host, Request
from labctl.system import human, pci, procfs
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT

CPU = "cpu"
"""Accelerator of a machine without devices."""
FEW = 4
"""Device files that are named, at most."""


class PciVendor(Struct, frozen=True):
    """A vendor's PCI devices: its id, the noun for a device in messages, and the kernel drivers that serve it."""

    id: str
    name: str
    drivers: tuple[str, ...] = ()
    first_file: str = ""
    """Command that creates the first device file, if the driver leaves that to a program."""
    other: str = ""
    """Noun for the vendor's processing accelerators, if those are not its GPUs."""
    integrated: str = ""
    """PCI address of the GPU inside the processor."""


class Tool(Struct, frozen=True):
    """A vendor's command that prints a CSV line per device, and the meaning of its columns. Memory is in MiB."""

    argv: tuple[str, ...]
    columns: tuple[str, ...] = ("index", "pci", "name", "memory", "uuid")
    lists_all: bool = True
    """True if it lists every device that its vendor's driver serves."""

    @property
    def name(self) -> str:
        return self.argv[0]


class EngineAccess(Struct, frozen=True, kw_only=True):
    """The ways in which a container engine can pass devices; without any, containers get the device files."""

    cdi: str = ""
    """Kind of the CDI devices, such as ``example.com/gpu``."""
    driver: str = ""
    """The engine's device driver for reservations."""
    runtime: str = ""
    """Name of the container runtime."""
    noun: str = ""
    hint: str = ""
    """Advice if the engine has none of the ways."""
    program: str = ""
    """Program to install; ``package`` contains it, from the archive ``source``."""
    package: str = ""
    source: str = ""
    configure: str = ""
    """Root command that registers the runtime with the engine; if empty, labctl writes daemon.json."""
    generate_cdi: str = ""
    """Root command that writes the CDI specification into ``{folder}``."""
    enable_cdi: str = ""

    @property
    def is_open(self) -> bool:
        """Tell if the vendor supports several ways, between which the engine decides."""
        return len(self.ways) > 1

    @property
    def ways(self) -> tuple[Request, ...]:
        """Ways that this vendor supports, the preferred first."""
        names: dict[Request, str] = {"cdi": self.cdi, "reservation": self.driver, "runtime": self.runtime}
        return tuple(way for way, name in names.items() if name)


class Watch(Struct, frozen=True, kw_only=True):
    """Signs that a node still has its devices; the node agent gets them as JSON."""

    files: tuple[str, ...]
    """Patterns of device files below /dev; the first pattern matches one file per device."""
    tool: tuple[str, ...] = ()
    line: str = ""
    """Regular expression for the tool's line of a device."""


class Advice(Struct, frozen=True):
    """Result of a vendor's check, for doctor: fine if ``impact`` is empty. An empty ``fix`` means a new image."""

    code: str
    summary: str
    impact: str = ""
    fix: str = ""
    """Command to run as root; ``{sudo}`` marks further commands in it."""


Variables = Callable[[], Mapping[str, str]]


class AcceleratorModule(Struct, frozen=True, kw_only=True):
    """Everything specific to a vendor. Only the first three fields are required; functions have no side effects."""

    sought: str
    """Description of the devices, for messages."""
    find: Callable[[HostPath], tuple[Device, ...]]
    """Function that returns the devices of the host whose files are below a root directory."""
    container: Callable[[Host, tuple[Device, ...]], DeviceMapping]
    """Function that returns the vendor's part of a container's device mapping; see ``mapping``."""
    aliases: tuple[str, ...] = ()
    """Other names that users write for it."""
    chosen_by: tuple[str, ...] = ()
    """Variables by which a program chooses among the devices of its machine."""
    missed: str = ""
    """Pattern of the error of programs that find none of its devices."""
    kernel: str = ""
    """Pattern of the kernel's messages about its devices and driver."""
    out_of_memory: str = ""
    """Pattern of the error of programs whose devices are out of memory, besides the usual message."""
    faulted: str = ""
    """Pattern of the error of programs whose device, or the link to it, broke under them."""
    order: int = 50
    """Position in the order that ``auto`` tries."""
    driver: Callable[[HostPath], str] = lambda _: ""
    """Version of the kernel driver; empty if it is not loaded."""
    pci: PciVendor | None = None
    tool: Tool | None = None
    engine: EngineAccess = EngineAccess()
    watch: Watch | None = None
    attributes: tuple[str, ...] = ()
    """Files to read from another host: patterns below a device's folder in sysfs; ``texts`` below its root."""
    texts: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Files to check for existence; those that exist are in ``Host.files``."""
    count: tuple[str, str] | None = None
    """Module of torch that counts its devices, and TensorFlow's kind of them: ``docker/count_devices.py``."""
    health: str = ""
    """Command that shows clocks, throttling and memory errors of a host's devices."""
    subject: Subject | None = None
    """Its readings and checks for `labctl health`."""
    reset: str = ""
    """Root command that resets ``{device}``, which is not in use."""
    host_checks: Callable[[Host, Callable[[str], str]], Iterable[Advice]] = lambda *_: ()
    """Checks a host's configuration, given a function that reads the host's files by path."""
    image_check: Callable[[str, str, str, Variables], Advice | None] = lambda *_: None
    """Checks if a driver version supports an image, given its name, its base image and its environment.

    The summary is empty if it does; None if that is unknown.
    """
    require_image: Callable[[str], None] = lambda _: None
    """Raises HostError if the image cannot run with this host's driver."""
    base_image: Callable[[], str] = lambda: ""
    """Function that returns the base image that this host's driver requires; empty if any will do."""

    torch_index: str = ""
    """Source of its image's torch, if not the package index."""
    images: tuple[tuple[str, str], ...] = ()
    """Pairs of an image that a workload asks for and labctl's image for this vendor."""
    resources: tuple[str, ...] = ()
    """Resource names of its Kubernetes device plugins, the usual name first."""
    launchers: tuple[tuple[str, str], ...] = ()
    """Pairs of a launcher and the variant that its images have, if not the usual one."""

    @property
    def programs(self) -> frozenset[str]:
        """Names of the vendor's programs that show its devices."""
        tool = self.tool.argv if self.tool else ()
        watch = self.watch.tool if self.watch else ()
        commands = (tool, watch, self.health.split())
        return frozenset(command[0] for command in commands if command)

    def mapping(self, host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
        """Return a node's device mapping: the vendor's part, how the engine passes the devices, and RDMA devices."""
        vendor_part = self.container(host, devices)
        if not devices:
            return vendor_part
        way = self._way(host)
        kind = f"{self.engine.cdi}=" if way == "cdi" else ""
        rdma = (("IPC_LOCK", "root pins memory for RDMA; ranks by memlock"),) if host.infiniband else ()
        return replace(
            vendor_part,
            devices=devices,
            runtime=self.engine.runtime if way == "runtime" else None,
            driver={"reservation": self.engine.driver, "cdi": "cdi"}.get(way or "", ""),
            requests=tuple(f"{kind}{device.id}" for device in devices) if way in ("reservation", "cdi") else (),
            paths=(*vendor_part.paths, *host.infiniband),
            cap_add=(*vendor_part.cap_add, *rdma),
        )

    def _way(self, host: Host) -> Request | None:
        """Return the host's way to pass devices if the vendor has it, else the vendor's last; None if it has none."""
        ways = self.engine.ways
        if host.request in ways:
            return host.request
        return ways[-1] if ways else None


class Detection(Struct, frozen=True, kw_only=True):
    """The accelerator of a lab on this host, the devices it may use, and the reason for the choice."""

    name: str
    devices: tuple[Device, ...]
    why: str


UNSUPPORTED = PciVendor("0x1002", "an AMD card")


def modules() -> dict[str, AcceleratorModule]:
    """Return every accelerator by name, in the order that ``auto`` tries; ``cpu`` is last."""
    return _modules(tuple(__path__))


@lru_cache
def _modules(path: tuple[str, ...]) -> dict[str, AcceleratorModule]:
    """Import the modules below ``path``; return each ``MODULE`` by name, sorted by order, then name. Cached."""
    imported = {info.name: import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(path)}
    accelerators = {name: module.MODULE for name, module in imported.items() if hasattr(module, "MODULE")}
    return dict(sorted(accelerators.items(), key=lambda item: (item[1].order, item[0])))


def get(name: str) -> AcceleratorModule:
    """Return the module of an accelerator; raise ConfigError that lists the names if it is unknown."""
    available = modules()
    if name not in available:
        raise ConfigError(f"unknown accelerator `{name}`", hint=f"known: {', '.join(sorted(available))}")
    return available[name]


def of_image(name: str) -> str:
    """Return the accelerator that labctl's image of a name is made for; empty if it is made for none of them."""
    for accelerator, module in modules().items():
        if name == accelerator or name in dict(module.images).values():
            return accelerator
    return ""


def choose(setting: str, root: HostPath) -> Detection:
    """Return ``setting``'s accelerator and cards, detected for ``auto``. HostError without, ConfigError if unknown.

    A GPU inside the processor is used only if named, and only without a card.
    """
    if setting == "auto":
        return detect_accelerator(root)
    module = get(setting)
    devices = module.find(root)
    if not devices and setting != CPU:
        raise HostError(
            f"this host has no {setting} device: " + "; ".join((f"no {module.sought}", *remarks(root))),
            hint="labctl devices; set LAB_ACCELERATOR=auto or LAB_ACCELERATOR=cpu in .env",
        )
    return Detection(name=setting, devices=cards_of(devices) or devices, why="asked for by LAB_ACCELERATOR")


def detect_accelerator(root: HostPath) -> Detection:
    """Return the first accelerator in order with cards on this host, else ``cpu``; the reason lists those not found."""
    missed: list[str] = []
    for name, module in modules().items():
        if name == CPU:
            continue
        devices = module.find(root)
        if cards := cards_of(devices):
            present = f"found {human.listed((card.path for card in cards), FEW)}"
            return Detection(name=name, devices=cards, why=", ".join((*missed, present)))
        integrated = f", except the processor's own (LAB_ACCELERATOR={name} uses it)" if devices else ""
        missed.append(f"no {module.sought}{integrated}")
    return Detection(name=CPU, devices=(), why=", ".join(missed))


def cards_of(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices that are not part of the processor."""
    return tuple(device for device in devices if not device.integrated)


def find_all(root: HostPath) -> dict[str, tuple[Device, ...]]:
    """Return the devices of every accelerator that this host has, in the order that ``auto`` tries."""
    every = {name: module.find(root) for name, module in modules().items()}
    return {name: devices for name, devices in every.items() if devices}


def remarks(root: HostPath) -> tuple[str, ...]:
    """Explain for each unusable card why it is not among the devices."""
    return tuple(remark(card, vendor) for card, vendor in unused(root))


def unserved(root: HostPath) -> tuple[str, ...]:
    """Explain for each card of a supported vendor, NPUs and the processor's own GPU aside, why it is not a device."""
    cards = ((card, vendor) for card, vendor in unused(root) if vendor.drivers and not is_other(card, vendor))
    return tuple(remark(card, vendor) for card, vendor in cards if card.address != vendor.integrated)


def unused(root: HostPath) -> Iterator[tuple[pci.PciDevice, PciVendor]]:
    """Yield known vendors' cards that are no device; if a device has no PCI address, none that the driver serves."""
    found_by_name = find_all(root)
    mapped = {device.pci for device in chain.from_iterable(found_by_name.values())}
    # Without addresses a device file cannot be matched to its card.
    unclear = {get(name).pci for name, devices in found_by_name.items() if not _all_have_addresses(devices)}
    vendors = _vendors()
    for card in pci.cards(root):
        vendor = vendors.get(card.vendor)
        if vendor and card.address not in mapped and not (vendor in unclear and card.driver in vendor.drivers):
            yield card, vendor


def _all_have_addresses(devices: tuple[Device, ...]) -> bool:
    return all(device.pci for device in devices)


def _vendors() -> dict[str, PciVendor]:
    """Return the vendors by PCI id, those without an accelerator module included."""
    supported = (module.pci for module in modules().values() if module.pci)
    return {vendor.id: vendor for vendor in (UNSUPPORTED, *supported)}


def is_other(card: pci.PciDevice, vendor: PciVendor) -> bool:
    """Tell if a card is a processing accelerator of the vendor that is not its GPU, such as an NPU."""
    return bool(vendor.other) and not card.display and card.driver not in vendor.drivers


def remark(card: pci.PciDevice, vendor: PciVendor) -> str:
    """Explain why a card is not among the devices."""
    label, drivers = f"{vendor.name} at {card.address}", " or ".join(vendor.drivers)
    if not vendor.drivers:
        return f"{label} is not used: labctl does not support it"
    if is_other(card, vendor):
        return f"{vendor.other} at {card.address} is not used: it is not a GPU"
    if not card.driver:
        return f"{label} has no driver; it needs {drivers}"
    if card.driver not in vendor.drivers:
        return f"{label} is bound to the driver {card.driver}, not to {drivers}"
    fix = f" (`{vendor.first_file}` makes the first)" if vendor.first_file else ""
    return f"{label} has its driver, {card.driver}, but no device file{fix}"


def observe(setting: str, root: HostPath = ROOT) -> tuple[str, Host]:
    """Return the name of ``setting``'s accelerator, as ``choose``, and the host below ``root``. HostError if absent.

    Paths are the host's own.
    """
    choice = choose(setting, root)
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
    """Return the ids of the groups that own these devices, and of ``render`` and ``video``, if any; never root's.

    Access to a device is decided by the group's id, not its name.
    """
    named = procfs.groups("render", "video", root=root)
    owning = (procfs.group_of(device.path, root) for device in devices)
    return tuple(sorted({*named, *owning} - {0}))
