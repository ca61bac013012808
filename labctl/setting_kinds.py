"""Kinds of values that a setting may have; each refuses a wrong one with a reason and, where there is one, a hint."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

from labctl.errors import nearest
from labctl.model import Accelerator

ACCELERATORS = ("auto", *get_args(Accelerator))

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Kind = Callable[[str], None]
"""Refuses a value with ``ValueError(reason)`` or ``ValueError(reason, hint)``, without showing it."""


def in_bytes(text: str) -> int:
    """``64k`` as 65536. ValueError for what is no size."""
    match = re.fullmatch(r"([0-9]+)([kmgt]?)i?b?", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    return int(match[1]) * _UNITS[match[2]]


def shaped(pattern: str, reason: str, hint: str = "") -> Kind:
    """What matches a pattern."""

    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(reason, hint)

    return check


def whole(low: int, high: int) -> Kind:
    """A whole number, written as one."""

    def check(value: str) -> None:
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", value) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")

    return check


def span(word: str) -> tuple[int, int] | None:
    """The first and last index of ``0-3``; None for what is no such range."""
    match = re.fullmatch(r"(\d{1,4})-(\d{1,4})", word)
    return (int(match[1]), int(match[2])) if match else None


def devices(value: str) -> None:
    if not re.fullmatch(r"[\w:./-]+(\s*,\s*[\w:./-]+)*", value):
        raise ValueError("must be devices with commas between", "write it like 0,1 or 0-3; labctl devices")
    for word in map(str.strip, value.split(",")):
        if (ends := span(word)) and ends[0] > ends[1]:
            raise ValueError(f"has the range {word}, which is empty", f"write it as {ends[1]}-{ends[0]}")


def size(value: str) -> None:
    # Six MiB is the least memory that the engine accepts.
    if (
        not re.fullmatch(r"[1-9][0-9]{0,17}([kmgt](i?b)?|b)?", value.lower())
        or not 6 * 2**20 <= in_bytes(value) < 2**60
    ):
        raise ValueError("must be a size of at least 6m", "write it like 512m or 8g")


def accelerator(value: str) -> None:
    if value not in ACCELERATORS:
        near = nearest(value.lower(), ACCELERATORS)
        reason = f"unknown accelerator {value[:40]!r}; known are {', '.join(ACCELERATORS)}"
        raise ValueError(reason, f"did you mean {near}?" if near else "auto takes what it finds")


def one_of(*words: str) -> Kind:
    """One of these words."""

    def check(value: str) -> None:
        if value not in words:
            near = nearest(value.lower(), words)
            raise ValueError(f"must be one of {', '.join(words)}", f"did you mean {near}?" if near else "")

    return check


image_from = one_of("send", "pull", "build")
port = whole(1024, 65535)
label = shaped(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", "must be at most 40 of a-z, 0-9 and inner '-', such as lab-2")
image = shaped(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "must be the name of an image", "write it like debian:bookworm-slim")
memlock = shaped(r"unlimited|0|[1-9][0-9]{0,17}", "must be 'unlimited' or a number of bytes")
host_path = shaped(r"/.*", "must be an absolute path", "begin it with / or ~/")
# So narrow because launchers put it into remote shell commands without quotes.
container_path = shaped(r"(/(?!\.\.?(/|\Z))[A-Za-z0-9._+-]+)+", "must be /an/absolute/path of letters, digits, . _ + -")
url = shaped(r"(https?|file)://\S+", "must be a URL", "begin it with https://, http:// or file://")
sources = shaped(r"((https?|file):/)?/\S+(\s+((https?|file):/)?/\S+)*", "must be URLs or /paths, blanks between them")
proxy = shaped(r"\S+", "must be one URL without blanks", "write it like http://proxy.example:3128")
token = shaped(r"[!-~]+", "holds blanks or characters that no token has")
anything = shaped(r".*", "must be one line")
