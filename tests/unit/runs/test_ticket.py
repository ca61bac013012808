"""The text about a host for whoever repairs it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl.backends import health
from labctl.backends.health import HostHealth, Kept
from labctl.health.model import Condition, KernelLine, Reading, Snapshot
from labctl.runs import ticket

SNAPSHOT = Snapshot(
    time=1_700_000_000.0,
    uptime=1000.0,
    readings=(
        Reading(name="PCIe width", value=8, item="GPU 2", source="lspci -vv"),
        Reading(name="serial", value="S123", item="GPU 2", kind="fact", source="nvidia-smi"),
        Reading(name="power", value=None, item="GPU 2", source="nvidia-smi", why="not supported"),
        Reading(name="PCIe width", value=16, item="GPU 3", source="lspci -vv"),
        Reading(name="driver", value="580", kind="fact", source="modinfo"),
    ),
    lines=tuple(KernelLine(float(number), f"Xid {number}") for number in range(900, 950)),
)
NARROW = Condition(
    check="pcie-width", subject="PCIe", level="bad", item="GPU 2 (0000:3b:00.0)",
    text="PCIe width 8, 16 on 7 others", value="8", source="lspci -vv",
)  # fmt: skip
REMARK = Condition(check="changed", subject="Changes", level="remark", item="eth1", text="is gone; it had MTU 9000")


def verdict(*conditions: Condition, **fields: Any) -> HostHealth:
    """Build a bad verdict on host gpu-1."""
    return HostHealth(**{"host": "gpu-1", "nodes": (), "level": "bad", "conditions": conditions, **fields})


def kept(**fields: Any) -> Kept:
    """Build the readings that are kept of a host, never good."""
    return Kept(**{"last": SNAPSHOT, "level": "bad", **fields})


def text(*conditions: Condition, **fields: Any) -> str:
    """Return the ticket of a verdict on readings."""
    return ticket.text(verdict(*conditions), kept(**fields), "gpu-1.example.org")


def test_a_finding_has_its_source_and_all_readings_of_its_item() -> None:
    """Write a ticket: machine, time, the bad finding first, its item's known readings, hardware and kernel lines."""
    written = text(REMARK, NARROW)
    assert re.match(r"gpu-1\.example\.org: bad, read 2023-11-1\d \d\d:\d\d:\d\d [+-]\d{4}\n", written)
    assert "last good" not in written
    assert """
bad: GPU 2 (0000:3b:00.0): PCIe width 8, 16 on 7 others
  lspci -vv: 8
  PCIe width: 8  (lspci -vv)
  serial: S123  (nvidia-smi)

remark: eth1: is gone; it had MTU 9000
  compared: is gone; it had MTU 9000

Hardware and versions
  GPU 2 serial: S123
  driver: 580

Kernel lines (dmesg)
""" in written  # fmt: skip


def test_the_last_kernel_lines_are_quoted_with_their_times() -> None:
    """Write a ticket of many lines: the last 40, each with date and time; without lines no heading."""
    quoted = re.findall(r"^  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (Xid \d+)$", text(NARROW), re.MULTILINE)
    assert quoted == [f"Xid {number}" for number in range(910, 950)]
    assert "Kernel lines" not in text(NARROW, last=replace(SNAPSHOT, lines=()))


def test_the_last_good_time_is_told() -> None:
    """Write a ticket of a host that was good once."""
    assert "\nlast good 2023-11-1" in text(NARROW, good=SNAPSHOT)


def test_a_host_that_does_not_answer_has_its_earlier_readings() -> None:
    """Write a ticket of a silent host: that it is, then what was read before, or only that without earlier readings."""
    silent = verdict(level="unknown", error="gpu-1 did not answer within 60 s")
    assert ticket.text(silent, None, "gpu-1") == "gpu-1: gpu-1 did not answer within 60 s\n"
    first, second, *_ = ticket.text(silent, kept(), "gpu-1").splitlines()
    assert first == "gpu-1: gpu-1 did not answer within 60 s"
    assert second.startswith("gpu-1: bad, read 2023-11-1")


def test_this_machine_is_called_by_its_name(tmp_path: Path) -> None:
    """Write a ticket of host `local`: whoever repairs it needs its name; another host has the lab's."""
    for host, name in (("local", socket.gethostname()), ("gpu-1", "gpu-1")):
        of_host = verdict(NARROW, host=host)
        health.keep(tmp_path, {host: SNAPSHOT}, [of_host], full=True)
        assert ticket.of(tmp_path, of_host).startswith(f"{name}: bad")
