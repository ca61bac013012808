"""compare, report, export, freeze, verify, replay and `run --repeat`, on fictitious records and runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import records
from support.commandline import Labctl

from labctl import flows
from labctl.backends.docker.backend import DockerBackend
from labctl.cli.browser import open_page
from labctl.cli.results import differences, logged_text
from labctl.model import Result
from labctl.runs.compare import Comparison, Difference, Group
from labctl.runs.export import mlflow
from labctl.runs.export.mlflow import LoggedRun

FAST, SLOW = "20261125-203600-opt-tiny-0d07", "20261125-203700-opt-tiny-1e18"


@pytest.fixture
def two(labctl: Labctl) -> Labctl:
    """Write two runs with different --micro-batch to the lab; return its labctl."""
    for run_id, figure, micro in ((FAST, 24.8, "4"), (SLOW, 11.2, "1")):
        losses = [8 - step / 25 for step in range(50)]
        records.write(
            labctl.directory,
            run_id,
            throughput=figure,
            losses=losses,
            arguments=("--micro-batch", micro),
            log="the log\n",
        )
    return labctl


def test_compare_says_what_differs_and_what_it_did(two: Labctl) -> None:
    """Compare two runs: settings, metrics and effects, and that one run each is too few."""
    answer = two("compare", FAST, SLOW)
    assert answer.code == 0
    expected = f"""\
GROUP  RUN                            VERDICT
A      {FAST}  completed
B      {SLOW}  completed

DIFFERS        A  B
--micro-batch  4  1

METRIC                  A     B
loss at the end         6.04  6.04 (+0 %)
throughput (samples/s)  24.8  11.2 (-54.8 %)

1 run each is too few to tell (needs 3 or more): `labctl run opt-tiny --repeat 5`
"""
    assert answer.out == expected


def test_compare_of_two_runs_with_the_same_settings_says_that_they_are_too_few(labctl: Labctl) -> None:
    """Compare two runs with the same settings: the change without a judgement."""
    for run_id, figure in ((FAST, 24.0), (SLOW, 18.0)):
        records.write(labctl.directory, run_id, throughput=figure)
    expected = f"""\
GROUP  RUN                            VERDICT
A      {FAST}  completed
A      {SLOW}  completed

nothing that was recorded differs

METRIC                  A1  A2
throughput (samples/s)  24  18 (-25 %)

throughput of {SLOW}: same settings; 25 % slower

