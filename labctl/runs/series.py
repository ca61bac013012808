"""Metrics of a run over time, for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from labctl.errors import HostError
from labctl.records import store
from labctl.records.metrics import Sample, Sampler, searched
from labctl.system import files
from labctl.system.decode import decode

MOST = 1 << 14
"""Samples of a metric to keep in memory."""


def read(lab: Path, run_id: str) -> Iterator[Sample]:
    """Yield a run's samples so far: of metrics.jsonl up to an incomplete line, else parsed from its output.

    Without ``metrics.jsonl`` in the record they are parsed from its output, without times.
    """
    try:
        stream = files.open_regular(store.directory(lab, run_id) / store.METRICS)
    except OSError:
        yield from _read_output(lab, run_id)
        return
    with stream:
        for line in stream:
            try:
                sample = decode(line, Sample)
            except msgspec.DecodeError:
                # The last line is incomplete if the run is running, or its labctl was killed.
                return
            yield sample


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


def by_metric(samples: Iterable[Sample]) -> Mapping[str, Sequence[Sample]]:
    """Map each metric to its samples in order, thinned to at most MOST by leaving out every second one."""
    kept: dict[str, list[Sample]] = {}
    count: Counter[str] = Counter()
    every: dict[str, int] = {}
    for sample in samples:
        name = sample.metric
        if count[name] % every.setdefault(name, 1) == 0:
            of = kept.setdefault(name, [])
            of.append(sample)
            if len(of) > MOST:
                del of[1::2]
                every[name] *= 2
        count[name] += 1
    return kept


def step_times(by_metric: Mapping[str, Sequence[Sample]]) -> list[tuple[int, float]]:
    """Return (step, seconds per step) between samples of the metric with most timed steps; [] without any."""
    longest = max(map(_timed_steps, by_metric.values()), key=len, default=[])
    return [(to, (end - begin) / (to - of)) for (of, begin), (to, end) in pairwise(longest) if to > of]


def _timed_steps(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """Return (step, seconds) of samples that have both."""
    return [
        (sample.step, sample.seconds) for sample in samples if sample.step is not None and sample.seconds is not None
    ]
