"""Rows of the list of runs: kept in memory, read again when their record changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import records

from labctl.errors import ConfigError
from labctl.records import note, store
from labctl.records.active import ActiveRun
from labctl.records.store import RunSummary
from labctl.runs import compare
from labctl.system import filelock
from labctl.ui import terms
from labctl.ui.index import Index, Row, Rows
from labctl.ui.site import STATIC

FIRST, SECOND, THIRD = (f"20261125-20361{number}-opt-tiny-{number}ac123" for number in range(3))
OLD = 1_700_000_000


def write(lab: Path, run_id: str, *, aged: bool = True, **result: object) -> Path:
    """Write a record that changed long ago if ``aged``; return its directory."""
    path = records.write(lab, run_id, **result)  # type: ignore[arg-type]
    if aged:
        os.utime(path, (OLD, OLD))
        os.utime(path.parent, (OLD, OLD))
    return path


def unfinished(lab: Path, run_id: str) -> Path:
    """Write the record of a run without a result; return its directory."""
    path = records.write(lab, run_id)
    (path / "result.json").unlink()
    return path


def by_id(rows: Rows) -> dict[str, Row]:
    """Return rows by run id."""
    return {row.id: row for row in rows.runs}


def test_a_row_has_what_the_list_shows(tmp_path: Path) -> None:
    path = write(tmp_path, FIRST, losses=(8.1, 4.8), throughput=80.5, checks=[])
    note.write(path, "lr halved")
    (row,) = Index(tmp_path).latest().runs
    assert row == Row(
        id=FIRST, short="0ac123", state="done", workload="opt-tiny", verdict="PASS", outcome="completed",
        started=1795638975.0, seconds=23.4, loss=4.8, value=80.5, unit="samples/s", nodes=("worker-0", "worker-1"),
        note="lr halved",
    )  # fmt: skip


def test_a_run_without_loss_and_throughput_shows_its_first_metric_by_name(tmp_path: Path) -> None:
    write(tmp_path, FIRST, metrics={"busbw": {"value": 7.5, "unit": "GB/s"}, "latency": {"value": 1}})
    (row,) = Index(tmp_path).latest().runs
    assert (row.metric, row.value, row.unit, row.loss) == ("busbw", 7.5, "GB/s", None)


def test_a_loss_of_nan_is_a_text_to_show_and_to_filter_by_and_another_text_is_no_value(tmp_path: Path) -> None:
    write(tmp_path, FIRST, metrics={"loss": {"first": 8.0, "last": None, "note": "nan"}, "throughput": {"value": "x"}})
    path = unfinished(tmp_path, SECOND)
    sample = {"metric": "loss", "step": 2, "seconds": 1.0, "value": None, "note": "inf"}
    (path / "metrics.jsonl").write_text(json.dumps(sample) + "\n")
    runs = Index(tmp_path)
    assert [(row.loss, row.value) for row in runs.latest().runs] == [("inf", None), ("nan", None)]
    assert runs.matching(["loss=nan"]) == [FIRST]
    assert runs.matching(["loss>5"]) == [SECOND]


def test_the_latest_runs_come_first_and_alone_if_asked_for(tmp_path: Path) -> None:
    for run_id in (FIRST, THIRD, SECOND):
        write(tmp_path, run_id)
    runs = Index(tmp_path)
    latest = runs.latest(2)
    assert [row.id for row in latest.runs] == [THIRD, SECOND]
    assert latest.total == 3
    assert [row.id for row in runs.latest().runs] == [THIRD, SECOND, FIRST]


def test_only_records_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note one of two old records: only that one is read, and is what came since."""
    path = write(tmp_path, FIRST)
    write(tmp_path, SECOND)
    runs = Index(tmp_path)
    change = runs.latest().change
    note.write(path, "lr halved")
    read: list[str] = []
    summary = store.summary

    def reading(lab: Path, run_id: str, active: Mapping[str, ActiveRun]) -> RunSummary:
        """Note which record is read."""
        read.append(run_id)
        return summary(lab, run_id, active)

    monkeypatch.setattr(store, "summary", reading)
    runs.latest()
    assert read == [FIRST]
    assert [(row.id, row.note) for row in runs.since(change).runs] == [(FIRST, "lr halved")]