2 runs are too few to tell (needs 3 or more): `labctl run opt-tiny --repeat 5`
"""
    assert labctl("compare", FAST, SLOW).out == expected


def test_compare_shows_a_loss_that_ended_as_nan(labctl: Labctl) -> None:
    """Compare a run with one whose loss became nan: nan is in its column."""
    records.write(labctl.directory, FAST, losses=(8.0, 4.0))
    records.write(labctl.directory, SLOW, metrics={"loss": {"first": 8.0, "last": None, "note": "nan"}})
    assert "\nMETRIC           A1  A2\nloss at the end  4   nan\n" in labctl("compare", FAST, SLOW).out
    columns = labctl("compare", FAST, SLOW, "--json").document["columns"]
    assert [column["metrics"]["loss"]["mean"] for column in columns] == [4.0, None]
    assert columns[1]["metrics"]["loss"]["non_finite"] == ["nan"]


def test_show_has_the_command_that_repeats_a_run(labctl: Labctl) -> None:
    """Show a run that was requested with options, and one whose request is not recorded: the first has its command."""
    request = {"workload": "opt-tiny", "options": {"words": ["--token", "hidden"], "rehearse": True}}
    for run_id, requested in ((FAST, request), (SLOW, None)):
        records.write(labctl.directory, run_id, throughput=24.0, request=requested)
    command = "labctl run opt-tiny --rehearse -- --token '[REDACTED]'"
    assert labctl("show", FAST).out.splitlines()[1] == f"command    {command}"
    assert [labctl("show", run_id, "--json").document["command"] for run_id in (FAST, SLOW)] == [command, ""]
    assert "\ncommand " not in labctl("show", SLOW).out


def test_values_that_differ_are_cut_to_the_width_of_the_terminal() -> None:
    """Render a difference of long values: at most 60 characters each, in 60 columns fewer."""
    compared = Comparison(
        groups=tuple(Group(name=name, runs=(), verdicts=(), outcomes=(), metrics={}) for name in "AB"),
        columns=(),
        differences=(Difference(what="script", values={"A": "a" * 99, "B": "b" * 99}),),
        effects=(),
        conclusion="",
    )
    assert f"script   {'a' * 57}...  {'b' * 57}..." in differences(compared)
    assert max(map(len, differences(compared, 60).splitlines())) in range(55, 61)


def five(labctl: Labctl, figures: Sequence[float], micros: str) -> list[str]:
    """Write five runs, each with its figure and micro batch; return their ids."""
    run_ids = [f"20261125-20360{number}-opt-tiny-0d07" for number in range(5)]
    for run_id, figure, micro in zip(run_ids, figures, micros, strict=True):
        records.write(labctl.directory, run_id, throughput=figure, arguments=("--micro-batch", micro))
    return run_ids


def test_compare_of_five_runs_with_the_same_settings_says_whether_one_differs_more_than_usual(labctl: Labctl) -> None:
    """Compare five runs with the same settings: the one that is slower than usual is named."""
    run_ids = five(labctl, (24.8, 24.9, 18.6, 24.7, 25.0), "44444")
    out = labctl("compare", *run_ids).out
    assert "throughput (samples/s)  23.6  5     18.6 to 25  11.9 %" in out
    assert f"throughput of {run_ids[2]}: same settings; 25.2 % slower, more than the usual 3.3 %" in out
    assert "usual: 99 % of runs with the same settings are no further apart" in out


def test_compare_of_five_runs_with_two_settings_compares_their_means(labctl: Labctl) -> None:
    """Compare five runs of two settings: means of both, and the effect against the usual spread."""
    out = labctl("compare", *five(labctl, (24.8, 24.9, 24.7, 11.2, 11.3), "44411")).out
    assert "--micro-batch  4  1" in out
    assert "throughput (samples/s)  24.8, mean of 3  11.25, mean of 2 (-54.6 %)" in out
    assert "B against A\n  throughput: 54.6 % slower, more than the usual 3.6 %" in out


def test_compare_as_json_has_groups_columns_differences_and_effects(two: Labctl) -> None:
    """Compare with --json: groups, differences, columns and effects."""
    document = two("compare", FAST, SLOW, "--json").document
    assert [group["runs"] for group in document["groups"]] == [[FAST], [SLOW]]
    assert document["differences"] == [{"what": "--micro-batch", "values": {"A": "4", "B": "1"}}]
    figures = [column["metrics"]["throughput"] for column in document["columns"]]
    assert [(figure["mean"], figure["change"]) for figure in figures] == [
        (24.8, None),
        (11.2, pytest.approx(-0.548, abs=1e-3)),
    ]
    throughput = next(effect for effect in document["effects"] if effect["metric"] == "throughput")
    assert (throughput["group"], throughput["against"], throughput["verdict"]) == ("B", "A", None)
    assert document["conclusion"].startswith("1 run each is too few to tell")


def test_compare_of_one_metric_is_of_that_alone(two: Labctl) -> None:
    """Compare with --metric: the other metrics are not shown, what differs is."""
    out = two("compare", FAST, SLOW, "--metric", "throughput").out
    assert "--micro-batch  4  1" in out
    assert "throughput (samples/s)  24.8  11.2 (-54.8 %)" in out
    assert "loss" not in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((FAST, SLOW, "--metric", "speed"), "no metric `speed` in these runs"),
        ((FAST, SLOW, "--metric", "speed"), "they have loss, throughput"),
        ((FAST,), "name two runs or more"),
        ((FAST, FAST), "name two runs or more"),
        ((FAST, "nope"), "no run `nope`"),
    ],
)
def test_compare_refuses_what_it_cannot_compare(two: Labctl, given: tuple[str, ...], message: str) -> None:
    """Compare fewer than two known runs: exit code 2 with the reason."""
    answer = two("compare", *given)
    assert (answer.code, message in answer.err) == (2, True)


def test_report_writes_the_page_and_says_where(two: Labctl) -> None:
    """Run report for one and two runs: the page is written and named, --out sets its folder."""
    answer = two("report", FAST, "--json")
    page = two.directory / f"reports/{FAST}/report.html"
    assert answer.document["page"] == str(page)
    assert "the log" in page.read_text(encoding="utf-8")
    assert two("report", FAST, SLOW, "--out", "both").code == 0
    assert "2 runs compared" in (two.directory / "both/report.html").read_text(encoding="utf-8")


def test_report_prints_the_path_of_the_page_and_nothing_else(two: Labctl) -> None:
    """Run report: one line, the page's path."""
    assert two("report", FAST).out == f"{two.directory}/reports/{FAST}/report.html\n"


