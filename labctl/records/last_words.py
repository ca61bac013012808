"""Last output of a rank: the exception or line that the message of its failure quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Reversible, Sequence
from functools import lru_cache
from itertools import chain, islice

from labctl import accelerators
from labctl.model import Result

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
# The program `timeout` starts the ranks: its name would read like a time limit.
WRAPPER = re.compile(r"^timeout: (?=failed to run command )")
RULE = re.compile(r"^\W*$")
# A frame of a traceback, whose beginning may no longer be kept, and its first line.
TRACEBACK = re.compile(r"^(  File \".+\", line \d+|Traceback \(most recent call last\):$)")
# Python prints a group of exceptions as a tree; frames and source lines are indented more than messages.
GROUP, MEMBER = re.compile(r"^\s*\+ Exception Group Traceback "), re.compile(r"^\s*\| (\S.*)")
# Follows the first failure in a message.
OTHERS = re.compile(r"; rank \d+ on \S+ exited with code .*")
FRAME = re.compile(r'  File "(.+)", line (\d+)')
# Code that is not the person's own: Python's, the image's packages, labctl's startup hook, and what has no file.
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|^/usr/|^/opt/|^<|/common/sitecustomize\.py$")
# Follows the quoted text of an exception.
PLACE = re.compile(r" \([^()\s]+:\d+\)\.?$")
FATAL = re.compile(r"^Fatal Python error: ")
# Python's words after abort(), and the reason, which the C++ library printed before.
ABORTED, REASON = "Fatal Python error: Aborted", re.compile(r"^\s*what\(\): |^terminate called without")
# Last of Open MPI's blocks about a failed start, which lists what may be why.
VAGUE = re.compile(r"It looks like \S+ failed for some reason")
# Stack of C++ below an error of torch.
C_FRAME = re.compile(r"^(frame #\d+: |Exception raised from )")
# Errors of gloo, torch's store, NCCL, MPI and Horovod in a rank that lost its peers or waited for one in vain, and the
# words of a rank that got TERM. NCCL's watchdog ends for an error of the rank's own device, too.
PEER_LOST = (
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process exit|ncclRemoteError"
    r"|HorovodInternalError|Horovod has been shut down|NCCL communicator was aborted"
    r"|watchdog thread terminated with exception(?!.* error: )|Watchdog caught collective operation timeout"
    r"|Some NCCL operations have failed or timed out|Timed out waiting \d+ms for (?:recv|send) operation"
    r"|connection to the C10d store has failed|Rendezvous(?:Closed|Connection)Error"
    r"|MPI communication peer process has unexpectedly disconnected"
    r"|MPI_ABORT was invoked|SignalException: Process \d+ got signal: 15|closing signal SIGTERM|15 death signal"
)
# What launchers print of a program that they started, which has printed its own reason before.
CHILD_FAILED = (
    r"ChildFailedError|Root Cause \(first observed failure\)|failed \(exitcode: -?\d+\) local_rank"
    r"|CalledProcessError: .*non-zero exit status"
)
# What torchrun says of the first of its ranks that failed.
CHILD_SIGNAL = re.compile(r"^\s*traceback : Signal \d+ \(SIG(?!TERM)\w+\) received")
FOLLOWS = re.compile(PEER_LOST, re.IGNORECASE)
NO_REASON = re.compile(f"{PEER_LOST}|{CHILD_FAILED}", re.IGNORECASE)
# Beginning of a log line, which is not part of an exception's message.
RECORD = re.compile(r"^(\[?[WEI]\d{4}|\[W|\[[EI] |(WARNING|INFO|ERROR)\b|\d{4}-\d\d-\d\d|/\S+\.py:\d+: \w*Warning)")
ERROR = re.compile(
    r"error|exception|fail|not found|no such|denied|can(no|')t|could not|abort|(?<!de)fault|assert|terminat|what\(\)"
    r"|killed|invalid|refused|unable|fatal|panic|interrupt|exit(?!s successfully)|required|missing",
    re.IGNORECASE,
)
# A program that lacks something and ends by itself, with exit code 0: both a reason and an end, or that there is no
# ``{device}``. One that goes on says so in the same line; one that has done its work may say that it exits, too.
GIVES_UP = (
    r"(?=.*\b(?:unable to|can(?:no|')t|could(?: not|n't)|failed to|not enough|insufficient|not found|no such|missing"
    r"|requires?|needs?|no {device})\b).*\b(?:exit|abort|quit|bail|giv|skipp)(?:s|es|ed|ting|ing)?\b"
    r"|\b{device}\b.{{0,20}}\b(?:unavailable|not (?:available|found|detected|supported))\b"
    r"|\bno {device}(?: devices?)?(?: (?:is|are|was|were))? (?:available|found|detected|visible)\b"
    r"|\b(?:requires?|needs?)\b(?: at least)?(?: \w+)? {device}\b"
)
GOES_ON = re.compile(
    r"\busing\b|\bwill use\b|fall(?:s|ing)? ?back|\binstead\b|\b(?:on|to) (?:the )?cpu\b|continu|ignor|disabl|warning"
    r"|early.stopping|improve|converge|\b(?:done|complete|finish|success)",
    re.IGNORECASE,
)
LOOKED_BACK = 3
"""Last lines to search for one that says that a program gives up: log records of libraries may follow it."""


def kept(speakers: int) -> int:
    """Return how many lines to keep per rank or node, between FEWEST and MOST, so that all take 30 MB at most."""
    return max(FEWEST, min(MOST, ALL // speakers))


def quoted(written: Iterable[str], who: str = "") -> str:
    """Return a rank's fatal line or exception, else its last line, as one line; empty if it wrote nothing."""
    return WRAPPER.sub("", _words(_reason_lines(who, written)))


