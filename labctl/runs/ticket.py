"""Text about a bad host for whoever repairs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from labctl.backends.health import HostHealth, Kept, read
from labctl.health.examine import fingerprint
from labctl.health.model import Condition, Snapshot
from labctl.model import HERE

LAST_LINES = 40
"""Kernel lines to quote."""


def of(lab: Path, verdict: HostHealth) -> str:
    """Return the text about a host, by its readings that the lab keeps."""
    machine = socket.gethostname() if verdict.host == HERE else verdict.host
    return text(verdict, read(lab, verdict.host), machine)


def text(verdict: HostHealth, kept: Kept | None, machine: str) -> str:
    """Render a host's verdict, each finding with its readings, its hardware, and the last kernel lines, with times."""
    if kept is None:
        return f"{machine}: {verdict.error}\n"
    read_at = datetime.fromtimestamp(kept.last.time).astimezone()
    # A host that does not answer has its earlier readings.
    error = [f"{machine}: {verdict.error}"] if verdict.error else []
    level = kept.level if verdict.error else verdict.level
    lines = [*error, f"{machine}: {level}, read {read_at:%Y-%m-%d %H:%M:%S %z}", *_last_good(kept), ""]
    for condition in verdict.wrong:
        lines += _finding(condition, kept.last)
    lines += ["Hardware and versions", *(f"  {name}: {value}" for name, value in fingerprint(kept.last).items()), ""]
    return "\n".join((*lines, *_kernel_lines(kept.last)))


def _last_good(kept: Kept) -> Iterator[str]:
    """Yield when the host was last good."""
    if kept.good:
        yield f"last good {datetime.fromtimestamp(kept.good.time).astimezone():%Y-%m-%d %H:%M:%S %z}"


def _finding(condition: Condition, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding, the value and the command that read it, and all readings of its item."""
    yield f"{condition.level}: {condition.sentence()}"
    yield f"  {condition.source or 'compared'}: {condition.value or condition.text}"
    item = condition.item.partition(" (")[0]
    for reading in snapshot.readings:
        if item and reading.item == item and reading.value is not None:
            yield f"  {reading.name}: {reading.text()}  ({reading.source})"
    yield ""


def _kernel_lines(snapshot: Snapshot) -> Sequence[str]:
    """Return the last kernel lines of the kinds that are examined, with their times."""
    if not snapshot.lines:
        return ()
    booted = snapshot.time - snapshot.uptime
    shown = snapshot.lines[-LAST_LINES:]
    times = (datetime.fromtimestamp(booted + line.seconds).astimezone() for line in shown)
    rows = (f"  {when:%Y-%m-%d %H:%M:%S} {line.text}" for when, line in zip(times, shown, strict=True))
    return ("Kernel lines (dmesg)", *rows, "")