def test_report_open_opens_the_page_in_a_browser(two: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run report --open with a display: the browser gets the page's address, and no advice is printed."""
    opened: list[str] = []

    def browse(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", browse)
    answer = two("report", FAST, "--open")
    assert opened == [f"file://{two.directory}/reports/{FAST}/report.html"]
    assert (answer.code, "scp" in answer.err) == (0, False)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"SSH_CONNECTION": "10.0.0.9 51000 10.0.0.5 22", "SUDO_USER": "ann"}, "ann@10.0.0.5"),
        ({"SSH_CONNECTION": "2001:db8::9 51000 2001:db8::5 22", "SUDO_USER": "ann"}, "ann@[2001:db8::5]"),
        ({}, "@HOST"),
    ],
)
def test_a_page_without_a_browser_comes_with_the_command_that_copies_it(environ: dict[str, str], address: str) -> None:
    """Open a page without a display: scp from the address that ssh came to, or from HOST."""
    advice = open_page(Path("/lab/reports/a b/report.html"), environ)
    assert f"{address}:/lab/reports/a b' ." in advice
    assert advice.startswith("no browser on this machine; on yours: scp -r ")


def test_a_user_without_a_name_has_the_command_that_copies_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a page as a user that no name belongs to: USER stands for it."""

    def unnamed() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", unnamed)
    assert open_page(Path("/lab/r/report.html"), {}).endswith(" scp -r USER@HOST:/lab/r .")


def test_report_refuses_a_csv_that_there_is_not(two: Labctl) -> None:
    """Run report with a missing CSV: exit code 2 names it."""
    answer = two("report", "metrics.csv")
    assert (answer.code, "metrics.csv: no such file" in answer.err) == (2, True)


def test_export_writes_what_is_asked_for(two: Labctl) -> None:
    """Run export with --csv, --tensorboard and --junit: all files are written and printed."""
    answer = two("export", FAST, "--csv", "run.csv", "--tensorboard", "tb", "--junit", "run.xml")
    csv, events, junit = answer.out.splitlines()
    assert answer.code == 0
    assert csv == f"{two.directory}/run.csv"
    assert (two.directory / "run.csv").read_bytes().startswith(b"step,seconds,loss\r\n1,1.0,8.0\r\n")
    assert events.startswith(f"{two.directory}/tb/{FAST}/events.out.tfevents.")
    assert junit == f"{two.directory}/run.xml"
    assert FAST in (two.directory / "run.xml").read_text(encoding="utf-8")


def test_export_of_nothing_is_refused(two: Labctl) -> None:
    """Run export without a format: exit code 2 and the options."""
    answer = two("export", FAST)
    assert (answer.code, "no format is given" in answer.err, "--csv run.csv" in answer.err) == (2, True, True)


@pytest.mark.parametrize("option", ["--csv", "--junit"])
def test_export_to_a_directory_is_refused_and_names_a_file(two: Labctl, option: str) -> None:
    """Run export with a directory in place of a file: exit code 2, a file in it as hint, nothing written."""
    answer = two("export", FAST, option, "runs", "--tensorboard", "tb")
    assert (answer.code, f"{option} runs: is a directory" in answer.err) == (2, True)
    assert f"name a file: {option} runs/{FAST}." in answer.err
    assert not (two.directory / "tb").exists()


def test_export_to_a_path_that_cannot_be_written_says_why(two: Labctl) -> None:
    """Run export --csv below a file: exit code 3 and the path."""
    answer = two("export", FAST, "--csv", ".env/run.csv")
    assert (answer.code, f"{two.directory}/.env: File exists" in answer.err) == (3, True)


def test_export_of_a_run_without_samples_writes_no_table(two: Labctl) -> None:
    """Run export --csv of a run that printed no metric: exit code 2, no file."""
    (two.directory / "runs" / FAST / "metrics.jsonl").write_text("")
    answer = two("export", FAST, "--csv", "run.csv")
    assert (answer.code, f"run {FAST} has no metrics" in answer.err) == (2, True)
    assert not (two.directory / "run.csv").exists()


def test_export_to_mlflow_needs_its_address_and_its_client(two: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run export --mlflow without MLFLOW_TRACKING_URI, then without MLflow: each says what to type; nothing written."""
    monkeypatch.setattr("labctl.cli.results.MLFLOW", {})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    answer = two("export", FAST, "--mlflow", "--csv", "run.csv")
    assert (answer.code, "MLFLOW_TRACKING_URI is not set" in answer.err) == (2, True)
    assert "export MLFLOW_TRACKING_URI=http://HOST:5000" in answer.err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    answer = two("export", FAST, "--mlflow", "--csv", "run.csv")
    assert (answer.code, "cannot import MLflow" in answer.err) == (2, True)
    assert "pipx inject labctl-train mlflow-skinny" in answer.err
    assert not (two.directory / "run.csv").exists()


