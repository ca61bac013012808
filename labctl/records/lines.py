"""The lines that a run prints."""

from __future__ import annotations

from msgspec import Struct


class Line(Struct, frozen=True, gc=False):
    """What a run printed: ``said`` by a rank, behind what launchers put before it, where that is known."""

    text: str
    when: float
    """In seconds since 1970."""
    rank: int | None = None
    said: str = ""
    report: bool = False
    """Whether rank.sh itself printed it, and no program that it started."""


def line_of(text: str, when: float) -> Line:
    """A line as it was printed, and when, without the mark of its rank.

    That is what rank_output.py puts before each line, behind what launchers put there. No rank can print one.
    """
    before, mark, said = text.partition("\x02")
    before, begins, rank = before.rpartition("\x01")
    number = rank[:-1] if (report := rank.endswith("!")) else rank
    if mark and begins and number.isdecimal() and len(number) < 8:
        return Line(before + said, when, int(number), said, report)
    return Line(text, when)
