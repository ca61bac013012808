from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from support.builders import job, lab

from labctl.model import File, Metric
from labctl.records import store
from labctl.records.lines import Line
from labctl.records.metrics import Sample
from labctl.runs import series

LOSS = Metric(name="loss", pattern=r"loss (\S+)", reduce="first-last", skip=1)
SAID = [
    Line("labctl: rank 0 of 2 on worker-0", 1000.0, 0),
    Line("step 1/3 loss 4.5", 1000.25, 0),
    Line("step 1/3 loss 4.25", 1000.5, 1),
    Line("step 2/3", 1001.0, 0),
    Line("loss nan", 1002.0, 0),
]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Write the record of a run that printed ``SAID``; return its directory."""
    of, ran = lab(directory=tmp_path), job(lab(), metrics=(LOSS,))
    content = {"job": msgspec.to_builtins(ran, enc_hook=str)}
    path = store.create(of, "r1", (), (File(path="job.json", content=json.dumps(content)),))
    with closing(store.RunLog(path, of, ran.workload)) as log:
        for line in SAID:
            log.keep((line,))
    return path


def test_a_run_has_its_metrics_over_time(record: Path, tmp_path: Path) -> None:
    """Read the series: step, seconds and value of each loss, None with a note for nan."""
    assert [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()] == [
        {"metric": "loss", "step": 1, "seconds": 0.25, "value": 4.5, "rank": 0},
        {"metric": "loss", "step": 1, "seconds": 0.5, "value": 4.25, "rank": 1},
        {"metric": "loss", "step": 2, "seconds": 2.0, "value": None, "note": "nan", "rank": 0},
    ]
    assert [*series.read(tmp_path, "r1")] == [
        Sample(metric="loss", step=1, seconds=0.25, value=4.5, rank=0),
        Sample(metric="loss", step=1, seconds=0.5, value=4.25, rank=1),
        Sample(metric="loss", step=2, seconds=2.0, value=None, note="nan", rank=0),
    ]


def test_an_old_record_is_read_off_its_output(record: Path, tmp_path: Path) -> None:
    """Read a record without metrics.jsonl: losses from output.log, without seconds."""
    (record / "metrics.jsonl").unlink()
    points = [(sample.step, sample.seconds, sample.value) for sample in series.read(tmp_path, "r1")]
    assert points == [(1, None, 4.5), (1, None, 4.25), (2, None, None)]


def test_a_line_that_is_not_whole_yet_is_left_out(record: Path, tmp_path: Path) -> None:
    """Append half a line to metrics.jsonl: it is skipped."""
    with (record / "metrics.jsonl").open("a") as stream:
        stream.write('{"metric": "loss", "st')
    assert len([*series.read(tmp_path, "r1")]) == 3


def test_who_follows_a_run_from_its_beginning_writes_each_sample_once(record: Path) -> None:
    """Write a followed run's lines again: metrics.jsonl stays the same."""
    before = (record / "metrics.jsonl").read_text()
    with closing(store.RunLog(record, lab(), job(lab(), metrics=(LOSS,)).workload, over=True)) as log:
        for line in SAID:
            log.keep((line,))
    assert (record / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("kept", [("started",), ("started", "output.log")])
def test_a_record_without_output_or_metrics_has_no_series(record: Path, tmp_path: Path, kept: tuple[str, ...]) -> None:
    """Read a record without metrics and output: no samples."""
    for path in record.iterdir():
        if path.name not in kept:
            path.unlink()
    assert [*series.read(tmp_path, "r1")] == []


def test_of_many_samples_so_many_are_kept_evenly_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ten samples with a limit of four: every fourth; all of a rarer metric."""
    monkeypatch.setattr(series, "MOST", 4)
    samples = (
        Sample(metric=name, step=at, seconds=None, value=0.5)
        for at in range(10)
        for name in ("loss", "rare")[: 1 + (at < 2)]
    )
    by_metric = series.by_metric(samples)
    assert [sample.step for sample in by_metric["loss"]] == [0, 4, 8]
    assert [sample.step for sample in by_metric["rare"]] == [0, 1]
