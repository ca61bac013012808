"""Numbers, durations, sizes and lists of names as text for people; JSON and files for programs have plain values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

HUGE = 1e15
SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Format with ``digits`` significant digits, larger numbers as integers; ``no value`` for None, nan, infinity.

    Integers from HUGE on have an exponent. ``sign``: ``+`` also marks positive numbers.
    """
    if value is None or not math.isfinite(value):
        return "no value"
    form = ",.0f" if 10 ** (digits - 1) <= abs(value) < HUGE else f".{digits}g"
    return f"{value:{sign}{form}}"


def figure(metric: Mapping[str, Any], key: str = "value", digits: int = 4) -> str:
    """Format a metric's value under ``key``; its note, such as ``nan``, or ``-`` if it is missing."""
    value = metric.get(key)
    if isinstance(value, int | float):
        return number(value, digits)
    return str(metric.get("note", "-") if value is None else value)


def span(values: Collection[float]) -> str:
    """Format the lowest and the highest of numbers, as ``98.1 to 141``; a single one alone."""
    low, high = number(min(values)), number(max(values))
    return f"{low} to {high}" if len(values) > 1 else low


def exact(value: float, digits: int = 6) -> str:
    """Format a number that is compared with a limit; without exponent from 1e-6 to 1e15."""
    size = abs(value)
    if 10**digits - 0.5 <= size < 1e15:
        return f"{value:.0f}"
    return f"{value:.11f}".rstrip("0") if 1e-6 <= size < 1e-4 else f"{value:.{digits}g}"


def compared(value: float, limit: float) -> tuple[str, str]:
    """Format a number and its limit with four significant digits, or as many more as tell them apart."""
    pairs = [(exact(value, digits), exact(limit, digits)) for digits in range(4, 18)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def share(value: float, sign: str = "") -> str:
    """Format a share in per cent, with one decimal, or two below 1 %: 0.0251 as ``2.5 %``."""
    # Adding 0 removes the sign of -0.0.
    return f"{number(round(100 * value, 1 if abs(value) >= 0.01 else 2) + 0, 3, sign)} %"


def duration(seconds: float) -> str:
    """Format seconds, below 120 as ``4.2 s``, else in the two largest units, as ``7 min 5 s`` or ``2 h``."""
    whole = round(seconds)
    if whole < 120:
        return f"{number(round(seconds, 4), 2)} s"
    units = pairwise(SECONDS.items())
    (unit, length), (smaller, part) = next(pair for pair in units if whole >= pair[0][1])
    rest = whole % length // part
    return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")


def ago(seconds: float) -> str:
    """Format seconds since an event in the largest unit, as ``42s ago``, ``5h ago`` or ``12d ago``."""
    return f"{age(seconds)} ago"


def age(seconds: float) -> str:
    """Format seconds in the largest unit, as ``42s``, ``3m``, ``5h`` or ``12d``."""
    whole = max(0, int(seconds))
    unit, length = next(((unit, length) for unit, length in SECONDS.items() if whole >= length), ("s", 1))
    return f"{whole // length}{unit[0]}"


def size(amount: float) -> str:
    """Format bytes of files and images, in decimal units as Docker and the hub do."""
    return _scaled(amount, 1000, ("B", "kB", "MB", "GB", "TB"), 3)


def memory(amount: float) -> str:
    """Format bytes of memory or disk, in binary units as settings do (``LAB_MEMORY=8g``)."""
    return _scaled(amount, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), 4)


def _scaled(amount: float, base: int, units: tuple[str, ...], digits: int) -> str:
    """Format an amount in the largest unit of which it has at least one."""
    for unit in units[:-1]:
        if abs(amount) < base:
            return f"{number(amount, digits)} {unit}"
        amount /= base
    return f"{number(amount, digits)} {units[-1]}"


def count(amount: int, noun: str) -> str:
    """Return ``1 node`` or ``1,200 nodes``."""
    return f"{amount:,} {noun}{'s' * (amount != 1)}"


def shortened(text: str, width: int) -> str:
    """Cut a text to ``width`` characters, three of them dots if there is room; shorter texts stay."""
    if len(text) <= width:
        return text
    return f"{text[: width - 3]}..." if width > 3 else text[:width]


def listed(names: Iterable[str], most: int = 8) -> str:
    """Join names with commas; beyond ``most``, give the number of further names."""
    every = tuple(names)
    return ", ".join(every[:most]) + (f" {more(len(every) - most)}" if len(every) > most else "")


def more(amount: int, noun: str = "") -> str:
    """Return ``and 3 more NOUN``."""
    return f"and {amount:,} more {noun}".rstrip()