def test_a_folder_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    """Give a folder the time of change that it was read with, as a coarse clock does: its new result is seen."""
    path = write(tmp_path, FIRST, aged=False)
    runs = Index(tmp_path)
    runs.latest()
    when = path.stat().st_mtime_ns
    shutil.rmtree(path)
    records.write(tmp_path, FIRST, verdict="FAIL", cause="criteria")
    os.utime(path, ns=(when, when))
    assert [row.verdict for row in runs.latest().runs] == ["FAIL"]


def test_new_and_removed_runs_come_once(tmp_path: Path) -> None:
    path = write(tmp_path, FIRST)
    runs = Index(tmp_path)
    change = runs.latest().change
    shutil.rmtree(path)
    write(tmp_path, SECOND)
    os.utime(path.parent, (OLD + 1, OLD + 1))
    runs.latest()
    since = runs.since(change)
    assert ([row.id for row in since.runs], list(since.removed), since.total) == ([SECOND], [FIRST], 1)
    runs.latest()
    after = runs.since(since.change)
    assert (after.runs, after.removed) == ([], [])


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00" * 64, '{"verdict": 3}'])
def test_a_result_that_cannot_be_read_has_a_row_without_verdict(tmp_path: Path, content: str) -> None:
    (write(tmp_path, FIRST) / "result.json").write_text(content)
    (row,) = Index(tmp_path).latest().runs
    assert (row.state, row.verdict, row.outcome) == ("done", "", "")


