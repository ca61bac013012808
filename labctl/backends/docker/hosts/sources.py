"""What code, data and models a host has: commits of clones, digests of data, revisions of what is cached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from labctl.backends.docker.hosts.ssh import Connection

Kind = Literal["code", "data", "snapshot"]
Sources = Mapping[tuple[Kind, str], str]
SCRIPT = Path(__file__).with_name("sources.sh").read_text(encoding="utf-8")
CHANGED = " changed"
"""How the commit of what differs from it ends."""


def read(connection: Connection, asked: Iterable[tuple[Kind, str]], seconds: float) -> Sources:
    """What the host has of this, as ``sources.sh`` says it; nothing of what it has not. HostError."""
    words = tuple(word for one in asked for word in one)
    if not words:
        return {}
    lines = connection.run(SCRIPT, *words, timeout=seconds).out.splitlines()
    parts = (line.split("\t") for line in lines)
    known = dict.fromkeys(zip(words[::2], words[1::2], strict=True))
    return {(part[0], part[1]): part[2] for part in parts if len(part) == 3 and (part[0], part[1]) in known}  # type: ignore[misc]
