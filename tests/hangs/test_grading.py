"""A sentence is right, wrong or unknown by what the case expects."""

from __future__ import annotations

from typing import Any

import pytest

from hangs.cases import CASES, PROGRAMS
from hangs.grading import RIGHT, UNKNOWN, WRONG, grade

BY_NAME = {case.name: case for case in CASES}
LOCK = "rank 1 (worker-1) has not joined all_reduce #5 (lock.py:25), where rank 0 waits"
INSIDE = "rank 1 is at lock.py:23"


def hang(kind: str, rank: int, sentence: str, *lines: str) -> dict[str, Any]:
    """Return the document of a hang of this kind, with one accused rank."""
    return {"kind": kind, "ranks": [rank], "sentence": sentence, "lines": [*lines]}


@pytest.mark.parametrize(
    ("diagnosis", "mark"),
    [
        (hang("missing-rank", 1, LOCK, INSIDE), RIGHT),
        (None, UNKNOWN),
        (hang("unknown", 1, "the ranks of worker-1 cannot be read"), UNKNOWN),
        (hang("missing-rank", 0, LOCK, INSIDE), WRONG),
        (hang("all-inside", 1, LOCK, INSIDE), WRONG),
        (hang("missing-rank", 1, LOCK.replace("lock.py:25", "lock.py:24"), INSIDE), WRONG),
        (hang("missing-rank", 1, LOCK), WRONG),
    ],
)
def test_a_hang_is_judged_by_kind_rank_and_line(diagnosis: dict[str, Any] | None, mark: str) -> None:
    """A hang with a wrong kind, rank or line, or without a line below, is WRONG; none is UNKNOWN."""
    document = {"cause": "stalled", "message": "no step", "hang": diagnosis}
    assert grade(BY_NAME["lock"], document, "")[0] == mark


def test_a_sentence_that_confuses_the_sides_is_wrong() -> None:
    """Right collectives and lines, but at the other ranks: WRONG."""
    waiting, apart = "ranks 0, 1, 2 are in {} #7 ({})", "rank 3 (worker-1) is in {} #7 ({})"
    reduces, meets = ("all_reduce", "skipped_collective.py:14"), ("barrier", "skipped_collective.py:15")
    case = BY_NAME["skipped collective"]

    def mark(sentence: str) -> str:
        """Return the grade of a sentence for the case `skipped collective`."""
        return grade(case, {"cause": "stalled", "hang": hang("different-collective", 3, sentence)}, "")[0]

    assert mark(f"{waiting.format(*reduces)}, {apart.format(*meets)}") == RIGHT
    assert mark(f"{waiting.format(*meets)}, {apart.format(*reduces)}") == WRONG


@pytest.mark.parametrize(
    ("cause", "message", "mark"),
    [
        ("launcher-failed", "orted on worker-1 was killed", RIGHT),
        ("launcher-failed", "The launcher failed with exit code 205.", UNKNOWN),
        ("rank-crashed", "orted on worker-1 was killed", WRONG),
    ],
)
def test_a_death_is_judged_by_cause_and_message(cause: str, message: str, mark: str) -> None:
    """Right cause and message: RIGHT; other message: UNKNOWN; other cause: WRONG."""
    assert grade(BY_NAME["orted killed"], {"cause": cause, "message": message}, "")[0] == mark


@pytest.mark.parametrize(
    ("printed", "mark"),
    [
        ("labctl: rank 0 (worker-0) is busy (97 % of a core); rank 1 waits in barrier #2 (evaluation.py:19)", RIGHT),
        ("worker-0: busy", UNKNOWN),
        ("labctl: rank 1 (worker-1) has not joined barrier #2 (evaluation.py:19)", WRONG),
    ],
)
def test_a_run_that_passes_is_judged_by_what_was_printed_meanwhile(printed: str, mark: str) -> None:
    """Only lines `labctl: ...` count: RIGHT, UNKNOWN without one, WRONG if they accuse rank 1."""
    assert (
        grade(BY_NAME["evaluation on rank 0 alone"], {"cause": None, "message": "", "hang": None}, printed)[0] == mark
    )


def test_a_run_without_a_hang_must_not_be_accused() -> None:
    """For the case `slow but going` no hang is RIGHT, any hang is WRONG."""
    document = {"cause": None, "message": "", "hang": None}
    assert grade(BY_NAME["slow but going"], document, "")[0] == RIGHT
    assert grade(BY_NAME["slow but going"], {**document, "hang": hang("all-outside", 1, "no rank")}, "")[0] == WRONG


def test_every_program_has_a_case_and_a_short_text() -> None:
    """Each program has a case, 35 lines at most, and a docstring whose first line is a sentence."""
    programs = {path.stem: path.read_text(encoding="utf-8") for path in PROGRAMS.glob("*.py")}
    assert programs.keys() == {case.program for case in CASES}
    assert max(len(text.splitlines()) for text in programs.values()) <= 35
    assert all(text.startswith('"""') and text.partition("\n")[0].endswith('."""') for text in programs.values())
