"""Hostfiles of DeepSpeed and of MPI: a strict parser, a writer, and --include/--exclude."""

from __future__ import annotations

import re
from collections.abc import Iterable

from labctl.errors import ConfigError

MAX_SLOTS = 1024
PREFIX = "hostfile_"
"""Prefix of the files of a hostfile set; the job's name follows."""
OWN = 0
"""Slots of an entry that names a node alone: those that the node has."""

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# A number of slots in the words of other launchers and schedulers.
_COUNT = re.compile(r"(?:(?:slots?|max[-_]slots|np|ppn|count|n?(?:cpu|gpu|proc)s?)[=:]?|=)?([0-9]{1,4})", re.IGNORECASE)


def parse(text: str, path: str) -> tuple[tuple[str, int], ...]:
    """Parse a hostfile into pairs of node and slots, OWN without a count. ConfigError with ``path:line`` if invalid.

    A line is ``worker-0 slots=2`` (DeepSpeed, Open MPI), ``worker-0:2`` (MPICH, Intel MPI), or a name alone, whose
    slots are ``OWN``. DeepSpeed takes ``^(\\S+)\\s+slots=(\\d+)`` from each line and ignores the rest
    (fetch_hostfile in deepspeed/launcher/runner.py); here the rest may only be a comment.
    A byte order mark may begin the text.
    """
    slots: dict[str, int] = {}
    first_line: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        where = f"{path}:{number}"
        if "\0" in line:
            raise ConfigError(f"{where}: contains a NUL byte")
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        name, slots_of_line = _entry(fields, where)
        # DNS and ssh ignore case.
        earlier = first_line.setdefault(name.lower(), number)
        if earlier != number:
            hint = f"name it once, with all of its slots: `{name} slots=8`"
            raise ConfigError(f"{where}: duplicate host {quote(name)}, first named on line {earlier}", hint=hint)
        slots[name] = slots_of_line
    if not slots:
        raise ConfigError(f"{path}:1: no nodes listed", hint="write one line per node, such as `worker-0 slots=8`")
    return tuple(slots.items())


def format_hostfile(entries: Iterable[tuple[str, int]]) -> str:
    """Return the text of a hostfile; the inverse of ``parse``."""
    return "".join(f"{name} slots={slots}\n" if slots != OWN else f"{name}\n" for name, slots in entries)


def job_name(name: str) -> str:
    """Return the part after PREFIX of a hostfile's name, with odd characters as ``-``; empty for other names."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name.removeprefix(PREFIX)) if name.startswith(PREFIX) else ""


def select(
    entries: tuple[tuple[str, int], ...], include: str = "", exclude: str = ""
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return nodes and slots that --include or --exclude leaves. ConfigError for both, unknown ones or none left.

    In DeepSpeed's syntax (parse_inclusion_exclusion in deepspeed/launcher/runner.py): ``worker-0@worker-1:0,2`` is all
    of worker-0 and two slots of worker-1.
    """
    if include and exclude:
        raise ConfigError("use either --include or --exclude")
    option = "--include" if include else "--exclude"
    named = _filter(include or exclude, dict(entries), option)
    chosen = []
    for name, count in entries:
        slots = set(range(count))
        kept = named.get(name, set()) if include else slots - named.get(name, set())
        if kept:
            chosen.append((name, tuple(sorted(kept))))
    if not chosen:
        raise ConfigError(f"{option} {include or exclude} leaves no slots")
    return tuple(chosen)


