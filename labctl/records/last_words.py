"""Last output of a rank: the exception or line that the message of its failure quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST, FEWEST, ALL = 300, 60, 30_000
"""Lines to keep: per rank or node at most, if there are very many of them, and of all together."""
LONGEST = 1000
"""Characters to quote at most."""
MOST_LINES = 8
"""Lines of an exception's message to quote. Longer text is later output of the program, unless its last line is
indented, as in a list."""
# torch marks the lines of a traceback with the rank.
MARK = re.compile(r"(?:\[rank(\d+)\]: ?)?(.*)", re.DOTALL)
# Message of the shell about the program that it started.
SHELL = re.compile(r"^\S*rank\.sh: line \d+:\s+\d+ ")
RULE = re.compile(r"^\W*$")
# A frame of a traceback, whose beginning may no longer be kept, and its first line.
TRACEBACK = re.compile(r"^(  File \".+\", line \d+|Traceback \(most recent call last\):$)")
# Python prints a group of exceptions as a tree; frames and source lines are indented more than messages.
GROUP, MEMBER = re.compile(r"^\s*\+ Exception Group Traceback "), re.compile(r"^\s*\| (\S.*)")
# Follows the first failure in a message.
OTHERS = re.compile(r"; rank \d+ on \S+ exited with code .*")
FATAL = re.compile(r"^Fatal Python error: ")
# Beginning of a log line, which is not part of an exception's message.
RECORD = re.compile(r"^(\[?[WEI]\d{4}|\[W|(WARNING|INFO|ERROR)\b|\d{4}-\d\d-\d\d|/\S+\.py:\d+: \w*Warning)")
ERROR = re.compile(
    r"error|exception|fail|not found|no such|denied|can(no|')t|could not|abort|fault|assert|terminat|what\(\)|killed"
    r"|invalid|refused|unable|fatal|panic|interrupt|exit|required|missing",
    re.IGNORECASE,
)


def kept(speakers: int) -> int:
    """Return the number of lines to keep per rank or node: together at most 30 MB, for up to 500 of them."""
    return max(FEWEST, min(MOST, ALL // speakers))


def quoted(written: Iterable[str], who: str = "") -> str:
    """Return the fatal line or exception, else the last line, of ``rank N`` as one line; empty if it wrote no text."""
    lines = [line for line in _lines_of(who, written) if line and not SHELL.match(line)]
    for line in reversed(lines):
        if FATAL.match(line):
            return line[:LONGEST]
    candidates = (
        _group(lines),
        _exception(lines),
        _block(lines),
        *(line for line in reversed(lines) if not RULE.match(line)),
    )
    return next(filter(None, candidates), "").strip()[:LONGEST]


def is_error(text: str) -> bool:
    """Tell if quoted text is about an error, rather than just the last output of a rank."""
    return bool(ERROR.search(text))


BEFORE, AFTER, STACKS = 12, 4, 60
"""Lines to show before and after the cause of a failure; and after it if the run stalled, as stacks follow."""


def cause_lines(message: str, lines: Sequence[str], *, stalled: bool = False) -> list[str]:
    """Return the lines around the text of a message's first failure; if no line has it, the last lines about errors.

    If the text has several lines, its first one is searched for.
    """
    parts = OTHERS.sub("", message).split(": ")
    ends = [end for begin in range(len(parts)) if len(end := ": ".join(parts[begin:]).rstrip(".")) > 3]
    at = _position(ends, lines)
    if at is None:
        return [line for line in lines if is_error(line)][-BEFORE:]
    return list(lines[max(0, at - BEFORE) : at + (STACKS if stalled else AFTER)])


def _position(texts: Sequence[str], lines: Sequence[str]) -> int | None:
    """Return the index of the first line that has a text, else that ends with the first words of one; else None."""
    for text in texts:
        for at, line in enumerate(lines):
            if text in line:
                return at
    for text in texts[1:]:
        for at, line in enumerate(lines):
            if _begins(text, line):
                return at
    return None


def _begins(text: str, line: str) -> bool:
    """Tell if a line ends with the first words of a text, at least two."""
    end = line[max(0, line.find(text.partition(" ")[0])) :].strip()
    return " " in end and text.startswith(end)


def _lines_of(who: str, written: Iterable[str]) -> list[str]:
    """Return the lines marked with the rank, without the mark; else those without a mark.

    If ``who`` is not a rank, return those of the rank that wrote last.
    """
    marked: dict[str, list[str]] = {}
    last = ""
    for line in written:
        rank, text = MARK.fullmatch(line).groups("")  # type: ignore[union-attr] # it matches any line
        marked.setdefault(rank, []).append(text.rstrip())
        last = rank or last
    number = who.removeprefix("rank ")
    tries = (number, "", last) if number.isdigit() else (last, "")
    return next((marked[mark] for mark in tries if mark in marked), [])


def _exception(lines: list[str]) -> str:
    """Return the message of the last exception and what follows; empty if that is more than MOST_LINES."""
    begins = next((at for at in reversed(range(len(lines))) if TRACEBACK.match(lines[at])), None)
    if begins is None:
        return ""
    message = begins + 1
    while message < len(lines) and lines[message][:1].isspace():
        message += 1
    text_lines: list[str] = []
    for line in lines[message:]:
        if RECORD.match(line):
            break
        text_lines.append(line.strip())
    is_message = len(text_lines) <= MOST_LINES or lines[message + len(text_lines) - 1][:1].isspace()
    return " ".join(text_lines[:MOST_LINES]) if is_message else ""


def _group(lines: list[str]) -> str:
    """Return the messages of a group of exceptions at the end; empty if there is none."""
    begins = next((at for at, line in enumerate(lines) if GROUP.match(line)), len(lines))
    if not lines or "-----" not in lines[-1]:
        return ""
    members = (match[1] for match in map(MEMBER.match, lines[begins:]) if match)
    return "; ".join(text for text in members if not text.startswith("Traceback "))


def _block(lines: list[str]) -> str:
    """Return the beginning of a text between two rules at the end, as Open MPI's tools print it; else empty."""
    rules = [at for at, line in enumerate(lines) if len(line) > 20 and not line.strip("-=*")]
    if len(rules) < 2 or rules[-1] != len(lines) - 1:
        return ""
    return " ".join(line.strip() for line in lines[rules[-2] + 1 : rules[-1]][:3])
