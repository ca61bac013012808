"""Command devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.output import cut, fitted, table, width_of
from labctl.system import human

if TYPE_CHECKING:
    from labctl.backends.devices import DetectedDevice, HostDevices

COLUMNS: dict[str, Callable[[DetectedDevice], str]] = {
    "KIND": lambda device: device.kind,
    "ID": lambda device: device.id.rpartition("/")[2],
    "FILE": lambda device: device.path,
    "PCI": lambda device: device.pci,
    "MODULE": lambda device: device.module,
    "NUMA": lambda device: "" if device.numa is None else str(device.numa),
    "CORES": lambda device: ranges(device.cpus),
    "NAME": lambda device: f"{device.name}{' (integrated)' * device.integrated}".strip(),
    "MEMORY": lambda device: human.memory(device.memory) if device.memory else "",
    "NODE": lambda device: device.node or "",
    "HELD BY": lambda device: device.leased_by,
    "HEALTH": lambda device: device.health,
}
"""Columns of the table of devices; a column that is empty for all devices is left out."""
DISPENSABLE = ("CORES", "MODULE", "FILE", "NUMA", "PCI")
"""Columns that a narrow terminal does not show, in their order."""


def devices_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    """`labctl devices`: list the devices of the hosts."""
    with answering(as_json=json) as output:
        report = flows.devices(context(directory, output, setting))
        width = width_of(sys.stdout)
        output.answer(report, "\n\n".join(host_text(host, width) for host in report.hosts))


def host_text(host: HostDevices, width: int = 0) -> str:
    """Render a host's accelerator, drivers, cores, fabrics and nodes as a table, and its devices as another.

    Both are cut to ``width`` characters, unless that is 0.
    """
    rows = [("host", host.name), ("accelerator", f"{host.accelerator or 'none'}; {host.reason}")]
    rows += [("driver", f"{kind}: {version}") for kind, version in host.drivers.items() if version]
    rows.append(("cores", " | ".join(map(ranges, host.numa or [host.cpus]))))
    for fabric in host.fabrics:
        numa = "" if fabric.numa is None else f"NUMA node {fabric.numa}"
        parts = (f"{fabric.name} {fabric.layer} {fabric.state}", fabric.interface, numa)
        rows.append(("fabric", ", ".join(filter(None, parts))))
    if host.groups:
        rows.append(("groups", f"containers get {group_text(host)}"))
    for node in host.nodes:
        devices = f"devices {', '.join(node.devices)}; " if node.devices else ""
        rows.append(("node", f"{node.name}: {devices}cores {ranges(node.cpus)}"))
    rows += [("note", warning) for warning in host.warnings]
    text = cut(table(rows[0], rows[1:]), width)
    return f"{text}\n\n{device_table(host.devices, width)}" if host.devices else text


def group_text(host: HostDevices) -> str:
    """Render the groups that containers get, by name as far as they have one, as ``video, render (gids 44, 109)``."""
    names = {number: name for name, number in host.group_names.items()}
    ids = ", ".join(map(str, host.groups))
    named = ", ".join(names[number] for number in host.groups if number in names)
    numbers = f"gid{'s' * (len(host.groups) > 1)} {ids}"
    return f"{named} ({numbers})" if named else numbers


def device_table(devices: Sequence[DetectedDevice], width: int = 0) -> str:
    """Render a table with a line per device; columns that are empty for all are left out."""
    columns = {name: list(map(cell, devices)) for name, cell in COLUMNS.items()}
    filled = {name: dashed(cells) for name, cells in columns.items() if any(cells)}
    return fitted(filled, width, DISPENSABLE)


def dashed(cells: Iterable[str]) -> list[str]:
    """Return the cells with ``-`` for empty ones."""
    return [cell or "-" for cell in cells]


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: ``0-3,8`` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