def _filter(text: str, slots: dict[str, int], option: str) -> dict[str, set[int]]:
    """Map each node that a filter names to its slots there. ConfigError for an unknown node or slot."""
    named: dict[str, set[int]] = {}
    # Without slots, which are comma-separated, nodes may be too.
    for part in filter(None, re.split("@" if ":" in text else "[@,]", text)):
        name, colon, numbers = part.partition(":")
        if name not in slots:
            form = "; separate nodes with `@`, slots with `,`: worker-0@worker-1:0,2" if "," in part else ""
            hint = f"known: {', '.join(slots)}{form}"
            raise ConfigError(f"{option} {quote(text)}: no node {quote(name)}", hint=hint)
        listed = numbers.split(",") if colon else [str(number) for number in range(slots[name])]
        for word in listed:
            if not re.fullmatch("[0-9]{1,4}", word) or int(word) >= slots[name]:
                hint = f"{name} has slots 0 to {slots[name] - 1}"
                raise ConfigError(f"{option} {quote(text)}: {name} has no slot {quote(word)}", hint=hint)
            named.setdefault(name, set()).add(int(word))
    return named


def host_name(word: str, where: str) -> str:
    """Return the word if it is a valid host name by RFC 1123. ConfigError if not, or if it has a user."""
    if "@" in word:
        hint = f"write {quote(word.rpartition('@')[2])}"
        raise ConfigError(f"{where}: {quote(word)} names a user; user and port belong in the ssh config", hint=hint)
    if len(word) > 253 or not _NAME.fullmatch(word):
        raise ConfigError(
            f"{where}: bad host name {quote(word)}",
            hint="letters, digits and `-`, in parts of at most 63 joined by dots, not beginning or ending with `-`",
        )
    return word


def _entry(fields: list[str], where: str) -> tuple[str, int]:
    """Return node and slots of a line's words, ``OWN`` for a name alone. ConfigError, with a right line, if wrong."""
    word, *rest = fields
    if "," in word:
        hint = f"write a line for each, such as {quote(word.partition(',')[0])}"
        raise ConfigError(f"{where}: several nodes in {quote(word)}", hint=hint)
    name, colon, count = word.partition(":") if word.count(":") == 1 else (word, "", "")
    name = host_name(name, where)
    if not colon and not rest:
        return name, OWN
    try:
        return name, _slots(f":{count}" if colon else "", rest, where)
    except ConfigError as error:
        raise ConfigError(error.message, hint=_written_right(name, [count, *rest])) from None


def _slots(behind: str, words: list[str], where: str) -> int:
    """Return a line's slots, as ``:2`` behind the name or ``slots=2``. ConfigError unless 1 to 1024, given once."""
    if not words:
        return slot_count(behind[1:], where)
    key, equals, count = words[0].partition("=")
    if key != "slots" or not equals:
        raise ConfigError(f"{where}: expected `slots=N`, found {quote(words[0])}")
    if behind:
        raise ConfigError(f"{where}: slots are given twice: {quote(behind)} and {quote(words[0])}")
    if len(words) > 1:
        raise ConfigError(f"{where}: unknown word {quote(words[1])} after the slots")
    return slot_count(count, where)


def _written_right(name: str, words: Iterable[str]) -> str:
    """Return a hint on how to write a line, with the first valid number of slots in its words if any."""
    counts = (match[1] for match in map(_COUNT.fullmatch, words) if match)
    slots = next((count for count in counts if 0 < int(count) <= MAX_SLOTS), "")
    if slots:
        return f"write `{name} slots={int(slots)}`"
    return f"write `{name} slots=8`, or `{name}` alone for all slots that it has"


def slot_count(count: str, where: str) -> int:
    """Parse a number of slots from 1 to MAX_SLOTS. ConfigError if it is anything else."""
    if not (count.isascii() and count.isdecimal()):
        raise ConfigError(f"{where}: slots must be a number, not {quote(count)}")
    # Counted before it is converted: int() of thousands of digits is slow, or an error of its own.
    digits = count.lstrip("0")
    if not digits or len(digits) > 4 or int(digits) > MAX_SLOTS:
        raise ConfigError(f"{where}: slots must be between 1 and {MAX_SLOTS}, not {quote(count)}")
    return int(digits)


def quote(word: str) -> str:
    """Render a word in backticks for a message, control characters escaped, cut at 80 characters."""
    shown = word.encode("unicode_escape").decode("ascii")
    return f"`{shown[:80]}...`" if len(shown) > 80 else f"`{shown}`"
