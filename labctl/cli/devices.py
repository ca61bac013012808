"""devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context, show
from labctl.cli.output import table

Row = dict[str, Any]
# A column stands where any device has something to say in it.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "KIND": lambda device: str(device["accelerator"]),
    "ID": lambda device: str(device["id"]).rpartition("/")[2],
    "FILE": lambda device: str(device["path"]),
    "PCI": lambda device: str(device["pci"]),
    "MODULE": lambda device: str(device["module"]),
    "NUMA": lambda device: "" if device["numa"] is None else str(device["numa"]),
    "CORES": lambda device: ranges(device["cpus"]),
    "NAME": lambda device: f"{device['name']}{' (integrated)' * device['integrated']}".strip(),
    "MEMORY": lambda device: f"{device['memory'] / (1 << 30):.0f} GiB" if device["memory"] else "",
    "NODE": lambda device: str(device["node"] or ""),
    "HELD BY": lambda device: str(device["holder"]),
    "HEALTH": lambda device: str(device["health"]),
}


def devices_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    with answering(as_json=json) as output:
        document = flows.devices(context(directory, output, setting))
        show(output, document, lambda: "\n\n".join(map(host_text, document["hosts"])))


def host_text(host: Row) -> str:
    """A host for people: its devices, then what else a lab gets of it."""
    rows = [("host", host["name"]), ("accelerator", f"{host['accelerator'] or 'none'}; {host['why']}")]
    rows += [("driver", f"{kind}: {version}") for kind, version in host["drivers"].items() if version]
    rows.append(("cores", " | ".join(map(ranges, host["numa"] or [host["cpus"]]))))
    rows += [("fabric", fabric_text(fabric)) for fabric in host["fabrics"]]
    if host["groups"]:
        rows.append(("groups", ", ".join(map(str, host["groups"]))))
    rows += [("node", node_text(node)) for node in host["nodes"]]
    rows += [("note", note) for note in host["notes"]]
    text = table(rows[0], rows[1:])
    return f"{text}\n\n{device_table(host['devices'])}" if host["devices"] else text


def device_table(devices: Sequence[Row]) -> str:
    """One line a device, without the columns that none of them fills."""
    filled = {name: cells for name, cell in COLUMNS.items() if any(cells := [cell(device) for device in devices])}
    return table(list(filled), [[cell or "-" for cell in line] for line in zip(*filled.values(), strict=True)])


def fabric_text(fabric: Row) -> str:
    numa = "" if fabric["numa"] is None else f"NUMA node {fabric['numa']}"
    return ", ".join(filter(None, (f"{fabric['name']} {fabric['layer']} {fabric['state']}", fabric["interface"], numa)))


def node_text(node: Row) -> str:
    devices = f"devices {', '.join(node['devices'])}; " if node["devices"] else ""
    return f"{node['name']}: {devices}cores {ranges(node['cpus'])}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
