"""Data that all formats of an export share: samples with steps, hyperparameters and start of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from labctl.model import Result
from labctl.records import store
from labctl.records.metrics import Sample
from labctl.runs import compare, series
from labctl.runs.compare import RecordedRun

DEEPSPEED = "deepspeed."
NAMED = ("arguments", "launcher", "image")
"""Facts that are hyperparameters, beside options of the script and DeepSpeed's keys."""


def samples(lab: Path, run_id: str) -> Iterator[Sample]:
    """Yield a run's samples in order; a metric that several ranks printed is one per rank, ``METRIC/rank0``."""
    ranks: dict[str, set[int | None]] = {}
    for sample in series.read(lab, run_id):
        ranks.setdefault(sample.metric, set()).add(sample.rank)
    for sample in series.read(lab, run_id):
        is_shared = sample.rank is not None and len(ranks[sample.metric]) > 1
        yield replace(sample, metric=f"{sample.metric}/rank{sample.rank}") if is_shared else sample


def stepped(samples: Iterable[Sample]) -> Iterator[tuple[int, Sample]]:
    """Yield each sample with its step; without one, with its number among the samples of its metric."""
    numbers: Counter[str] = Counter()
    for sample in samples:
        yield numbers[sample.metric] if sample.step is None else sample.step, sample
        numbers[sample.metric] += 1


def parameters(run: RecordedRun) -> dict[str, str]:
    """Return the arguments, DeepSpeed keys, launcher, image and ranks of a run, those that it has, as hyperparameters.

    Values that sound secret are redacted.
    """
    texts = {
        name.removeprefix("--"): text
        for name, text in compare.redacted(run.facts).items()
        if name.startswith(("--", DEEPSPEED)) or name in NAMED
    }
    return {"ranks": str(run.result.world_size), **texts}


def began(result: Result) -> float:
    """Return a run's start in seconds since 1970; 0 if it is unknown."""
    start = store.start(result.run_id, result.started)
    return start.timestamp() if start else 0
