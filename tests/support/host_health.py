"""Scripts of a node's health run on a tree of files or on this machine, and damaged reports for their parsers."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from labctl.errors import HostError
from labctl.health import examine, script
from labctl.health.model import Condition, Reading, Rules, Snapshot, Subject
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

TOLERATED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
"""What a parser may raise on damaged text: ``script.snapshot`` then says that the output cannot be read."""


def put(root: Path, files: Mapping[str, str]) -> None:
    """Write files below root."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def output(subject: Subject, root: Path | str = "/", **environment: str) -> str:
    """Run a subject's whole script below a root folder and return its output, without that of the kernel's lines."""
    text = script.script((subject,), Rules(), full=True)
    result = subprocess.run(
        ["sh", "-c", text, "sh", str(root)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return result.stdout


def dump_of(subject: Subject, root: Path | str = "/", **environment: str) -> HostDump:
    """Run a subject's script and parse its output."""
    return hostdump.read(output(subject, root, **environment), "gpu-1")


def look(subject: Subject, root: Path | str = "/", **environment: str) -> Snapshot:
    """Run a subject's script and build a snapshot."""
    sent = time.time()
    dump = dump_of(subject, root, **environment)
    return script.snapshot(dump, (subject,), Rules(), sent=sent, received=time.time())


def read(subject: Subject, root: Path | str, **environment: str) -> dict[tuple[str, str], Reading]:
    """Run a subject's script and return its readings by item and name."""
    return {reading.key: reading for reading in subject.readings(dump_of(subject, root, **environment))}


def conditions(
    subject: Subject, now: Snapshot, before: Snapshot | None = None, *others: Snapshot
) -> dict[str, Condition]:
    """Return the answers by check that are not ok, with these earlier readings and these other nodes."""
    neighbours = {f"worker-{number}": other for number, other in enumerate(others, 1)}
    past = examine.Past(snapshot=before)
    found = examine.examine(now, (subject,), Rules(), past, neighbours)
    return {condition.check: condition for condition in found if condition.level != "ok"}


def wrong_here(subject: Subject) -> list[Condition]:
    """Examine this very machine and return what is bad or a remark; its kernel's lines may be of any age."""
    now = look(subject)
    past = examine.Past(since=now.uptime)
    found = examine.examine(now, (subject,), Rules(), past, {"worker-1": now, "worker-2": now})
    return [condition for condition in found if condition.level in ("bad", "remark")]


def of_line(subject: Subject, text: str) -> tuple[str, str]:
    """Return level and sentence that a subject's checks of kernel lines give to a line; empty without a word.

    grep -E, which chooses the lines on a node, and Python must agree on which match.
    """
    pattern = "|".join(f"({check.pattern})" for check in subject.lines)
    chosen = subprocess.run(["grep", "-qE", pattern], input=text, text=True, check=False)
    assert (chosen.returncode == 0) == any(re.search(check.pattern, text) for check in subject.lines)
    now = Snapshot(time=0, uptime=10, lines=tuple(script.kernel_lines(f"[    5.000000] {text}")))
    past = examine.Past()
    found = examine.examine(now, (Subject(name=subject.name, lines=subject.lines),), Rules(), past, {})
    wrong = [condition for condition in found if condition.level != "ok"]
    assert len(wrong) < 2
    return (wrong[0].level, wrong[0].sentence().rpartition(", ")[0]) if wrong else ("", "")


def fuzz(subject: Subject, text: str, seed: int) -> None:
    """Parse 300 truncated and changed versions of a script's output; only TOLERATED may come out."""
    source = random.Random(seed)  # noqa: S311 - the same changes each time
    for _ in range(300):
        characters = list(text[: source.randrange(1, len(text) + 1)])
        for _ in range(source.randrange(8)):
            characters[source.randrange(len(characters))] = source.choice("0123456789 \t\n:/-.()DxZ,é")
        damaged = "".join(characters)
        try:
            tuple(subject.readings(hostdump.read(f"{damaged}\nend\n", "gpu-1")))
        except (*TOLERATED, HostError):
            continue
