"""Metrics of a run: output lines -> samples -> one reduced value per metric."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from labctl.model import Metric, Pairs, Reduce
from labctl.records import places

LONGEST_LINE = 1 << 14
"""Characters of a line that are searched for metrics and ranks: more would take seconds."""


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of a metric, at the last step that its line or rank named; a line of ``metrics.jsonl``."""

    metric: str
    step: int | None
    seconds: float | None
    """Seconds since the run's first line; None if the record does not have them."""
    value: float | None
    """None for nan and infinity, which JSON does not have: ``note`` is their name."""
    note: str = ""
    rank: int | None = None
    """Rank that printed it; None if unknown, as in records of earlier versions."""

    @property
    def number(self) -> float:
        """Return the value, nan and infinity as such."""
        return float(self.note or "nan") if self.value is None else self.value


class Sampler:
    """Parser of metrics in output lines; it keeps values and steps, not lines."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Compile the patterns of the metrics; start without values and steps."""
        self._patterns = {metric.name: re.compile(metric.pattern) for metric in metrics}
        self._steps: dict[int | None, int] = {}
        self.step: places.Count | None = None
        """The step that the last line names, and of how many."""
        self.values: dict[str, array[float]] = {name: array("d") for name in self._patterns}
        """All numbers of each metric, in order."""

    def read(self, line: str, rank: int | None = None, seconds: float | None = None) -> list[Sample]:
        """Return a line's samples, the first of each metric, and keep their values and the line's step.

        Patterns match anywhere in a line, also after a ``worker-1: `` prefix; text that float() rejects is skipped.
        """
        self.step = places.step(line.lower())
        if self.step:
            self._steps[rank] = self.step[0]
        samples = []
        for name, pattern in self._patterns.items():
            if match := pattern.search(line):
                with suppress(ValueError):
                    number = float(match[1] or "")
                    self.values[name].append(number)
                    samples.append(self.sample(name, number, rank, seconds))
        return samples

    def sample(self, name: str, number: float, rank: int | None, seconds: float | None) -> Sample:
        """Return a metric's sample at the last step that its rank named; value None with a note for nan."""
        value, note = finite(number)
        at = None if seconds is None else round(seconds, 3)
        return Sample(metric=name, step=self._steps.get(rank), seconds=at, value=value, note=note, rank=rank)


def searched(text: str) -> str:
    """Return the part of a long line to search: its beginning, or its end if it is a redrawn progress bar."""
    if len(text) <= LONGEST_LINE:
        return text
    return text[-LONGEST_LINE:] if "\r" in text else text[:LONGEST_LINE]


def line_of(metric: Metric, value: object, lines: Iterable[str]) -> list[str]:
    """Return the last line, in a list, with this value of a metric, else its last line at all; [] if it has none."""
    pattern = re.compile(metric.pattern)
    last: list[str] = []
    with_value: list[str] = []
    for line in lines:
        if match := pattern.search(searched(line)):
            with suppress(ValueError):
                number = float(match[1] or "")
                last = [line]
                with_value = last if number == value else with_value
    return with_value or last


def finite(number: float) -> tuple[float | None, str]:
    """Return (number, ""), or (None, name) for nan and infinity, which JSON does not have."""
    return (number, "") if math.isfinite(number) else (None, str(number))


def read_notes(notes: Pairs, lines: list[str]) -> dict[str, str]:
    """Map each note's name to the first text that its pattern matches; leave out notes without one."""
    texts = {}
    for name, pattern in notes:
        match = next(filter(None, (re.search(pattern, line) for line in lines)), None)
        if match and match[1]:
            texts[name] = match[1]
    return texts


def reduce_values(metrics: Iterable[Metric], values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Map metrics to ``{value, unit}`` or ``{first, last}`` of values after ``skip``; omit metrics without any.

    nan and infinity, which JSON does not have, are None with a ``note``.
    """
    return {metric.name: _reduce(metric, kept) for metric in metrics if (kept := values[metric.name][metric.skip :])}


def _reduce(metric: Metric, values: Sequence[float]) -> dict[str, Any]:
    """Return a metric's reduced value, or first and last, with unit, and a note if one is nan or infinity."""
    if metric.reduce == "first-last":
        numbers = {"first": values[0], "last": values[-1]}
        unit = {"unit": metric.unit} if metric.unit else {}
    else:
        numbers = {"value": _reduced(metric.reduce, values)}
        unit = {"unit": metric.unit}
    odd = [note for _, note in map(finite, numbers.values()) if note]
    shown = {key: finite(number)[0] for key, number in numbers.items()}
    return {**shown, **unit, **({"note": odd[0]} if odd else {})}


def _reduced(reduce: Reduce, values: Sequence[float]) -> float:
    """Reduce values to one number, which is nan if any value is, except for ``first`` and ``last``."""
    if reduce in ("first", "last"):
        return values[0 if reduce == "first" else -1]
    # With nan, min, max and sorting depend on the order.
    if any(map(math.isnan, values)):
        return math.nan
    if reduce == "mean":
        return sum(values) / len(values)
    if reduce == "median":
        from statistics import median

        return median(values)
    return min(values) if reduce == "min" else max(values)