def test_what_is_no_record_has_no_row(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/file").touch()
    (tmp_path / f"runs/{SECOND}").symlink_to(tmp_path / f"runs/{FIRST}")
    assert [row.id for row in Index(tmp_path).latest().runs] == [FIRST]


def test_without_runs_there_are_no_rows(tmp_path: Path) -> None:
    assert Index(tmp_path).latest() == Rows(change=1, total=0, runs=[])


def test_the_state_of_a_run_is_unknown_until_its_nodes_were_asked(tmp_path: Path) -> None:
    """Tell of one of two runs that it runs: its step is a change; the other, asked for in vain, is orphaned."""
    for run_id in (FIRST, SECOND):
        unfinished(tmp_path, run_id)
    runs = Index(tmp_path)
    before = runs.latest()
    assert {row.state for row in before.runs} == {"unknown"}
    assert sorted(runs.without_result()) == [FIRST, SECOND]
    active = ActiveRun(id=FIRST, nodes=("worker-0",), state="running", step="step 3/9")
    runs.keep_states([FIRST, SECOND], {FIRST: active})
    now = by_id(runs.since(before.change))
    assert (now[FIRST].state, now[FIRST].step, now[FIRST].nodes) == ("running", "step 3/9", ("worker-0",))
    assert now[SECOND].state == "orphaned"


def test_a_run_that_a_labctl_here_records_is_running(tmp_path: Path) -> None:
    unfinished(tmp_path, FIRST)
    (tmp_path / filelock.RUNS).mkdir(parents=True)
    with store.recording(tmp_path, FIRST):
        assert [row.state for row in Index(tmp_path).latest().runs] == ["running"]


def test_a_run_of_which_nothing_changes_does_not_come_again(tmp_path: Path) -> None:
    """Ask twice for a run that stands at a step: though it gets older, its row is the same."""
    unfinished(tmp_path, FIRST)
    runs = Index(tmp_path)
    active = {FIRST: ActiveRun(id=FIRST, nodes=("worker-0",), state="running", step="step 3/9")}
    runs.keep_states([FIRST], active)
    change = runs.latest().change
    time.sleep(0.01)
    runs.keep_states([FIRST], active)
    assert runs.since(change).runs == []


@pytest.mark.parametrize(
    ("terms", "matching"),
    [
        (["LAB_NODES=2"], [SECOND, FIRST]),
        (["LAB_NODES=2", "--lr=0.01"], [FIRST]),
        (["lr=0.01"], [THIRD, FIRST]),
        (["--lr=0.0"], []),
        (["lr="], [THIRD, FIRST]),
        (["launcher=deepspeed", "nodes=2"], [THIRD, SECOND, FIRST]),
        (["rehearse=true"], [THIRD]),
        (["HF_TOKEN=hf_abc"], []),
        (["HF_TOKEN=", "api-token=sk_abc"], []),
        (["lr=1e-2"], [THIRD, FIRST]),
        (["lr<0.1"], [THIRD, FIRST]),
        (["--lr!=0.01"], []),
        (["-lr=0.01"], [SECOND]),
        (["LAB_NODES>=3"], []),
        (["-LAB_NODES="], [THIRD]),
        (["params.Api_Token="], [FIRST]),
        (["params.`api-token`="], [FIRST]),
        (["loss<6"], [SECOND]),
        (["metrics.loss<=8"], [SECOND, FIRST]),
        (["params.loss<6"], []),
        (["peak-memory=0.50"], [FIRST]),
        (["launcher>=0"], []),
        (["launcher!=x", "lr!=x"], [THIRD, FIRST]),
    ],
)
def test_runs_are_found_by_settings_options_and_arguments(
    tmp_path: Path, terms: list[str], matching: list[str]
) -> None:
    """Find runs by what they were given; never by a secret, which nobody can guess by it."""
    two = {"LAB_NODES": "2", "HF_TOKEN": "hf_abc"}
    write(tmp_path, FIRST, arguments=("--lr", "0.01", "--api-token", "sk_abc"), settings=two,
          metrics={"loss": {"first": 9, "last": 8}, "peak_memory": {"value": 0.5}})  # fmt: skip
    write(tmp_path, SECOND, arguments=(), settings=two, metrics={"loss": {"first": 9, "last": 5}})
    write(tmp_path, THIRD, arguments=("--lr=0.01",), settings={}, request={"options": {"rehearse": True, "words": []}})
    runs = Index(tmp_path)
    runs.latest()
    assert runs.matching(terms) == matching


def refuse(path: str) -> dict[str, str]:
    """Stand in for what reads settings, and must not any more."""
    raise AssertionError(path)


def test_settings_are_read_once_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filter after the list was opened: the first filter reads nothing."""
    write(tmp_path, FIRST)
    runs = Index(tmp_path)
    runs.latest()
    monkeypatch.setattr(compare, "parameters", refuse)
    assert runs.matching(["LAB_NAME=demo"]) == [FIRST]


def test_a_run_that_began_without_settings_has_those_that_its_record_gets(tmp_path: Path) -> None:
    """Write the settings of a run under way after its row was read: a column has them as a change."""
    path = unfinished(tmp_path, FIRST)
    settings = (path / "settings.json").read_bytes()
    (path / "settings.json").unlink()
    runs = Index(tmp_path)
    change = runs.latest().change
    assert runs.matching(["LAB_NAME=demo"]) == []
    (path / "settings.json").write_bytes(settings)
    runs.latest()
    assert runs.column("LAB_NAME", change) == {FIRST: "demo"}


def test_names_that_no_run_has_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, FIRST, losses=(8.0, 5.0), arguments=("--lr", "0.01"))
    sought = ["params.loss=1", "-foo=", "LR=1", "metrics.lr<3", "metrics.LOSS<3"]
    assert Index(tmp_path).unknown(sought) == {"loss": "", "foo": "", "lr": ""}


@pytest.mark.parametrize(
    ("term", "name", "similar"),
    [
        ("learning_rat<1", "learning_rat", "--learning-rate"),
        ("lab_node=2", "lab_node", "LAB_NODES"),
        ("-Verdit=PASS", "Verdit", "verdict"),
        ("metrics.busbww>3", "busbww", "busbw"),
        ("params.verdit=PASS", "verdit", ""),
    ],
)
def test_for_an_unknown_name_there_is_the_most_similar_one(tmp_path: Path, term: str, name: str, similar: str) -> None:
    arguments, metrics = ("--learning-rate", "0.01"), {"busbw": {"value": 7.5}}
    write(tmp_path, FIRST, arguments=arguments, settings={"LAB_NODES": "2"}, metrics=metrics)
    assert Index(tmp_path).unknown([term]) == {name: similar}


def test_columns_are_those_that_the_page_compares_itself() -> None:
    script = (STATIC[0] / "filter.js").read_text()
    (compared,) = re.findall(r"const COMPARED = \{\n(.*?)\n  \};", script, re.DOTALL)
    assert tuple(re.findall(r"^ *(\w+)[:,]", compared, re.MULTILINE)) == terms.COLUMNS


@pytest.mark.parametrize("text", ["", "lr", "=3", "--lr", "<"])
def test_a_term_compares_a_name_with_a_value(text: str) -> None:
    with pytest.raises(ConfigError):
        terms.read(text)


def test_names_that_differ_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    """Vary an argument, a setting and one that only one run has: those differ, arguments first."""
    write(tmp_path, FIRST, arguments=("--lr", "0.01", "--model", "m"), settings={"LAB_NODES": "2", "LAB_NAME": "demo"})
    write(
        tmp_path,
        SECOND,
        arguments=("--lr", "0.1", "--model", "m", "--fp16"),
        settings={"LAB_NODES": "3", "LAB_NAME": "demo"},
    )
    names = Index(tmp_path).names()
    # An output folder is a run's own.
    assert names.differing == ["--fp16", "--lr", "--out", "LAB_NODES"]
    assert names.same == ["--model", "LAB_NAME", "launcher", "nodes"]


def test_a_run_under_way_has_the_metrics_that_it_printed_last(tmp_path: Path) -> None:
    """Print more: they are a change. A line that is not written whole, and one from the middle, are left out."""
    path = unfinished(tmp_path, FIRST)
    values = [8 - step / 100 for step in range(200)]
    series = [{"metric": "loss", "step": step, "seconds": 1.0, "value": value} for step, value in enumerate(values)]
    lines = [json.dumps(point) + "\n" for point in series]
    rate = json.dumps({"metric": "throughput", "step": 1, "seconds": 1.0, "value": 80.5}) + "\n"
    (path / "metrics.jsonl").write_text("".join((*lines, rate, '{"metric": "loss", "st')))
    runs = Index(tmp_path)
    (row,) = runs.latest().runs
    assert row.loss == pytest.approx(6.01)
    assert (row.value, row.unit) == (80.5, "samples/s")
    assert runs.matching(["loss<6.1"]) == [FIRST]
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('ep": 201, "seconds": 1.0, "value": 4.5}\n')
    assert [row.loss for row in runs.latest().runs] == [4.5]
    assert runs.column("loss", 1) == {FIRST: 4.5}


def test_rows_are_given_while_the_records_of_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the latest run while all are read: it is there before the reading ends."""
    for run_id in (FIRST, SECOND):
        write(tmp_path, run_id)
    runs = Index(tmp_path)
    began, asked = threading.Event(), threading.Event()
    summary = store.summary

    def slow(lab: Path, run_id: str, active: Mapping[str, ActiveRun]) -> RunSummary:
        """Read a record, that of the first run only once the latest was asked for."""
        if run_id == FIRST:
            began.set()
            assert asked.wait(60)
        return summary(lab, run_id, active)

    monkeypatch.setattr(store, "summary", slow)
    reading = threading.Thread(target=runs.latest)
    reading.start()
    assert began.wait(60)
    latest = runs.latest(1)
    asked.set()
    reading.join(60)
    assert [row.id for row in latest.runs] == [SECOND]
    assert [row.id for row in runs.since(latest.change).runs] == [FIRST]


@pytest.mark.parametrize("job", ["{", '{"request": {"options": [1]}}'])
def test_a_record_without_settings_and_job_matches_none(tmp_path: Path, job: str) -> None:
    path = write(tmp_path, FIRST)
    (path / "job.json").write_text(job)
    (path / "settings.json").unlink()
    runs = Index(tmp_path)
    runs.latest()
    assert runs.matching(["LAB_NAME=demo"]) == []
