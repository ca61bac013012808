"""What labctl said of a run, against what it should have said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hangs.cases import Case

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"


@dataclass(frozen=True)
class Said:
    """What labctl said of a run."""

    kind: str | None
    """Kind of hang; None where it named none."""
    accused: tuple[int, ...]
    sentence: str
    below: str
    """The sentence, and the lines below it."""


def said(case: Case, document: dict[str, Any], printed: str) -> Said:
    """Return what is judged: the case's message, the document's hang, or else labctl's printed lines."""
    if case.message:
        return Said(None, (), document["message"], document["message"])
    hang = document.get("hang")
    if hang:
        return Said(hang["kind"], tuple(hang["ranks"]), hang["sentence"], "\n".join((hang["sentence"], *hang["lines"])))
    # The result of a run that passed has no hang, but labctl may have spoken of one while it went on.
    lines = "\n".join(re.findall(r"^labctl: .*", printed, re.MULTILINE))
    return Said(None, (), "" if case.causes else lines, lines)


def grade(case: Case, document: dict[str, Any], printed: str) -> tuple[str, list[str]]:
    """Return RIGHT, WRONG or UNKNOWN for what labctl said of a run, and what is wrong or missing in it."""
    what, cause = said(case, document, printed), document["cause"]
    never = [word for word in case.never if word in what.below]
    wrong = [f"says {word!r}" for word in never]
    if cause not in (case.causes or (None,)):
        wrong.append(f"cause is {cause}")
    if what.kind not in (None, "unknown", *case.kinds):
        wrong.append(f"kind is {what.kind}")
    if wrong:
        return WRONG, wrong
    missing = missing_words(case.expected(case.words + case.message), what.sentence)
    missing += missing_words(case.expected(case.below), what.below)
    if what.kind == "unknown" or (missing and not what.kind):
        return UNKNOWN, missing
    if what.kind and case.accused not in (None, what.accused):
        missing.append(f"accuses {what.accused}")
    return (WRONG if missing else RIGHT), missing


def missing_words(expected: list[tuple[str, ...]], text: str) -> list[str]:
    """Return a mistake for each tuple of alternatives of which the text has none."""
    return [f"does not say {' or '.join(words)!r}" for words in expected if not any(says(text, word) for word in words)]


def says(text: str, word: str) -> bool:
    """Return True if a text has a word, in which ``*`` is any text without a rank; a number at its end is whole."""
    pattern = re.escape(word).replace(r"\*", "(?:(?!rank).)*")
    return bool(re.search(rf"{pattern}(?!\d)", text))
