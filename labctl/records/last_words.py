"""What a rank wrote last, as the message of its failure quotes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain

MOST, FEWEST, ALL = 300, 60, 30_000
"""Lines that are kept: of a rank or node, where there are very many of them, and of all together."""
LONGEST = 1000
"""Characters that are quoted."""
# Lines of an exception's message that are quoted. What is longer is what the program wrote after it, unless its last
# line is further in, as that of a list in a message is.
MOST_LINES = 8
# torch marks the lines of a traceback with the rank.
MARK = re.compile(r"(?:\[rank(\d+)\]: ?)?(.*)", re.DOTALL)
# The shell's own words about the program that it started.
SHELL = re.compile(r"^\S*rank\.sh: line \d+:\s+\d+ ")
RULE = re.compile(r"^\W*$")
# A frame of a traceback, the beginning of which may be long gone, and what one begins with.
TRACEBACK = re.compile(r"^(  File \".+\", line \d+|Traceback \(most recent call last\):$)")
# Python draws a group of exceptions as a tree; frames and sources are further in than messages.
GROUP, MEMBER = re.compile(r"^\s*\+ Exception Group Traceback "), re.compile(r"^\s*\| (\S.*)")
# Behind the first failure in a message.
OTHERS = re.compile(r"; rank \d+ on \S+ exited with code .*")
FATAL = re.compile(r"^Fatal Python error: ")
# Begins a line that is not part of an exception's message.
RECORD = re.compile(r"^(\[?[WEI]\d{4}|\[W|(WARNING|INFO|ERROR)\b|\d{4}-\d\d-\d\d|/\S+\.py:\d+: \w*Warning)")
ERROR = re.compile(
    r"error|exception|fail|not found|no such|denied|can(no|')t|could not|abort|fault|assert|terminat|what\(\)|killed"
    r"|invalid|refused|unable|fatal|panic|interrupt|exit|required|missing",
    re.IGNORECASE,
)


def kept(speakers: int) -> int:
    """Lines to keep of each of so many ranks or nodes: together they have 30 MB, up to 500 of them."""
    return max(FEWEST, min(MOST, ALL // speakers))


def quoted(written: Iterable[str], who: str = "") -> str:
    """The last exception of ``rank N`` with its message, else the last line that says something; one line of text."""
    lines = [line for line in _lines_of(who, written) if line and not SHELL.match(line)]
    for line in reversed(lines):
        if FATAL.match(line):
            return line[:LONGEST]
    found = (
        _group(lines),
        _exception(lines),
        _block(lines),
        *(line for line in reversed(lines) if not RULE.match(line)),
    )
    return next(filter(None, found), "").strip()[:LONGEST]


def is_error(words: str) -> bool:
    """Whether quoted words tell of an error, and are not merely the last that a rank wrote."""
    return bool(ERROR.search(words))


BEFORE, AFTER, STACKS = 12, 4, 60
"""Lines that are shown around the cause of a failure; of a stalled run with the stacks that are printed behind it."""


def cause_lines(message: str, lines: Sequence[str], *, stalled: bool = False) -> list[str]:
    """The lines around the first that has the words of a message's first failure; else the last that tell of an error.

    Of words that are several lines, as of a message of that many, the first is looked for.
    """
    parts = OTHERS.sub("", message).split(": ")
    ends = [words for begin in range(len(parts)) if len(words := ": ".join(parts[begin:]).rstrip(".")) > 3]
    whole = (at for words in ends for at, line in enumerate(lines) if words in line)
    first = (at for words in ends[1:] for at, line in enumerate(lines) if _begins(words, line))
    at = next(chain(whole, first), None)
    if at is None:
        return [line for line in lines if is_error(line)][-BEFORE:]
    return list(lines[max(0, at - BEFORE) : at + (STACKS if stalled else AFTER)])


def _begins(words: str, line: str) -> bool:
    """Whether a line ends with the first of these words, two of them or more."""
    said = line[max(0, line.find(words.partition(" ")[0])) :].strip()
    return " " in said and words.startswith(said)


def _lines_of(who: str, written: Iterable[str]) -> list[str]:
    """Those with the mark of the rank, less that, else those without one; where no rank is known, those of the last."""
    marked: dict[str, list[str]] = {}
    last = ""
    for line in written:
        rank, text = MARK.fullmatch(line).groups("")  # type: ignore[union-attr] # it matches any line
        marked.setdefault(rank, []).append(text.rstrip())
        last = rank or last
    number = who.removeprefix("rank ")
    tries = (number, "", last) if number.isdigit() else (last, "")
    return next((marked[one] for one in tries if one in marked), [])


def _exception(lines: list[str]) -> str:
    """The message of the last exception, if nothing else was written after it."""
    begins = next((at for at in reversed(range(len(lines))) if TRACEBACK.match(lines[at])), None)
    if begins is None:
        return ""
    message = begins + 1
    while message < len(lines) and lines[message][:1].isspace():
        message += 1
    found: list[str] = []
    for line in lines[message:]:
        if RECORD.match(line):
            break
        found.append(line.strip())
    is_message = len(found) <= MOST_LINES or lines[message + len(found) - 1][:1].isspace()
    return " ".join(found[:MOST_LINES]) if is_message else ""


def _group(lines: list[str]) -> str:
    """The messages of a group of exceptions that was the last to be written."""
    begins = next((at for at, line in enumerate(lines) if GROUP.match(line)), len(lines))
    if not lines or "-----" not in lines[-1]:
        return ""
    members = (found[1] for found in map(MEMBER.match, lines[begins:]) if found)
    return "; ".join(words for words in members if not words.startswith("Traceback "))


def _block(lines: list[str]) -> str:
    """The beginning of a text between two rules, as Open MPI's tools write it."""
    rules = [at for at, line in enumerate(lines) if len(line) > 20 and not line.strip("-=*")]
    if len(rules) < 2 or rules[-1] != len(lines) - 1:
        return ""
    return " ".join(line.strip() for line in lines[rules[-2] + 1 : rules[-1]][:3])
