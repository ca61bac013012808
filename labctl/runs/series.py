"""Metrics of a run over time, for reports."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from labctl.errors import HostError
from labctl.records import store
from labctl.records.metrics import Sample, Sampler, searched
from labctl.system import files, human
from labctl.system.decode import decode, decode_lines

MOST = 1 << 14
"""Samples of a metric to keep in memory."""
TAIL = 4096
"""Bytes that have the last samples of a run's metrics."""


def read(lab: Path, run_id: str, folder: Path | None = None) -> Iterator[Sample]:
    """Yield a run's samples so far: of metrics.jsonl up to an incomplete line, else parsed from its output.

    Without ``metrics.jsonl`` in the record, or in the folder in which it grows, they are parsed from the output in the
    record, without times.
    """
    try:
        stream = files.open_regular((folder or store.directory(lab, run_id)) / store.METRICS)
    except OSError:
        yield from _read_output(lab, run_id)
        return
    with stream:
        while lines := stream.readlines(store.PIECE):
            samples = _decoded(lines)
            yield from samples
            # The last line is incomplete if the run is running, or its labctl was killed.
            if len(samples) < len(lines):
                return


def last(record: Path) -> dict[str, Sample]:
    """Return the last sample of each metric in the last TAIL bytes of a record's metrics.jsonl; empty without it."""
    try:
        with files.open_regular(record / store.METRICS) as stream:
            begin = max(0, stream.seek(0, os.SEEK_END) - TAIL)
            stream.seek(begin)
            lines = stream.readlines(TAIL)
    except OSError:
        return {}
    # The first line is whole only at the beginning.
    return {sample.metric: sample for sample in _decoded(lines[1:] if begin else lines)}


def _decoded(lines: Sequence[bytes]) -> Sequence[Sample]:
    """Return the samples in lines, up to one that is incomplete."""
    with suppress(msgspec.DecodeError):
        return decode_lines(b"".join(lines), Sample)
    samples: list[Sample] = []
    with suppress(msgspec.DecodeError):
        for line in lines:
            samples.append(decode(line, Sample))  # noqa: PERF401 - those before an error are kept
    return samples


def _read_output(lab: Path, run_id: str) -> Iterator[Sample]:
    """Yield samples parsed from a run's recorded output, without times; none if the record is incomplete."""
    try:
        sampler = Sampler(store.load_job(lab, run_id).workload.metrics)
        stream = files.open_regular(store.directory(lab, run_id) / store.OUTPUT)
    except (HostError, OSError):
        return
    with stream:
        for line in stream:
            yield from sampler.read(searched(line.decode("utf-8", "replace").rstrip("\n")))


class _Thinned:
    """Samples of a metric, of which more are left out the more there are."""

    __slots__ = ("every", "samples", "skipped")

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.every = 1
        self.skipped = 0
        """Number of samples to leave out next."""

    def keep(self, sample: Sample) -> None:
        """Keep a sample, and of all that are kept every second one if they are more than MOST."""
        self.samples.append(sample)
        if len(self.samples) > MOST:
            del self.samples[1::2]
            self.every *= 2
        self.skipped = self.every - 1


def by_metric(samples: Iterable[Sample]) -> Mapping[str, Sequence[Sample]]:
    """Map each metric to its samples in order, thinned to at most MOST by leaving out every second one."""
    thinned: dict[str, _Thinned] = {}
    for sample in samples:
        # Of a million samples, nearly all end here.
        kept = thinned.get(sample.metric)
        if kept and kept.skipped:
            kept.skipped -= 1
        else:
            thinned.setdefault(sample.metric, kept or _Thinned()).keep(sample)
    return {name: kept.samples for name, kept in thinned.items()}


class Tally:
    """Count of samples of a metric of one rank, of those without a value, and of epochs in which steps began again."""

    def __init__(self) -> None:
        self.samples = self._absent = 0
        self.epochs = 1
        self.twice = False
        """True if steps came twice, but not from the first one on."""
        self._first = self._last = -math.inf

    def add(self, step: float | None, value: float | None) -> None:
        """Count a sample; its step may be unknown."""
        self._absent += value is None
        if step is not None:
            self._add_step(step)
        self.samples += 1

    def _add_step(self, step: float) -> None:
        """Begin another epoch if a step is not behind the first one, as those before it were."""
        if self._last == -math.inf:
            self._first = step
        elif step <= self._first < self._last:
            self.epochs += 1
        elif step <= self._last:
            self.twice = True
        self._last = step

    @property
    def absence(self) -> str:
        """Return ``no value for 3 of 60``; empty if all have one."""
        return f"no value for {self._absent:,} of {self.samples:,}" if self._absent else ""


def repetition(tallies: Iterable[Tally]) -> str:
    """Return of what curves over steps are the medians; empty if each step came once."""
    again = [tally for tally in tallies if tally.twice or tally.epochs > 1]
    if any(tally.twice for tally in again):
        return "median and range of the values at each step"
    epochs = {tally.epochs for tally in again}
    return f"median and range of {human.span(epochs)} epochs at each step" if epochs else ""


def main_rank(counts: Mapping[int | None, int]) -> int | None:
    """Return the rank to draw, by the number of samples of each: the lowest with at least half of the most.

    Ranks that print the same may be some samples apart while they run, and when they are killed.
    """
    most = max(counts.values(), default=0)
    return min((rank for rank, count in counts.items() if 2 * count >= most), key=_rank_order, default=None)


def _rank_order(rank: int | None) -> int:
    return -1 if rank is None else rank


def of_main_rank(samples: Sequence[Sample]) -> tuple[Sequence[Sample], str]:
    """Return the samples of one rank, and ``rank 0`` if those of others were left out; else empty."""
    counts = Counter(sample.rank for sample in samples)
    if len(counts) < 2:
        return samples, ""
    rank = main_rank(counts)
    return [sample for sample in samples if sample.rank == rank], named_rank(rank)


def named_rank(rank: int | None) -> str:
    """Return ``rank 0``, or that the rank is unknown."""
    return "unknown rank" if rank is None else f"rank {rank}"


def step_times(by_metric: Mapping[str, Sequence[Sample]]) -> list[tuple[int, float, float]]:
    """Return (step, seconds per step, time of its end) between samples of the metric with most timed steps."""
    longest = max(map(_timed_steps, by_metric.values()), key=len, default=[])
    return [(to, (end - begin) / (to - of), end) for (of, begin), (to, end) in pairwise(longest) if to > of]


def _timed_steps(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """Return (step, seconds) of samples that have both."""
    return [
        (sample.step, sample.seconds) for sample in samples if sample.step is not None and sample.seconds is not None
    ]