def test_export_to_mlflow_tells_the_page_and_what_was_left_out(two: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run export --mlflow where all goes well but for the output: its page on stdout, the file on stderr; as JSON."""
    page, left = "http://h:5000/#/experiments/1/runs/m1", "output.log: 20 MB, more than 10 MB"
    logged = LoggedRun(run_id="m1", experiment="opt-tiny", url=page, is_new=True, left_out=(left,))
    monkeypatch.setattr("labctl.cli.results.MLFLOW", {})
    monkeypatch.setattr(mlflow, "connect", lambda _: True)
    monkeypatch.setattr(mlflow, "log", lambda *_: logged)
    answer = two("export", FAST, "--mlflow", "--csv", "run.csv")
    assert (answer.code, answer.out.splitlines()) == (0, [f"{two.directory}/run.csv", page])
    assert f"not logged to MLflow: {left}" in answer.err
    document = two("export", FAST, "--mlflow", "--json").document["mlflow"]
    assert (document["url"], document["left_out"]) == (page, [left])


@pytest.mark.parametrize(
    ("url", "is_new", "text"),
    [
        ("http://h/x", True, "http://h/x"),
        ("", True, "MLflow experiment opt-tiny, run m1"),
        ("http://h/x", False, "http://h/x (already logged; tags updated)"),
    ],
)
def test_a_logged_run_is_named_by_its_page_or_its_experiment(url: str, is_new: bool, text: str) -> None:
    """Render a logged run with a page, without one, and one that was there."""
    assert [*logged_text(LoggedRun(run_id="m1", experiment="opt-tiny", url=url, is_new=is_new))] == [text]


def result(number: int, **changes: Any) -> Result:
    """Return a passed result with throughput 10 + number; ``changes`` replace fields."""
    passed = {"verdict": "PASS", "cause": None, "message": "", "exit_code": 0} | changes
    metrics: dict[str, dict[str, float | int | str | None]] = {
        "throughput": {"value": 10.0 + number, "unit": "samples/s"}
    }
    return Result(run_id=f"r{number}", workload="hello", launcher="deepspeed", lab="demo", metrics=metrics, **passed)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Make flows.run return the results of a list in order; return the list, which the test fills."""
    waiting: list[Result] = []
    monkeypatch.setattr(flows, "run", lambda *_: waiting.pop(0))
    return waiting


def test_repeat_prints_the_mean_the_spread_and_whether_a_run_differs_more_than_usual(
    labctl: Labctl, ends: list[Result]
) -> None:
    """Run --repeat 3: mean, range, spread, and the run that differs."""
    ends += map(result, range(3))
    answer = labctl("run", "hello", "--repeat", "3")
    assert (answer.code, ends) == (0, [])
    assert answer.out.endswith("""
METRIC                  MEAN  RUNS  RANGE     SPREAD
throughput (samples/s)  11    3     10 to 12  9.1 %

throughput of r2: same settings; 14.3 % faster; runs with the same settings spread too much to tell

3 runs are too few to tell: `labctl run hello --repeat 5`
""")


def test_repeats_whose_metric_is_nan_are_told(labctl: Labctl, ends: list[Result]) -> None:
    """Run --repeat 2 and two metrics, one nan in one run, the other in both: no mean hides it."""
    odd = {"value": None, "note": "inf"}
    for loss in ({"value": 2.5}, {"value": None, "note": "nan"}):
        ends += [replace(result(1), metrics={"loss": loss, "grad": odd})]
    assert labctl("run", "hello", "--repeat", "2").out.endswith("""
METRIC  MEAN  RUNS  RANGE              SPREAD
loss    2.5   1     2.5, nan in 1 run  -
grad    inf   2     -                  -
""")


def test_the_spread_of_two_repeats_is_not_called_usual(labctl: Labctl, ends: list[Result]) -> None:
    """Run --repeat 2: no spread, and the difference is not judged."""
    ends += map(result, range(2))
    assert labctl("run", "hello", "--repeat", "2").out.endswith("""
METRIC                  MEAN  RUNS  RANGE     SPREAD
throughput (samples/s)  10.5  2     10 to 11  -

throughput of r1: same settings; 10 % faster

2 runs are too few to tell (needs 3 or more): `labctl run hello --repeat 5`
""")


def test_repeat_as_json_is_one_document_with_the_runs_and_the_spread(labctl: Labctl, ends: list[Result]) -> None:
    """Run --repeat 2 --json: one document with runs, spread and effects."""
    ends += map(result, range(2))
    document = labctl("run", "hello", "--repeat", "2", "--json").document
    assert [run["run_id"] for run in document["runs"]] == ["r0", "r1"]
    assert (document["spread"]["throughput"]["median"], document["spread"]["throughput"]["mean"]) == (10.5, 10.5)
    assert (document["effects"][0]["run"], document["effects"][0]["verdict"]) == ("r1", None)


FAIL = {"verdict": "FAIL", "cause": "criteria", "exit_code": 5}
ERROR = {"verdict": "ERROR", "cause": "rank-crashed", "exit_code": 4}


def test_repeat_exits_as_the_worst_of_its_runs_and_runs_them_all(labctl: Labctl, ends: list[Result]) -> None:
    """Repeat three runs, two failed: all run, exit code 4 of the worst."""
    ends += [result(0, **FAIL), result(1, **ERROR), result(2)]
    assert labctl("run", "hello", "--repeat", "3").code == 4
    assert ends == []


def test_repeat_ends_with_a_run_that_was_stopped(labctl: Labctl, ends: list[Result]) -> None:
    """Repeat with an interrupted run: no other starts, exit code 130."""
    ends += [result(0, verdict="ERROR", cause="interrupted", exit_code=130), result(1)]
    assert labctl("run", "hello", "--repeat", "2").code == 130
    assert len(ends) == 1


@pytest.mark.parametrize("flag", [("--detach",), ("--resume", "latest")], ids=lambda flag: flag[0])
def test_repeat_is_refused_of_what_cannot_be_repeated(labctl: Labctl, ends: list[Result], flag: tuple[str]) -> None:
    """Run --repeat with --detach or --resume: exit code 2."""
    answer = labctl("run", "hello", "--repeat", "2", *flag)
    assert (answer.code, "each from its beginning" in answer.err) == (2, True)


# --- freeze, verify, replay ----------------------------------------------------------------------------------


@pytest.fixture
def frozen(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make DockerBackend.freeze return a planted state; return it, for tests to change."""
    now: dict[str, Any] = {
        "schema": 1,
        "files": {"workloads/opt/train.py": "3333"},
        "nodes": {"worker-1": {"image": "a"}},
    }
    monkeypatch.setattr(DockerBackend, "freeze", lambda _: now)
    return now


def test_verify_of_what_was_frozen_says_in_one_line_that_all_is_as_it_was(labctl: Labctl, frozen: Any) -> None:
    """Freeze twice and verify: the number of facts, and exit code 0."""
    assert labctl("freeze").out == f"wrote {labctl.directory}/lab.lock: 3 facts\n"
    assert labctl("freeze").out == f"{labctl.directory}/lab.lock is unchanged: 3 facts\n"
    answer = labctl("verify")
    assert (answer.code, answer.out) == (0, f"the lab is as frozen in {labctl.directory}/lab.lock: 3 facts\n")


def test_verify_names_each_drift_and_where_it_is_and_exits_5(labctl: Labctl, frozen: dict[str, Any]) -> None:
    """Change the state after freeze: verify prints each difference, exit code 5."""
    labctl("freeze", "--out", str(labctl.directory / "before"))
    frozen["nodes"]["worker-1"]["image"] = "b"
    del frozen["files"]["workloads/opt/train.py"]
    answer = labctl("verify", str(labctl.directory / "before"))
    assert answer.code == 5
    assert [line.split() for line in answer.out.splitlines()] == [
        ["WHAT", "WHERE", "WAS", "IS"],
        ["files", "workloads/opt/train.py", "lab", "3333", "-"],
        ["image", "worker-1", "a", "b"],
    ]
    document = labctl("verify", str(labctl.directory / "before"), "--json").document
    assert document["drift"][1] == {"what": "image", "where": "worker-1", "was": "a", "now": "b"}


def test_verify_without_a_file_says_what_writes_it(labctl: Labctl, frozen: Any) -> None:
    """Verify without a lock file: exit code 2 names labctl freeze."""
    answer = labctl("verify")
    assert (answer.code, "labctl freeze writes it" in answer.err) == (2, True)


def test_replay_exits_as_its_run_and_says_how_to_compare(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay a run that fails: exit code 5, and the command to compare."""
    monkeypatch.setattr(flows, "replay", lambda *_, **__: result(1, **FAIL, replays="r0"))
    answer = labctl("replay", "r0")
    assert answer.code == 5
    assert "replays    r0" in answer.out
    assert "next: labctl compare r0 r1" in answer.out
