"""note, and the commands that show the note of a run, on fictitious records."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import records
from support.commandline import Labctl

from labctl.cli.results import compared_runs
from labctl.cli.runs import list_text
from labctl.records import store
from labctl.records.store import RunList, RunSummary
from labctl.runs.compare import Comparison, Group

FIRST, SECOND = "20261125-203600-opt-tiny-0d07aa", "20261125-203700-opt-tiny-1e18bb"


@pytest.fixture
def two(labctl: Labctl) -> Labctl:
    """Write two runs to the lab; return its labctl."""
    for run_id in (FIRST, SECOND):
        records.write(labctl.directory, run_id, throughput=24.8)
    return labctl


def test_a_note_is_kept_printed_replaced_and_removed(two: Labctl) -> None:
    """Note twice on the latest run, print and remove it: each answer has the run and what was before."""
    none = f'run {SECOND} has no note\nhint: labctl note {SECOND} "TEXT"\n'
    assert two("note", "latest").out == none
    assert two("note", "-1", "lr", "halved").out == f"run {SECOND}: lr halved\n"
    assert two("note", "-1").out == "lr halved\n"
    assert two("note", "1e18bb", "a | b\nc").out == f"run {SECOND}: a | b c\nprevious note: lr halved\n"
    assert two("note", "latest", "").out == f"removed the note of run {SECOND}\nprevious note: a | b c\n"
    assert two("note", "latest", "").out == f"run {SECOND} has no note\n"
    assert two("note", "latest").out == none


def test_a_note_as_json_has_the_run_the_note_and_the_earlier_one(two: Labctl) -> None:
    """Note with --json behind the text, and print it with --json."""
    two("note", "-1", "first")
    noted = two("note", "-1", "second", "--json").document
    assert noted == {"schema": 1, "run_id": SECOND, "note": "second", "replaced": "first"}
    assert two("note", "-1", "--json").document == {**noted, "replaced": ""}


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["-5 % with half the lr"], "-5 % with half the lr"),
        (["- throughput: C -> h"], "- throughput: C -> h"),
        (["--lr is the one to change"], "--lr is the one to change"),
        (["lr", "-50", "%"], "lr -50 %"),
        (["--", "-5 % -h"], "-5 % -h"),
    ],
)
def test_a_text_may_begin_with_a_dash(two: Labctl, typed: list[str], kept: str) -> None:
    """Note texts that begin with a dash: they are kept as they are, and are no options."""
    assert two("note", "-1", *typed).out == f"run {SECOND}: {kept}\n"


def test_an_option_that_is_misspelt_is_no_note(two: Labctl) -> None:
    """Misspell --json: a usage error that names it, and no note."""
    answer = two("note", "-1", "text", "--jsn")
    assert (answer.code, answer.out) == (2, "")
    assert "did you mean `--json`?" in answer.err
    assert two("note", "-1", "--json").document["note"] == ""


def test_a_secret_of_the_lab_is_not_kept(two: Labctl) -> None:
    """Note the token of .env: it is redacted in the answer and in the record."""
    two.env("HF_TOKEN=hf_abcdefgh\n")
    assert two("note", "-1", "with hf_abcdefgh").out == f"run {SECOND}: with [REDACTED]\n"
    assert not [path for path in two.directory.glob("runs/*/*.txt") if "hf_abc" in path.read_text()]


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["nosuchrun", "text"], 2, "no run `nosuchrun` in"),
        (["-1", "x" * 501], 2, "the note has 501 characters; the limit is 500"),
        ([], 2, "`labctl note` needs RUN"),
    ],
)
def test_what_cannot_be_noted_is_refused(two: Labctl, typed: list[str], code: int, message: str) -> None:
    """Name a run that there is not, give too long a text, or nothing: an error with a hint."""
    answer = two("note", *typed)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert "hint: " in answer.err


@pytest.mark.parametrize("state", ["running", "orphaned"])
def test_a_run_without_a_result_has_its_note_too(two: Labctl, state: str) -> None:
    """Note on a run that is recorded at that time, and on one that is not: its summary has the note."""
    (two.directory / "runs" / SECOND / "result.json").unlink()
    with store.recording(two.directory, SECOND) if state == "running" else nullcontext():
        assert two("note", "-1", "watch it").code == 0
        summary = store.summary(two.directory, SECOND)
    assert (summary.state, summary.note) == (state, "watch it")


def test_runs_show_and_compare_have_the_note(two: Labctl) -> None:
    """Note on one of two runs: runs, its CSV and JSON, show and compare have it; without notes there is no column."""
    assert "NOTE" not in two("runs").out + two("compare", FIRST, SECOND).out
    assert "note " not in two("show").out
    two("note", "-1", "lr halved,\n=1")
    head, second, first = two("runs").out.splitlines()
    assert head.endswith("  TIME  NOTE")
    assert second.endswith("  23 s  lr halved, =1")
    assert first.endswith("  23 s")
    assert [run["note"] for run in two("runs", "--json").document["runs"]] == ["lr halved, =1", ""]
    assert [row["note"] for row in csv.DictReader(two("runs", "--csv").out.splitlines())] == ["lr halved, =1", ""]
    assert two("show").out.splitlines()[1] == "note       lr halved, =1"
    assert two("show", "--json").document["note"] == "lr halved, =1"
    assert two("show", FIRST, "--json").document["note"] == ""
    assert two("compare", FIRST, SECOND).out.splitlines()[:3] == [
        "GROUP  RUN                              VERDICT    NOTE",
        f"A      {FIRST}  completed",
        f"A      {SECOND}  completed  lr halved, =1",
    ]
    assert two("compare", FIRST, SECOND, "--json").document["notes"] == {SECOND: "lr halved, =1"}


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_long_note_makes_no_line_of_a_list_wider_than_the_terminal(width: int) -> None:
    """Render a run with a note of 500 characters: the note is cut before a column of figures is lost."""
    metrics: dict[str, dict[str, Any]] = {"loss": {"last": 2.25}, "throughput": {"value": 24.8, "unit": "samples/s"}}
    run = RunSummary(
        run_id=FIRST, short_id="0d07aa", state="done", workload="opt-tiny", outcome="completed", seconds=23.4,
        nodes=("worker-0",), metrics=metrics, note="n" * 500,
    )  # fmt: skip
    text = list_text(RunList((run,), 1), width)
    head, line = text.splitlines()
    assert max(len(head), len(line)) <= width
    assert ("LOSS" in head, "SAMPLES/S" in head) == (width > 40, width > 40)
    assert ("NODES  TIME" in head) == (width >= 120)
    assert line.endswith("n...") == (width > 40)
    assert list_text(RunList((run,), 1), 0).endswith("  " + "n" * 500)


def test_a_long_note_is_cut_in_a_comparison_and_costs_no_id() -> None:
    """Compare two runs in 80 columns, one with a long note: it is cut; without notes ids stay whole at any width."""
    group = Group(name="A", runs=(FIRST, SECOND), verdicts=("PASS",) * 2, outcomes=("completed",) * 2, metrics={})
    compared = Comparison(groups=(group,), columns=(group,), differences=(), effects=(), conclusion="")
    long = compared_runs(replace(compared, notes={SECOND: "n" * 500}), 80).splitlines()
    assert long[1:] == [f"A      {FIRST}  completed", f"{f'A      {SECOND}  completed  ':n<77}..."]
    assert compared_runs(compared, 20).splitlines()[1] == f"A      {FIRST}  completed"


def test_runs_prune_removes_the_note_with_the_record(two: Labctl) -> None:
    """Prune a run that has a note: nothing of its record is left."""
    two("note", FIRST, "old")
    assert two("runs", "prune", "--keep", "1").code == 0
    assert [path.name for path in Path(two.directory / "runs").iterdir()] == [SECOND]
