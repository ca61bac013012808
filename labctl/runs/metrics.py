"""Metrics of a run: output lines -> numbers -> one reduced value per metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from labctl.model import Metric, Pairs, Reduce


def read_values(metrics: Iterable[Metric], lines: Iterable[str]) -> dict[str, list[float]]:
    """The numbers that each metric's pattern matches, the first on each line, in order.

    Patterns match anywhere in a line, also after a ``worker-1: `` prefix; text that float() rejects is skipped.
    """
    patterns = {metric.name: re.compile(metric.pattern) for metric in metrics}
    values: dict[str, list[float]] = {name: [] for name in patterns}
    for line in lines:
        for name, pattern in patterns.items():
            if match := pattern.search(line):
                with suppress(ValueError):
                    values[name].append(float(match[1] or ""))
    return values


def read_notes(notes: Pairs, lines: list[str]) -> dict[str, str]:
    """The text that each pattern matches first; those that match nothing are left out."""
    found = {name: next(filter(None, (re.search(pattern, line) for line in lines)), None) for name, pattern in notes}
    return {name: match[1] for name, match in found.items() if match and match[1]}


def reduce_values(metrics: Iterable[Metric], values: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Metrics as in JSON, ``{"value", "unit"}`` or ``{"first", "last"}``; those without values are left out.

    nan and infinity, which JSON lacks, are None with a ``note``.
    """
    return {metric.name: _reduce(metric, kept) for metric in metrics if (kept := values[metric.name][metric.skip :])}


def _reduce(metric: Metric, values: list[float]) -> dict[str, Any]:
    if metric.reduce == "first-last":
        numbers = {"first": values[0], "last": values[-1]}
        unit = {"unit": metric.unit} if metric.unit else {}
    else:
        numbers = {"value": _one_of(metric.reduce, values)}
        unit = {"unit": metric.unit}
    odd = [str(number) for number in numbers.values() if not math.isfinite(number)]
    finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}
    return {**finite, **unit, **({"note": odd[0]} if odd else {})}


def _one_of(reduce: Reduce, values: list[float]) -> float:
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
