"""Hosts of a made-up /sys, whose health is read by a subject's real script."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from labctl.health import catalogue, examine, script
from labctl.health.model import Condition, Reading, Rules, Snapshot, Subject
from labctl.system import hostdump

DATA = Path(__file__).parents[2] / "data/health"


def tool(folder: Path, name: str, text: str) -> Path:
    """Write a program of a shell, and return the folder, to be put in front of PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}")
    (folder / name).chmod(0o755)
    return folder


def look(subject: Subject, root: Path, *, tools: Path | None = None, dmesg: str = "", full: bool = True) -> Snapshot:
    """Return the readings that a subject's script takes below a root, with these lines as the kernel's."""
    path = f"{tools}:{os.environ['PATH']}" if tools else os.environ["PATH"]
    argv = ["sh", "-c", script.script((subject,), Rules(), full=full), "sh", str(root)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PATH": path}
    )
    found = script.snapshot(hostdump.read(done.stdout, "gpu-1"), (subject,), Rules(), sent=0, received=1e12)
    if not dmesg:
        return found
    return replace(found, lines=tuple(script.kernel_lines(dmesg)), lines_why="")


def answers(subject: Subject, now: Snapshot, others: Mapping[str, Snapshot] | None = None) -> list[Condition]:
    """Return the conditions of a host that are not ok, without those of the kernel's lines that cannot be read."""
    conditions = examine.examine(now, (subject,), Rules(), examine.Past(), others or {})
    return [each for each in conditions if each.level != "ok" and each.text != now.lines_why]


def sentences(conditions: list[Condition]) -> list[tuple[str, str]]:
    """Return level and sentence of each condition."""
    return [(each.level, each.sentence()) for each in conditions]


def judged_by_host(readings: Iterable[Reading]) -> set[str]:
    """Return the names of readings that the checks of every host judge; the clock's offset is in each snapshot."""
    judged = {check.reading for subject in catalogue.HOST for check in subject.checks}
    return {reading.name for reading in readings} & judged - {"clock offset"}


def sent(subject: Subject, dmesg: str) -> list[str]:
    """Return the kernel's lines that grep(1) finds by a subject's patterns, as its script does."""
    pattern = "|".join(f"({check.pattern})" for check in subject.lines)
    done = subprocess.run(["grep", "-E", pattern], input=dmesg, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
