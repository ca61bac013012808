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
    """Return the pattern of three groups: ``epoch``, ``iter``, ``iteration`` or ``step``; its number; the total."""
    return re.compile(files.path("docker", "step.regex").read_text(encoding="utf-8"))


def step(lowered: str) -> Count | None:
    """Return the first step that a line, in lower case, names in a whole number; None without one."""
    # Most lines have neither word: to search them all would double the time per line.
    return _count(lowered, epochs=False) if "step" in lowered or "iter" in lowered else None


def epoch(lowered: str) -> Count | None:
    """Return the first epoch that a line, in lower case, names in a whole number; None without one."""
    return _count(lowered, epochs=True) if "epoch" in lowered else None


def last(lines: Iterable[str]) -> str:
    """Return the last step or epoch that lines name, such as ``step 12/100``; empty if they name none."""
    places = pattern().findall("\n".join(lines))
    if not places:
        return ""
    kind, number, of = places[-1]
    return f"{kind.lower()} {number}/{of}" if of else f"{kind.lower()} {number}"


def _count(lowered: str, *, epochs: bool) -> Count | None:
    """Return the first epoch, or first other count, that a line names in a whole number; None without one."""
    for match in pattern().finditer(lowered):
        kind, number, of = match.groups()
        if (kind == "epoch") == epochs and "." not in number:
            return int(number), int(of) if of else None
    return None
