"""A record of the first schema, as labctl 0.1.0 wrote it: without times, samples, digests and provenance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from labctl.errors import HostError
from labctl.jobs import replay
from labctl.model import Result
from labctl.records import store
from labctl.reports import runs as reports
from labctl.runs import compare, origin, series
from labctl.runs.export import tensorboard

RUN = "20261125-205844-opt-tiny-4c0a"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Copy the record of labctl 0.1.0 to tmp_path; return the lab directory."""
    shutil.copytree(Path(__file__).with_name("former"), tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def result(lab: Path) -> Result:
    """Return the result of that record."""
    recorded = store.read(lab, RUN).result
    assert recorded
    return recorded


def test_it_is_listed_and_shown_with_all_that_it_has(lab: Path, result: Result) -> None:
    """List and read the record: verdict, metrics and ranks."""
    (listed,) = store.listing(lab)
    assert (listed.run_id, listed.state, listed.verdict, listed.workload) == (RUN, "done", "PASS", "opt-tiny")
    content = json.loads((store.directory(lab, RUN) / "result.json").read_text())
    assert result.metrics == content["metrics"]
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(0, "worker-0"), (1, "worker-1")]


def test_its_output_has_no_times_and_its_metrics_no_seconds(lab: Path) -> None:
    """Read its output and series: losses, with None for every time."""
    lines = list(store.output(lab, RUN))
    assert {when for when, _ in lines} == {None}
    losses = [sample for sample in series.read(lab, RUN) if sample.metric == "loss"]
    assert (losses[0].value, losses[-1].value) == (7.6593, 7.101)
    assert {sample.seconds for sample in losses} == {None}
    assert next(store.output(lab, RUN, rank=1))[0] is None


def test_it_is_compared_reported_and_exported(lab: Path, result: Result, tmp_path: Path) -> None:
    """Compare, report and export the record: all work."""
    recorded = compare.read(lab, result)
    assert not compare.compare([recorded, recorded]).differences
    assert origin.UNREADABLE not in recorded.facts
    assert "PASS" in reports.of_runs(lab, [recorded]).html
    losses = [sample for sample in series.read(lab, RUN) if sample.metric == "loss"]
    written = tensorboard.event_file(tmp_path / "board", result, series.read(lab, RUN), {})
    assert written.read_bytes().count(b"loss") == len(losses)


def test_it_cannot_be_replayed_and_says_why(lab: Path) -> None:
    """Replay the record: HostError says that it is of an earlier labctl."""
    with pytest.raises(HostError, match="an earlier labctl recorded it, which kept less"):
        replay.read(lab, RUN)
