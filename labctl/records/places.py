"""Step or epoch that a line of a run names, by the pattern that nodes also use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from labctl.system import files

Count = tuple[int, int | None]
"""A number and the total, None if the line does not name it."""


@lru_cache
def pattern() -> re.Pattern[str]:
    """Return the compiled pattern of step.regex: kind (epoch, iter, step), its number, and the total if any."""
    return re.compile(files.path("docker", "step.regex").read_text(encoding="utf-8"))


def step(lowered: str) -> Count | None:
    """Return (number, total or None) of the first step in a lower-case line; None without a whole number."""
    # Most lines have neither word: to search them all would double the time per line.
    return _count(lowered, epochs=False) if "step" in lowered or "iter" in lowered else None


def epoch(lowered: str) -> Count | None:
    """Return (number, total or None) of the first epoch in a lower-case line; None without a whole number."""
    return _count(lowered, epochs=True) if "epoch" in lowered else None


def last(lines: Iterable[str]) -> str:
    """Return the last step or epoch in lines, such as ``step 12/100``; empty if there is none."""
    places = pattern().findall("\n".join(lines))
    if not places:
        return ""
    kind, number, of = places[-1]
    return f"{kind.lower()} {number}/{of}" if of else f"{kind.lower()} {number}"


def _count(lowered: str, *, epochs: bool) -> Count | None:
    """Return (number, total or None) of the first epoch, or of the first other count, in a line; None if none."""
    for match in pattern().finditer(lowered):
        kind, number, of = match.groups()
        if (kind == "epoch") == epochs and "." not in number:
            return int(number), int(of) if of else None
    return None
