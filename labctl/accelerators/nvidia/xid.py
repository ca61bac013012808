"""Kernel lines of NVIDIA's driver: Xid errors, and GPUs that fell off the bus.

Source: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from labctl.health.model import Answer, Level, LineCheck
from labctl.system import pci

RESTART = ("end what runs on the node", "{sudo}reboot", "if it comes again: reseat or replace the card")


class Xid(NamedTuple):
    """An Xid of NVIDIA's catalog: its meaning, and what to do at once; a remark if the program may have caused it."""

    meaning: str
    advice: str
    """NVIDIA's immediate action; of a remark, the cause."""
    level: Level = "bad"


_RESET, _SERVICE, _PROGRAM_OWN = "reset the GPU", "reset the GPU, then service", "the program's own fault"
XIDS: Mapping[int, Xid] = {
    13: Xid("graphics engine exception", _PROGRAM_OWN, "remark"),
    31: Xid("GPU memory page fault", _PROGRAM_OWN, "remark"),
    43: Xid("GPU stopped processing", f"{_PROGRAM_OWN}, the GPU is healthy", "remark"),
    45: Xid("preemptive cleanup", "the driver ended the program's channels, look at the lines before", "remark"),
    46: Xid("GPU stopped processing", _SERVICE),
    48: Xid("uncorrectable ECC error", _RESET),
    54: Xid("auxiliary power is not connected", "check the power cables"),
    62: Xid("micro-controller halt", _SERVICE),
    63: Xid("a row of memory is remapped, or a page retired", "reset the GPU when convenient"),
    64: Xid("remapping of a row, or retirement of a page, failed", _SERVICE),
    69: Xid("graphics engine class error", _PROGRAM_OWN, "remark"),
    74: Xid("NVLink error", "reset the GPU, look at the other end of the link"),
    92: Xid("high rate of corrected ECC errors", "service if it comes again"),
    94: Xid("memory error contained to one program", "restart the program, reset the GPU when convenient"),
    95: Xid("uncontained memory error", _RESET),
    109: Xid("context switch timeout", _SERVICE),
    110: Xid("security fault", "power cycle, then service"),
    119: Xid("the GPU's system processor (GSP) does not answer", "reset the GPU, else power cycle"),
    120: Xid("error of the GPU's system processor (GSP)", "reset the GPU, else power cycle"),
    136: Xid("link training failed", _RESET),
    140: Xid("unrecovered ECC error", _SERVICE),
    143: Xid("GPU initialization failed", _SERVICE),
    156: Xid("resource retirement", _RESET),
    158: Xid("fatal timeout", _SERVICE),
    171: Xid("uncorrectable DRAM error", _RESET),
    172: Xid("uncorrectable SRAM error", _RESET),
    **dict.fromkeys(range(144, 151), Xid("NVLink error", "see NVIDIA's table of its status", "remark")),
}
"""Source: NVIDIA's Xid catalog, immediate and investigatory actions. Others are for the display, or need no action."""


def _judge_xid(match: re.Match[str]) -> Answer | None:
    """Judge an Xid: its number, meaning, and what to do or whose fault it is."""
    number = int(match[2])
    xid = XIDS.get(number)
    return Answer(xid.level, f"Xid {number} ({xid.meaning}): {xid.advice}", _place(match[1])) if xid else None


def _judge_lost(match: re.Match[str]) -> Answer | None:
    """Judge a GPU that fell off the bus: its Xid is 79, another line has no Xid."""
    return Answer("bad", "has fallen off the bus", _place(match[0]))


def _judge_action(match: re.Match[str]) -> Answer | None:
    """Judge the driver's own word for what has to be done: `changed from 0x0 (None) to 0x2 (Node Reboot Required)`."""
    if match[2] == "None":
        return None
    return Answer("bad", f"the driver asks for an action: {match[2]}", _place(match[1]))


def _place(text: str) -> str:
    """Return a PCI address in a line, which has no function behind ``PCI:``."""
    match = re.search(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})", text)
    return pci.address(f"{match[0]}.0") if match else text


LINES = (
    LineCheck(
        name="gpu-xid",
        pattern=r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+)",
        judge=_judge_xid,
        steps=(
            "end what runs on {item}",
            "{sudo}nvidia-smi --gpu-reset --id={id}",
            "{sudo}reboot",
            "service",
        ),
    ),
    LineCheck(
        name="gpu-bus",
        pattern=r"NVRM: .*(PCI:)?[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}.* fallen off the bus",
        judge=_judge_lost,
        steps=RESTART,
    ),
    LineCheck(
        name="gpu-action",
        pattern=r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): 154,.* to 0x[0-9a-f]+ \(([A-Za-z0-9 ]+)\)",
        judge=_judge_action,
        steps=("end what runs on {item}", "do what the driver asks for"),
    ),
)