def follows(words: str) -> bool:
    """Tell if quoted text is a consequence of another rank's end, such as a lost peer."""
    return bool(FOLLOWS.search(words))


def _reason_lines(who: str, written: Iterable[str]) -> list[str]:
    """Return lines that tell why a rank ended: its own, or if these give no reason, those of another rank.

    A program that starts its ranks itself has their lines, too: one that tells a reason of its own comes first, then
    one that a signal ended, then one that lost its peers, as the program itself just tells that one of them failed.
    """
    groups = list(map(_without_c_frames, _lines_of(who, written)))
    first = next(iter(groups), [])
    if not NO_REASON.search(_words(first)):
        return first
    signals = [[line] for line in chain.from_iterable(groups) if CHILD_SIGNAL.match(line)]
    lost = (lines for lines in groups if follows(_words(lines)))
    return next(filter(None, (*map(_own_reason, groups), *signals[-1:], *lost)), first)


def _without_c_frames(lines: Iterable[str]) -> list[str]:
    """Return the lines without frames of C stacks."""
    return [line for line in lines if not C_FRAME.match(line)]


def _own_reason(lines: list[str]) -> list[str]:
    """Return lines up to the last exception that is a cause rather than a consequence; empty if none is."""
    if _exception(lines) and not NO_REASON.search(_words(lines)):
        return lines
    for at in reversed(range(len(lines))):
        if NO_REASON.search(lines[at]):
            earlier = lines[: _began(lines, at)]
            words = _exception(earlier)
            if words and not NO_REASON.search(words):
                return earlier
    return []


def _began(lines: list[str], at: int) -> int:
    """Return the index where the traceback begins whose message is at ``at``; ``at`` itself if it has none."""
    begin = at
    while begin > 0 and (lines[begin - 1][:1].isspace() or TRACEBACK.match(lines[begin - 1])):
        begin -= 1
    return begin


def _words(lines: list[str]) -> str:
    """Return the fatal line, exception or block of these lines, else the last that is no rule; empty if none."""
    candidates = (
        _fatal(lines),
        _group(lines),
        _exception(lines),
        _block(lines),
        *(line for line in reversed(lines) if not RULE.match(line)),
    )
    return next(filter(None, candidates), "").strip()[:LONGEST]


def _fatal(lines: list[str]) -> str:
    """Return Python's last fatal line, or the reason before it if it is an abort; empty if there is none."""
    at = next((at for at in reversed(range(len(lines))) if FATAL.match(lines[at])), None)
    if at is None or lines[at] != ABORTED:
        return "" if at is None else lines[at]
    return next(filter(REASON.match, reversed(lines[:at])), ABORTED)


def is_error(text: str) -> bool:
    """Tell if quoted text is about an error, rather than just the last output of a rank."""
    return bool(ERROR.search(text))


def giving_up(written: Reversible[str]) -> str:
    """Return the last line, log records skipped, if it says that the program gives up; empty otherwise."""
    for line in islice(reversed(written), LOOKED_BACK):
        if _gives_up().search(line) and not GOES_ON.search(line):
            return line.strip()
        if not RECORD.match(line):
            break
    return ""


@lru_cache
def _gives_up() -> re.Pattern[str]:
    """Return the compiled pattern GIVES_UP with the accelerators' names."""
    names = ("gpu", "accelerator", *chain.from_iterable(module.aliases for module in accelerators.modules().values()))
    device = f"(?:{'|'.join(map(re.escape, names))})s?"
    return re.compile(GIVES_UP.format(device=device), re.IGNORECASE)


BEFORE, AFTER, STACKS = 12, 4, 60
"""Lines to show before and after the cause of a failure; and after it if the run stalled, as stacks follow."""


