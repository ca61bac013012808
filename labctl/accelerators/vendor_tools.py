"""What the vendors' tools add to devices: name, memory, uuid, and what is wrong with one.

A tool that is not installed adds nothing; what the kernel reported stays.
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
"""Runs a program on the host that has the devices, for so many seconds, whatever its exit code."""
SECONDS = 10
"""A healthy tool takes one or two, on a host of eight GPUs without persistence mode a few more."""
MIB = 1 << 20

_SICK = re.compile(r"unknown error|is lost|requires? reset|reset required|err!", re.IGNORECASE)
"""What a tool writes into a cell that it could not fill."""


def run_here(argv: Sequence[str], seconds: float) -> process.CompletedProcess:
    return process.run(argv, timeout=seconds, check=False)


def describe(accelerator: str, devices: tuple[Device, ...], run: Run = run_here) -> tuple[Device, ...]:
    """The devices with what their vendor's tool says of them; a tool that fails or hangs is said in their health."""
    tool = accelerators.get(accelerator).tool
    if tool is None or not devices:
        return devices
    try:
        done = run(tool.argv, SECONDS)
    except (HostError, OSError) as error:
        # Too slow, or a file that is no program.
        return tuple(replace(device, health=str(error)) for device in devices)
    if done.code == process.NOT_FOUND:
        return devices
    rows, words = read(tool, f"{done.out}\n{done.err}".splitlines())
    return tuple(completed(device, tool, row_of(device, rows), words, done.code) for device in devices)


def read(tool: Tool, lines: Iterable[str]) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """The lines that are rows of the tool's table, and the others: its words to people."""
    rows, words = [], []
    for line in filter(None, map(str.strip, lines)):
        cells = next(csv.reader([line], skipinitialspace=True), [])
        row = dict(zip(tool.columns, map(str.strip, cells), strict=False))
        if len(cells) == len(tool.columns) and row["index"].isdecimal():
            rows.append(row)
        elif len(cells) != len(tool.columns):
            words.append(line)
    return tuple(rows), tuple(words)


def row_of(device: Device, rows: Iterable[Mapping[str, str]]) -> Mapping[str, str] | None:
    """The device's row by its PCI address or, where either side has none, by its index."""
    for row in rows:
        address = pci.address(row["pci"])
        if (address == device.pci) if address and device.pci else (row["index"] == device.id):
            return row
    return None


def completed(device: Device, tool: Tool, row: Mapping[str, str] | None, words: tuple[str, ...], code: int) -> Device:
    """The device with the row's words; cells that say nothing leave what the kernel reported."""
    health = complaint(device, tool, row, words, code)
    row = {name: text for name, text in (row or {}).items() if not re.fullmatch(r"\[.*\]|N/A|", text)}
    memory = re.match(r"\d+", row.get("memory", ""))
    return replace(
        device,
        name=row.get("name", device.name),
        memory=int(memory[0]) * MIB if memory else device.memory,
        uuid=row.get("uuid", device.uuid),
        health=f"{tool.name}: {health}" if health else device.health,
    )


def complaint(device: Device, tool: Tool, row: Mapping[str, str] | None, words: tuple[str, ...], code: int) -> str:
    """What the tool says is wrong with a device: a line that names it, a cell, or its failure as a whole."""
    naming = [line for line in words if device.pci and pci.address(line) == device.pci]
    if naming:
        return naming[0]
    if row:
        sick = next((text for text in row.values() if _SICK.search(text)), "")
        counted = row.get("errors", "").lstrip("0").isdecimal()
        return sick or (f"{row['errors']} uncorrected memory errors since the driver was loaded" if counted else "")
    if code == 0:
        return "does not list it" if tool.lists_all else ""
    # A failure that names other devices says nothing of this one.
    general = (line for line in words if not pci.address(line))
    return next(general, "") if words else f"exit code {code}"
