"""PCIe links of accelerators, network cards and NVMe disks: width, speed, errors.

Sources: Documentation/ABI/testing/sysfs-bus-pci and sysfs-bus-pci-devices-aer_stats of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject
from labctl.health.rules import grew, less_than_neighbours, remark_grew
from labctl.system.hostdump import HostDump

DEVICES = "sys/bus/pci/devices"
SCRIPT = """\
set --
devices=
for device in sys/bus/pci/devices/*; do
    [ -r "$device/class" ] && read -r class < "$device/class" || continue
    case $class in
    0x02* | 0x03* | 0x0108* | 0x12*) ;;
    *) continue ;;
    esac
    # A virtual function has no link of its own.
    [ ! -e "$device/physfn" ] || continue
    devices="$devices ${device##*/}"
    set -- "$@" "$device/class" "$device/vendor" "$device/device"
    # The kernel would wake a device that sleeps to read its link.
    status=
    [ ! -r "$device/power/runtime_status" ] || read -r status < "$device/power/runtime_status"
    [ "$status" != suspended ] || continue
    set -- "$@" "$device/current_link_width" "$device/max_link_width" \\
        "$device/current_link_speed" "$device/max_link_speed" \\
        "$device/../vendor" "$device/../max_link_width" "$device/../max_link_speed"
