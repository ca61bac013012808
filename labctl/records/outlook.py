"""Outlook of a failed run: whose failure it was, and whether it helps to try again, each decided from one fact.

What neither cause nor words tell is unknown: a wrong answer costs more than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from labctl import accelerators
from labctl.model import Cause
from labctl.records import last_words

Domain = Literal["workload", "infrastructure", "unknown"]
"""The workload: its code, arguments, data, and what it needs of its own share of a node. The infrastructure: hosts,
devices, network, and disks, which others share."""
Retry = Literal["helps", "does not", "unknown"]
"""Effect of another attempt: it may get further, it does not, or that is unknown."""

LONGEST = 240
"""Characters of evidence at most."""


class Outlook(Struct, frozen=True):
    """Whose failure it was, whether trying again helps, and the line or fact that tells so; None if it passed."""

    domain: Domain | None
    retry: Retry | None
    evidence: str


PASSED = Outlook(None, None, "")


BY_CAUSE: dict[Cause, tuple[Domain, Retry]] = {
    "node-lost": ("infrastructure", "helps"),
    "device-lost": ("infrastructure", "helps"),
    "lab-lost": ("infrastructure", "helps"),
    # Who filled the disk is not known, but nothing makes room on it.
    "disk-full": ("infrastructure", "does not"),
    # A name that does not exist, or a registry that does not answer.
    "no-image": ("infrastructure", "unknown"),
    "does-not-fit": ("workload", "does not"),
    "no-metric": ("workload", "does not"),
    # It hung, or needs more time; the same limit would end it again.
    "timeout": ("unknown", "does not"),
    "no-progress": ("unknown", "does not"),
    "criteria": ("unknown", "unknown"),
    "interrupted": ("unknown", "unknown"),
}
"""Causes that decide by themselves; of the others the words do."""

WORDS: tuple[tuple[Domain, Retry, tuple[str, ...]], ...] = (
    (
        "infrastructure",
        "helps",
        (
            "container is paused",
            r"Stale file handle|\[Errno 116\]",
            # A server that is busy, or a connection to it that broke.
            r"\b(?:429|5\d\d) (?:Client|Server) Error|Read timed out|IncompleteRead|'Connection aborted\.'",
        ),
    ),
    ("infrastructure", "does not", (r"Permission denied \(publickey|Host key verification failed",)),
    (
        "infrastructure",
        "unknown",
        (
            r"Input/output error|\[Errno 5\]|Transport endpoint is not connected",
            "No route to host|Network is unreachable|Host is down|Connection timed out",
            r"NET/IB ?: ?Got completion|ibv_\w+ failed|transport retry counter exceeded",
            r"device\(s\) is/are busy or unavailable|could not kill: ",
            # A download, where a lab may have no way out at all.
            r"HTTPS?ConnectionPool\(|Max retries exceeded|urlopen error|URL fetch failure|couldn't connect to 'https?://",
            "name resolution|Name or service not known",
        ),
    ),
    # A server that is busy, or away for a moment, in the words of an exception that else means the code.
    ("unknown", "unknown", (r"(?i:connection error|\btimed? ?out\b|slow ?down|try again)",)),
    # A rank that tells of its peers alone: why they are gone is not known.
    ("unknown", "unknown", (f"(?i:{last_words.PEER_LOST})",)),
    (
        "workload",
        "does not",
        (
            # Numbers.
            r"(?i:\bnans?\b|\bnon-?finite\b|\bloss\b.{0,12}\binf\b)",
            "(?i:loss scale already at minimum|minimum loss scale reached)",
            # Its own share of a node.
            r"shared memory|</torch_\d+|Too many open files|\[Errno 24\]",
            # Arguments and settings.
            r"unrecognized arguments|arguments are required|invalid choice: |argument \S+: |[Nn]o such option",
            r"not used by the HfArgumentParser|\bncclInvalid(?:Usage|Argument)\b",
            r"\b(?:Misconfiguration|MissingConfig)Exception\b",
            # Files and programs.
            r"No such file or directory|can't open file|(?:executable file|command|: )\s?not found|Permission denied",
            "unable to find the specified executable|Read-only file system|cannot open shared object file",
            "undefined symbol|Exec format error|is not a valid model identifier",
            r"\b40[134] Client Error|GatedRepoError|RepositoryNotFoundError",
            # Shapes, kinds and devices of tensors; gradients.
            "size mismatch|shapes cannot be multiplied|must match|is invalid for input of size|should be the same",
            "same device|expects each tensor to be equal size|in loading state_dict|Given groups=",
            "does not require grad|backward through the graph a second time|modified by an inplace operation",
            "finished reduction in the prior iteration|marked as ready (?:twice|only once)",
            "Detected mismatch between collectives",
            "device-side assert triggered|invalid device ordinal|no kernel image is available|Assertion [`'].*failed",
            # Exceptions of Python that the same code raises for the same input.
            r"\b(?:ModuleNotFound|Import|Syntax|Indentation|Name|UnboundLocal|Attribute|NotImplemented)Error\b"
            r"|\bNo module named ",
            r"\b(?:Type|Key|Index|Value|Assertion|ZeroDivision|FloatingPoint|Overflow|Recursion)Error\b",
            r"\bEOFError: EOF when reading a line"
            r"|\b(?:FileNotFound|NotADirectory|IsADirectory|Permission|UnicodeDecode|UnicodeEncode)Error\b",
            r"\b(?:Validation|ConfigAttribute|ConfigKey|Scanner|InvalidArgument|Usage)Error\b",
        ),
    ),
)
"""Domain, outlook, and the patterns of a failure's words that tell them; the first that matches decides."""