def cause_of(result: Result, lines: Sequence[str]) -> list[str]:
    """Return output lines around what a run's ranks waited for, or around the failure in its message."""
    if result.hang and result.cause in ("stalled", "timeout", "interrupted"):
        return cause_lines(result.hang.sentence, lines, stalled=True)
    return cause_lines(result.message, lines)


def cause_lines(message: str, lines: Sequence[str], *, stalled: bool = False) -> list[str]:
    """Return lines around the message's first failure; without it the last BEFORE lines about errors.

    If the text has several lines, its first one is searched for.
    """
    parts = PLACE.sub("", OTHERS.sub("", message)).split(": ")
    ends = [end for begin in range(len(parts)) if len(end := ": ".join(parts[begin:]).rstrip(".")) > 3]
    at = _position(ends, lines)
    if at is None:
        return [line for line in lines if is_error(line)][-BEFORE:]
    return list(lines[max(0, at - BEFORE) : at + (STACKS if stalled else AFTER)])


def _position(texts: Sequence[str], lines: Sequence[str]) -> int | None:
    """Return the index of the first line with one of the texts, else ending with its first words; None if none."""
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
    """Tell if a line ends with the first two or more words of a text."""
    end = line[max(0, line.find(text.partition(" ")[0])) :].strip()
    return " " in end and text.startswith(end)


def _lines_of(who: str, written: Iterable[str]) -> list[list[str]]:
    """Return lists of lines by torch's rank marks, without marks and shell lines: the rank's own first.

    The rank's own come first, then those without a mark; if ``who`` is not a rank, those of the rank that wrote last.
    """
    marked: dict[str, list[str]] = {}
    last = ""
    for line in written:
        rank, text = MARK.fullmatch(line).groups("")  # type: ignore[union-attr] # it matches any line
        kept = marked.setdefault(rank, [])
        if text.rstrip() and not SHELL.match(text):
            kept.append(text.rstrip())
        last = rank or last
    number = who.removeprefix("rank ")
    tries = (number, "", last) if number.isdigit() else (last, "")
    return [marked[mark] for mark in dict.fromkeys((*tries, *marked)) if mark in marked]


def place(written: Iterable[str], who: str = "") -> str:
    """Return ``FILE:LINE`` of the quoted exception's innermost frame outside libraries; empty if there is none."""
    lines = _reason_lines(who, written)
    if any(map(FATAL.match, lines)) or _group(lines) or not _exception(lines):
        return ""
    for line in reversed(lines[: _message_at(lines)]):
        if line.startswith("Traceback "):
            break
        if (frame := FRAME.match(line)) and not LIBRARY.search(frame[1]):
            # A run's copy of the code is in work/ of its directory.
            return f"{re.sub(r'^.*/outputs/[^/]+/work/', '', frame[1])}:{frame[2]}"
    return ""


def _message_at(lines: list[str]) -> int | None:
    """Return the index of the last exception's message, below its traceback; None without a traceback."""
    message = next((at + 1 for at in reversed(range(len(lines))) if TRACEBACK.match(lines[at])), None)
    while message is not None and message < len(lines) and lines[message][:1].isspace():
        message += 1
    return message


def _exception(lines: list[str]) -> str:
    """Return the last exception's message, its lines joined; empty without a traceback, or if it is too long."""
    message = _message_at(lines)
    if message is None:
        return ""
    text_lines: list[str] = []
    for line in lines[message:]:
        if RECORD.match(line):
            break
        text_lines.append(line.strip())
    is_message = len(text_lines) <= MOST_LINES or lines[message + len(text_lines) - 1][:1].isspace()
    return " ".join(text_lines[:MOST_LINES]) if is_message else ""


def _group(lines: list[str]) -> str:
    """Return the messages of an exception group that ends the lines, joined by ``; ``; empty if none does."""
    begins = next((at for at, line in enumerate(lines) if GROUP.match(line)), len(lines))
    if not lines or "-----" not in lines[-1]:
        return ""
    members = (match[1] for match in map(MEMBER.match, lines[begins:]) if match)
    return "; ".join(text for text in members if not text.startswith("Traceback "))


def _block(lines: list[str]) -> str:
    """Return up to three lines of a block between two rules at the end, as Open MPI prints; empty if none.

    A block that names no reason gives way to the one before.
    """
    rules = [at for at, line in enumerate(lines) if len(line) > 20 and not line.strip("-=*")]
    if len(rules) < 2 or rules[-1] != len(lines) - 1:
        return ""
    ends = zip(rules[-2::-2], rules[::-2], strict=False)
    blocks = [lines[begin + 1 : end] for begin, end in ends]
    block = next((block for block in blocks if not VAGUE.match(" ".join(block))), blocks[0])
    return " ".join(line.strip() for line in block[:3])