done
fact 'pci devices' "$devices"
lines "$@"
printf 'fact pci errors\\n'
grep -s '^TOTAL_ERR_' /dev/null sys/bus/pci/devices/*/aer_dev_* | body
# Flags of the first core.
! head -n 30 proc/cpuinfo 2> /dev/null | grep -q '^flags.* hypervisor' || fact 'pci virtual' yes
"""
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
"""Widths of the specification. Others, 0, 63 and 255, are what a device without a link or without power shows."""
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
_DISPLAY, _ACCELERATORS = "0x03", ("0x0302", "0x12")
"""Classes: display controllers; those without a display (3D controllers), and processing accelerators."""
_COMMUNICATION = ("0x02", "0x0108")
"""Classes of network cards and NVMe disks."""
_VIRTUAL_PORT = "0x1b36"
"""Vendor of QEMU's ports, whose width tells nothing of the slot. Source: docs/specs/pci-ids.rst of QEMU."""
ERRORS: Mapping[str, str] = {
    "aer_dev_fatal": "fatal PCIe errors",
    "aer_dev_nonfatal": "nonfatal PCIe errors",
    "aer_dev_correctable": "correctable PCIe errors",
}


class Link(NamedTuple):
    """Width and speed in GT/s of a link as it is, and as the device and its slot allow; 0 if unknown."""

    width: int
    max_width: int
    slot_width: int
    speed: float
    max_speed: float
    slot_speed: float

    @property
    def possible(self) -> int:
        """Return the width that both device and slot allow; 0 if either is unknown."""
        return min(self.max_width, self.slot_width)


class Device(NamedTuple):
    """A PCI device by its address; ``kind`` is its class and ``id`` its ``vendor:device``, without a link if hidden."""

    address: str
    kind: str
    id: str
    link: Link | None

    @property
    def card(self) -> str:
        """Return the address without the function."""
        return self.address.rpartition(".")[0]

    @property
    def kin(self) -> str:
        """Name what devices have in common whose links should be alike: their model and their slot's abilities."""
        if not self.link or not self.link.slot_width:
            return self.id
        return f"{self.id} in a slot x{self.link.slot_width} of {self.link.slot_speed:g} GT/s"


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the readings of each device, with links only of hardware that shows them."""
    devices = [_device(dump, address) for address in dump.facts.get("pci devices", "").split()]
    virtual = "pci virtual" in dump.facts
    # The functions of a card, such as the ports of a network card, share a link: the first stands for all.
    first = {device.card: device for device in reversed(devices)}
    for device in devices:
        # Only a device with a link is hardware that should not go away by itself.
        kin = device.id if device.link else ""
        yield _reading(device, "PCI id", device.id, "device", kind="fact", kin=kin)
        if device.link and first[device.card] is device:
            yield from _of_link(device, device.link)
    yield from _hidden(devices, virtual=virtual)
    yield from _errors(dump.facts.get("pci errors", ""), {device.address: device for device in devices})


def _device(dump: HostDump, address: str) -> Device:
    """Build a device from its files."""
    vendor, model = (_text(dump, address, name).removeprefix("0x") for name in ("vendor", "device"))
    return Device(address, _text(dump, address, "class"), f"{vendor}:{model}", _link(dump, address))


def _link(dump: HostDump, address: str) -> Link | None:
    """Return a device's link; None if the device shows none."""
    width, max_width = (_width(_text(dump, address, name)) for name in ("current_link_width", "max_link_width"))
    if not width or not max_width:
        return None
    hidden = "pci virtual" in dump.facts or _text(dump, address, "../vendor") == _VIRTUAL_PORT
    return Link(
        width,
        max_width,
        0 if hidden else _width(_text(dump, address, "../max_link_width")),
        _speed(_text(dump, address, "current_link_speed")),
        _speed(_text(dump, address, "max_link_speed")),
        _speed(_text(dump, address, "../max_link_speed")),
    )


def _text(dump: HostDump, address: str, name: str) -> str:
    """Return the text of a device's file; the folder above it is the port that it is plugged into."""
    return dump.files.get(f"{DEVICES}/{address}/{name}", "").strip()


def _width(text: str) -> int:
    """Return a number of lanes; 0 if it is none."""
    return int(text) if text.isdecimal() and int(text) in _WIDTHS else 0


def _speed(text: str) -> float:
    """Return a speed in GT/s, of ``32.0 GT/s PCIe`` or ``8 GT/s``; 0 if it is none, such as ``Unknown``."""
    match = _SPEED.match(text)
    return float(match[1]) if match else 0.0


def _of_link(device: Device, link: Link) -> Iterator[Reading]:
    """Yield the readings of a link.

    Display controllers save power by a lower speed, and by fewer lanes: pp_dpm_pcie of the
    kernel's documentation, and what vendors' tools say of a card that is not in use. A laptop's also has fewer lanes
    than its port. Thus their width is compared only with that of others, their speed with none.
    """
    yield _reading(device, "PCIe width", link.width, "current_link_width")
    yield _reading(device, "PCIe max width", link.max_width, "max_link_width", kind="fact")
    if link.max_speed:
        yield _reading(device, "PCIe max speed", link.max_speed, "max_link_speed", kind="fact", unit="GT/s")
    if link.possible:
        kin = f"{device.id} at {device.address}"
        yield _reading(device, "PCIe usable width", link.possible, "../max_link_width", kind="fact", kin=kin)
    if link.possible and not device.kind.startswith(_DISPLAY):
        lanes = f"{link.width} of {link.possible}"
        yield _reading(device, "PCIe lanes", lanes, "current_link_width")
    if link.speed and device.kind.startswith(_COMMUNICATION):
        yield _reading(device, "PCIe speed", link.speed, "current_link_speed", unit="GT/s")


def _reading(
    device: Device,
    name: str,
    value: float | str,
    file: str,
    *,
    kind: Literal["fact", "state", "counter"] = "state",
    unit: str = "",
    kin: str | None = None,
) -> Reading:
    """Build a reading of a device's file."""
    return Reading(
        name=name,
        value=value,
        source=f"/{DEVICES}/{device.address}/{file}",
        item=device.address,
        unit=unit,
        kind=kind,
        kin=device.kin if kin is None else kin,
    )


def _hidden(devices: Iterable[Device], *, virtual: bool) -> Iterator[Reading]:
    """Yield one unknown reading for all accelerators of a virtual machine whose links it does not show."""
    hidden = [device.address for device in devices if device.kind.startswith(_ACCELERATORS) and not device.link]
    if virtual and hidden:
        why = f"the virtual machine does not show the PCIe link of {', '.join(hidden)}"
        yield Reading(name="PCIe width", value=None, source=f"/{DEVICES}/{hidden[0]}/current_link_width", why=why)


def _errors(text: str, devices: Mapping[str, Device]) -> Iterator[Reading]:
    """Yield the counters of a line per file, such as ``sys/bus/pci/devices/A/aer_dev_fatal:TOTAL_ERR_FATAL 0``."""
    for line in text.splitlines():
        path, _, counter = line.rpartition(":")
        folder, _, file = path.rpartition("/")
        device = devices.get(folder.rpartition("/")[2])
        if device and file in ERRORS:
            yield _reading(device, ERRORS[file], int(counter.split()[1]), file, kind="counter")


# --- checks ----------------------------------------------------------------------------------------------------


def unused_lanes(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge fewer lanes than device and slot have as a remark; with neighbours, these tell what is usual."""
    used, _, possible = str(reading.value).partition(" of ")
    if used == possible or evidence.neighbours:
        return None
    return Answer("remark", f"PCIe uses {used} of the {possible} lanes that device and slot have")


def narrower_slot(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a narrower slot than the same device has on other nodes as a remark: a setting or how it was built."""
    answer = less_than_neighbours(reading, evidence)
    return Answer("remark", answer.text) if answer else None


def bus_error(match: re.Match[str]) -> Answer:
    """Judge an uncorrected error as the kernel does: after a fatal one the link is unreliable, else it works on.

    Source: Documentation/PCI/pcieaer-howto.rst, "AER Overview".
    """
    severity = match[4].lower()
    return Answer("bad" if severity == "fatal" else "remark", f"{severity} PCIe error", match[1])


def link_reset(match: re.Match[str]) -> Answer:
    """Judge the reset of a link after an error, and a failed recovery, as bad."""
    return Answer("bad", f"PCIe error below this port: {match[2]}", match[1])


def slot_down(match: re.Match[str]) -> Answer:
    """Judge a link that went down as a remark: a dock or a disk that a person unplugs has the same line."""
    return Answer("remark", "PCIe link went down", f"slot {match[1]}")


_RESEAT = "end the run, turn the node off and reseat {item} and its riser or cable; then service"
_SHOW = "{sudo}lspci -vvv -s {item}"
_WIDTH_STEPS = (_SHOW, "restart the node", _RESEAT)
_ERROR_STEPS = ("{sudo}dmesg | grep -e AER -e 'PCIe Bus Error'", _SHOW, "restart the node", _RESEAT)
_LINE_STEPS = (
    "end the run, and look at the lines around it: {sudo}dmesg | grep -e AER -e PCIe -e pciehp",
    "restart the node",
    "if it comes again: reseat the device and its riser or cable; then service",
)
_ADDRESS = "[0-9a-f]+:[0-9a-f]+:[0-9a-f]+[.][0-7]"

SUBJECT = Subject(
    name="PCIe",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(name="pcie-width", reading="PCIe width", judge=less_than_neighbours, steps=_WIDTH_STEPS),
        Check(name="pcie-lanes", reading="PCIe lanes", judge=unused_lanes, steps=_WIDTH_STEPS),
        Check(
            name="pcie-slot",
            reading="PCIe usable width",
            judge=narrower_slot,
            steps=("compare slots, risers and the firmware's bifurcation of lanes with those of the other nodes",),
        ),
        Check(name="pcie-speed", reading="PCIe speed", judge=less_than_neighbours, steps=_WIDTH_STEPS),
        Check(name="pcie-fatal", reading="fatal PCIe errors", judge=grew, limit=0, steps=_ERROR_STEPS),
        Check(name="pcie-nonfatal", reading="nonfatal PCIe errors", judge=grew, limit=0, steps=_ERROR_STEPS),
        # They are repaired by sending again. Source for the order of magnitude: 8 replays a minute are "the maximum
        # recommended" (dcgm_gpu_hardware_limits.h of DCGM), which makes 1000 in two hours.
        Check(
            name="pcie-correctable",
            reading="correctable PCIe errors",
            judge=remark_grew,
            limit=1000,
            steps=_ERROR_STEPS,
        ),
    ),
    lines=(
        # Source: aer_print_error() of drivers/pci/pcie/aer.c: "Uncorrected" up to Linux 6.7, then "Uncorrectable".
        LineCheck(
            name="pcie-error",
            pattern=rf"({_ADDRESS}): (AER: )?PCIe Bus Error: severity=Uncorrect(ed|able) [(]((Non-)?Fatal)[)]",
            judge=bus_error,
            steps=(_SHOW, *_LINE_STEPS),
        ),
        # Source: aer_root_reset() of aer.c, and pcie_do_recovery() of drivers/pci/pcie/err.c.
        LineCheck(
            name="pcie-reset",
            pattern=rf"({_ADDRESS}): AER: ((Root|Downstream) Port link has been reset|device recovery failed)",
            judge=link_reset,
            steps=(_SHOW, *_LINE_STEPS),
        ),
        # Source: pciehp_handle_presence_or_link_change() of drivers/pci/hotplug/pciehp_ctrl.c.
        LineCheck(
            name="pcie-slot-down",
            pattern=r"pciehp.*Slot[(]([^)]*)[)]: Link Down",
            judge=slot_down,
            steps=_LINE_STEPS,
        ),
    ),
)