# A run at its time limit whose ranks waited for each other: more time would not have helped, another attempt may.
HUNG = re.compile(r"timed out after [^;]*; (?!no rank wrote|could not kill)(?P<hang>.*)", re.DOTALL)
# Memory that others may give back: of another process on the device, or of a host without a limit.
MEMORY_OF_OTHERS = re.compile(r"Process \d+ has .* memory in use|LAB_MEMORY is not set")
# A file system, too, but one that its processes alone fill.
SHARED_MEMORY = re.compile(r"</torch_\d+|/dev/shm\b")
# How the first failure of a message ended, and its words: an error, or just the last that it wrote.
ENDED = re.compile(
    r".+? exited with code (?P<code>\d+)(?: \(SIG\w+\))?(?:: (?P<error>.*)|; the last it wrote: (?P<last>.*))?",
    re.DOTALL,
)


def of(cause: Cause | None, message: str) -> Outlook:
    """Return the outlook of a run by its cause and message; PASSED without a cause."""
    if cause is None:
        return PASSED
    first = last_words.OTHERS.sub("", message)
    if cause == "disk-full" and (shared := SHARED_MEMORY.search(first)):
        return Outlook("workload", "does not", _around(first, shared))
    if cause == "timeout" and (hung := HUNG.match(first)):
        return Outlook("unknown", "unknown", _excerpt(hung["hang"]))
    if decided := BY_CAUSE.get(cause):
        return Outlook(*decided, evidence=_excerpt(first))
    if cause == "out-of-memory":
        others = MEMORY_OF_OTHERS.search(first)
        return Outlook("unknown", "unknown", _around(first, others)) if others else _own_memory(first)
    return _by_words(first)


def _own_memory(first: str) -> Outlook:
    """Return the outlook of a program that needs more memory than it has."""
    return Outlook("workload", "does not", _excerpt(_words(first) or first))


def _by_words(first: str) -> Outlook:
    """Return the outlook that a failure's words tell."""
    words = _words(first)
    for pattern, domain, retry in _table():
        if match := pattern.search(words):
            return Outlook(domain, retry, _around(words, match))
    if last_words.giving_up([words]):
        return Outlook("workload", "does not", _excerpt(words))
    return Outlook("unknown", "unknown", _excerpt(first))


def _words(first: str) -> str:
    """Return the words of a failure; empty if it has none, or if a signal ended a rank that printed no error."""
    ended = ENDED.fullmatch(first)
    if not ended:
        return first
    by_signal = int(ended["code"]) > 128
    return ended["error"] or ("" if by_signal else ended["last"]) or ""


@lru_cache
def _table() -> tuple[tuple[re.Pattern[str], Domain, Retry], ...]:
    """Return the patterns of accelerators' words, then those of WORDS, each with what it tells."""
    return tuple((re.compile(pattern), domain, retry) for pattern, domain, retry in (*_of_devices(), *_of_words()))


def _of_devices() -> Iterator[tuple[str, Domain, Retry]]:
    """Yield the patterns of a device that broke, and of a program that found none."""
    for module in accelerators.modules().values():
        if module.faulted:
            yield module.faulted, "infrastructure", "helps"
        if module.missed:
            yield module.missed, "workload", "does not"


def _of_words() -> Iterator[tuple[str, Domain, Retry]]:
    for domain, retry, patterns in WORDS:
        yield "|".join(patterns), domain, retry


def _around(text: str, match: re.Match[str]) -> str:
    """Return the part of a text that has a match, from its beginning if that is near."""
    return _excerpt(text if match.end() <= LONGEST else text[match.start() :])


def _excerpt(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
