"""Metrics of a run: output lines -> samples -> one reduced value per metric."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from labctl.model import Metric, Sample


def read_samples(metrics: Iterable[Metric], lines: Iterable[str]) -> tuple[Sample, ...]:
    """The numbers matched by the metrics' patterns, the first on each line, in order.

    Patterns match anywhere in a line, also after a ``worker-1: `` prefix; text that float() rejects is skipped.
    """
    patterns = [(metric.name, re.compile(metric.pattern)) for metric in metrics]
    return tuple(
        Sample(metric=name, value=value)
        for line in lines
        for name, pattern in patterns
        if (match := pattern.search(line)) and (value := _float(match[1])) is not None
    )


def reduce_samples(metrics: Iterable[Metric], samples: Iterable[Sample]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Metrics as in JSON, ``{"value", "unit"}`` or ``{"first", "last"}``; those without samples are left out.

    nan and infinity, which JSON lacks, are None with a ``note``.
    """
    values: dict[str, list[float]] = {}
    for sample in samples:
        values.setdefault(sample.metric, []).append(sample.value)
    return tuple(
        (metric.name, _reduce(metric, kept))
        for metric in metrics
        if (kept := values.get(metric.name, [])[metric.skip :])
    )


def _reduce(metric: Metric, values: list[float]) -> dict[str, Any]:
    if metric.reduce == "first-last":
        numbers = {"first": values[0], "last": values[-1]}
        unit = {"unit": metric.unit} if metric.unit else {}
    else:
        numbers = {"value": _REDUCERS[metric.reduce](values)}
        unit = {"unit": metric.unit}
    odd = [str(number) for number in numbers.values() if not math.isfinite(number)]
    finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}
    return {**finite, **unit, **({"note": odd[0]} if odd else {})}


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _unless_nan(reducer: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """The reducer, but nan if any value is: with nan, min, max and sorting depend on the order."""
    return lambda values: math.nan if any(map(math.isnan, values)) else reducer(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _median(values: list[float]) -> float:
    ordered, count = sorted(values), len(values)
    return _mean(ordered[(count - 1) // 2 : count // 2 + 1])


_REDUCERS: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "min": _unless_nan(min),
    "max": _unless_nan(max),
    "mean": _unless_nan(_mean),
    "median": _unless_nan(_median),
}
