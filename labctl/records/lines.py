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


def line_of(text: str, when: float) -> Line:
    """A line as it was printed, and when, without the mark of its rank.

    That is what rank.sh puts before each line, behind what launchers put there.
    """
    before, mark, said = text.partition("\x02")
    before, begins, rank = before.rpartition("\x01")
    if mark and begins and rank.isdecimal() and len(rank) < 8:
        return Line(before + said, when, int(rank), said)
    return Line(text, when)
