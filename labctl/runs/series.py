"""The metrics of a run over time, for reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from labctl.errors import HostError
from labctl.runs import store
from labctl.runs.metrics import Sample, Sampler
from labctl.system import files


def read(lab: Path, run_id: str) -> Iterator[Sample]:
    """The samples of a run, in order, as far as they are written.

    Those of a record without ``metrics.jsonl`` are read off its output, which does not have the times of lines.
    """
    try:
        stream = files.open_regular(store.directory(lab, run_id) / store.METRICS)
    except OSError:
        yield from _read_output(lab, run_id)
        return
    with stream:
        for line in stream:
            try:
                sample = msgspec.json.decode(line, type=Sample)
            except msgspec.DecodeError:
                # The last line of a run that is under way, or whose labctl was killed.
                return
            yield sample


def _read_output(lab: Path, run_id: str) -> Iterator[Sample]:
    try:
        sampler = Sampler(store.load_job(lab, run_id).workload.metrics)
        stream = files.open_regular(store.directory(lab, run_id) / store.OUTPUT)
    except (HostError, OSError):
        return
    with stream:
        for line in stream:
            if len(line) <= store.LONGEST_LINE:
                yield from sampler.read(line.decode("utf-8", "replace").rstrip("\n"))
