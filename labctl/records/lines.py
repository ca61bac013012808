"""Lines that runs print."""

from __future__ import annotations

from msgspec import Struct

STREAM = "<stderr>"
"""Stream in Open MPI's prefix: rank_output.py writes all lines there, whichever stream the rank wrote to."""


class Line(Struct, frozen=True, gc=False):
    """A line of a run; ``said`` is the part that its rank printed, behind the prefixes of launchers, if known."""

    text: str
    when: float
    """Time in seconds since 1970."""
    rank: int | None = None
    said: str = ""
    report: bool = False
    """Printed by rank.sh itself, not by the program of the rank."""


def line_of(text: str, when: float) -> Line:
    """Parse a printed line into a Line: rank and report by its mark if it has one, mark and STREAM taken out.

    rank_output.py puts the mark before each line, behind the prefixes of launchers. No rank can print one.
    """
    before, mark, output = text.partition("\x02")
    before, begins, rank = before.rpartition("\x01")
    number = rank[:-1] if (report := rank.endswith("!")) else rank
    if mark and begins and number.isdecimal() and len(number) < 8:
        return Line(before.replace(STREAM, "") + output, when, int(number), output, report)
    return Line(text, when)
