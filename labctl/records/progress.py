"""Progress of a run, parsed from its output."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from labctl.model import Metric, Pace, Progress, Workload
from labctl.records import places
from labctl.records.finder import Finder, finder_of
from labctl.records.lines import Line
from labctl.records.metrics import Sample, Sampler, finite, searched

# ` 30%|███       | 30/100 [00:10<00:23,  2.93it/s]`, as transformers.Trainer prints; bars with a name, such as those of
# downloads, do not count steps.
BAR = re.compile(r"\r *\d{1,3}%\|[^|\r]*\| *(\d{1,12})/(\d{1,12}) \[")
RECENT = 256
"""Number of intervals between steps for the median."""


class Tracker:
    """Tracks the progress of a run from its output; it keeps values of metrics, not lines.

    Ranks print the same steps: a step counts once, and steps of ranks that are behind do not count.
    """

    def __init__(self, metrics: Sequence[Metric], finder: Finder | None = None) -> None:
        """Start without progress; ``finder`` finds metrics that are not declared."""
        self._units = {metric.name: metric.unit for metric in metrics}
        self._sampler = Sampler(metrics)
        self._finder = finder
        self._began: float | None = None
        self._last_line: float | None = None
        # Index of the best source seen so far, which counts.
        self._source = len(SOURCES)
        self._first = self._step = 0
        self._steps: int | None = None
        self._at = 0.0
        self._intervals: deque[float] = deque(maxlen=RECENT)
        self._first_step: float | None = None
        """Seconds from the first line to the first step."""
        self._longest = 0.0

    @property
    def pace(self) -> Pace | None:
        """Return the seconds of the run's first step and of its longest; None without a step."""
        if self._first_step is None:
            return None
        return Pace(first_step=round(self._first_step, 3), longest_step=round(self._longest, 3))

    @property
    def values(self) -> Mapping[str, Sequence[float]]:
        """Map each declared metric to its values, in order."""
        return self._sampler.values

    def found(self, hide: Callable[[str], str] = str) -> dict[str, dict[str, Any]]:
        """Return undeclared metrics reduced, with format and a line, redacted by ``hide``; {} without a finder."""
        return self._finder.reduced(hide) if self._finder else {}

    def read(self, lines: Iterable[Line]) -> list[Sample]:
        """Count steps and metrics in lines; return the samples, with seconds since the first line."""
        samples: list[Sample] = []
        for line in lines:
            if self._began is None:
                self._began = line.when
            self._last_line = line.when
            text = searched(line.text)
            samples += self._sampler.read(text, line.rank, line.when - self._began)
            for name, value in self._finder.read(line) if self._finder else ():
                samples.append(self._sampler.sample(name, value, line.rank, line.when - self._began))
            bar = last_bar(text) if "%|" in text else None
            if step := self._sampler.step:
                # Log lines of transformers.Trainer have the step, its bar the number of steps.
                self._count(0, step[0], step[1] or (bar[1] if bar and bar[0] == step[0] else None), line.when)
            elif bar and self._source:
                self._count(1, *bar, line.when)
            elif self._source > 1 and (epoch := places.epoch(text.lower())):
                self._count(2, *epoch, line.when)
        return samples

    def _count(self, source: int, step: int, steps: int | None, when: float) -> None:
        """Record a step of a source unless a better source counts; begin again for another bar or epoch."""
        another = source == self._source == 1 and self._steps not in (None, steps)
        if another and self._step < (self._steps or 0):
            # Another bar while the first is not at its end, as of an evaluation.
            return
        if source < self._source or another:
            self._source, self._steps = source, None
            self._intervals.clear()
            self._first = self._step = step
            self._at = when
            if self._first_step is None:
                self._first_step = when - (self._began or when)
        elif step > self._step:
            self._longest = max(self._longest, when - self._at)
            self._intervals.append((when - self._at) / (step - self._step))
            self._step, self._at = step, when
        elif step <= self._first < self._step:
            # It starts over, as in the next epoch.
            self._step, self._at = step, when
        else:
            return
        self._steps = steps or self._steps

    def progress(self) -> Progress:
        """Return step, steps, last metrics, seconds per step and seconds left so far; safe in any thread."""
        intervals = list(self._intervals)
        each = median(intervals) if intervals else None
        seen = self._source < len(SOURCES)
        left = None if each is None or self._steps is None else max(0.0, each * (self._steps - self._step))
        return Progress(
            counts=SOURCES[self._source] if seen else "step",
            step=self._step if seen else None,
            steps=self._steps,
            metrics=dict(self._last_values()),
            seconds_per_step=None if each is None else round(each, 3),
            seconds_left=None if left is None else round(left, 1),
            last_line=self._last_line,
        )

    def _last_values(self) -> Iterable[tuple[str, dict[str, object]]]:
        """Yield each metric's last value with unit, as a mapping; found ones with their format."""
        for name, values in self.values.items():
            if values:
                value, note = finite(values[-1])
                yield name, {"value": value, "unit": self._units[name], **({"note": note} if note else {})}
        # Another thread may find the first value of a metric meanwhile.
        for name, series in list(self._finder.series.items()) if self._finder else ():
            value, note = finite(series.values[-1])
            mark = {"found": series.example, **({"note": note} if note else {})}
            yield name, {"value": value, "unit": series.unit, **mark}


def tracker_of(workload: Workload) -> Tracker:
    """Return a tracker for a workload's declared metrics, and for those to find in its output."""
    return Tracker(workload.metrics, finder_of(workload))


def last_bar(text: str) -> tuple[int, int] | None:
    """Return (step, steps) of the last bar in a line; None if it has none."""
    bars = BAR.findall(text)
    return (int(bars[-1][0]), int(bars[-1][1])) if bars else None


SOURCES: tuple[Literal["step", "epoch"], ...] = ("step", "step", "epoch")
"""Units of the sources of progress, best first: steps in lines, bars, and epochs in lines."""
