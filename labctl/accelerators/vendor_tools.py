"""Details of devices from the vendors' tools: name, memory, uuid and health.

A tool that is not installed adds nothing; the kernel's report stays.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from labctl import accelerators
from labctl.accelerators import Tool
from labctl.errors import HostError
from labctl.model import Device
from labctl.system import pci, process

Run = Callable[[Sequence[str], float], process.CompletedProcess]
"""Runs a program on the host with the devices, for up to some seconds; returns whatever its exit code is."""
SECONDS = 10
"""Timeout of a tool; it takes 1 to 2 s, a few more on a host of eight GPUs without persistence mode."""
MIB = 1 << 20

_SICK = re.compile(r"unknown error|is lost|requires? reset|reset required|err!", re.IGNORECASE)
"""Pattern of a cell that a tool could not fill."""


def run_here(argv: Sequence[str], seconds: float) -> process.CompletedProcess:
    """Run a vendor's tool on this host; no exit code is an error."""
    return process.run(argv, timeout=seconds, check=False)


def describe(accelerator: str, devices: tuple[Device, ...], run: Run = run_here) -> tuple[Device, ...]:
    """Return the devices with their vendor tool's details, unchanged without a tool; its failure is in their health."""
    tool = accelerators.get(accelerator).tool
    if tool is None or not devices:
        return devices
    try:
        done = run(tool.argv, SECONDS)
    except (HostError, OSError) as error:
        # The tool is too slow or not executable.
        return tuple(replace(device, health=str(error)) for device in devices)
    if done.code == process.NOT_FOUND:
        return devices
    rows, messages = read(tool, f"{done.out}\n{done.err}".splitlines())
    return tuple(completed(device, tool, row_of(device, rows), messages, done.code) for device in devices)


def read(tool: Tool, lines: Iterable[str]) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """Return lines with a cell per column as rows, without the head, and lines with other cells as messages."""
    rows, messages = [], []
    for line in filter(None, map(str.strip, lines)):
        cells = next(csv.reader([line], skipinitialspace=True), [])
        row = dict(zip(tool.columns, map(str.strip, cells), strict=False))
        if len(cells) == len(tool.columns) and row["index"].isdecimal():
            rows.append(row)
        elif len(cells) != len(tool.columns):
            messages.append(line)
    return tuple(rows), tuple(messages)


def row_of(device: Device, rows: Iterable[Mapping[str, str]]) -> Mapping[str, str] | None:
    """Return the device's row, by PCI address or, if either address is missing, by index; None without a row."""
    for row in rows:
        address = pci.address(row["pci"])
        if (address == device.pci) if address and device.pci else (row["index"] == device.id):
            return row
    return None


def completed(
    device: Device, tool: Tool, row: Mapping[str, str] | None, messages: tuple[str, ...], code: int
) -> Device:
    """Return the device with the row's details, where not empty, and with the tool's complaint, if any, as health."""
    health = complaint(device, tool, row, messages, code)
    row = {name: text for name, text in (row or {}).items() if not re.fullmatch(r"\[.*\]|N/A|", text)}
    memory = re.match(r"\d+", row.get("memory", ""))
    return replace(
        device,
        name=row.get("name", device.name),
        memory=int(memory[0]) * MIB if memory else device.memory,
        uuid=row.get("uuid", device.uuid),
        health=f"{tool.name}: {health}" if health else device.health,
    )


def complaint(device: Device, tool: Tool, row: Mapping[str, str] | None, messages: tuple[str, ...], code: int) -> str:
    """Return a line that names the device, else a bad cell of its row, or without a row the tool's failure, or ""."""
    naming = [line for line in messages if device.pci and pci.address(line) == device.pci]
    if naming:
        return naming[0]
    if row:
        sick = next((text for text in row.values() if _SICK.search(text)), "")
        counted = row.get("errors", "").lstrip("0").isdecimal()
        return sick or (f"{row['errors']} uncorrected memory errors since the driver was loaded" if counted else "")
    if code == 0:
        return "does not list it" if tool.lists_all else ""
    # A failure that names other devices says nothing of this one.
    general = (line for line in messages if not pci.address(line))
    return next(general, "") if messages else f"exit code {code}"
