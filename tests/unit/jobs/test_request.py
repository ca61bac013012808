"""The options of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import workload

from labctl.errors import ConfigError
from labctl.jobs import request
from labctl.model import Criterion, Metric, Relative, Workload
from labctl.records import store
from labctl.system import filelock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write hello.py with --learning-rate and --steps; return its folder."""
    (tmp_path / "hello.py").write_text(
        "import argparse\n"
        "add = argparse.ArgumentParser().add_argument\n"
        'add("--learning-rate", type=float)\nadd("--steps", type=int)\n'
    )
    return tmp_path


def warned(folder: Path, *keys: str, script: str = "hello.py") -> list[str]:
    """Return the warnings about these keys of --set."""
    options = request.RunOptions(arguments=tuple((key, "1") for key in keys))
    return list(request.unknown(replace(workload(), directory=folder, script=script), options))


def test_a_key_that_no_script_takes_is_named_with_the_nearest(folder: Path) -> None:
    """Set a misspelt key: one warning with the nearest option."""
    (warning,) = warned(folder, "lerning-rate", "steps", "deepspeed.zero_optimization.stage")
    assert warning.startswith("--set lerning-rate: no script of hello has an option `--lerning-rate`")
    assert warning.endswith("; did you mean `learning-rate`?")


def test_scripts_below_are_read_and_what_cannot_be_read_is_none(folder: Path) -> None:
    """Set an option of a script below: no warning, and a broken link is skipped."""
    (folder / "part").mkdir()
    (folder / "part/more.py").write_text('add("--epochs")\n')
    (folder / ".#hello.py").symlink_to("someone@somewhere.1234")
    assert warned(folder, "epochs") == []


def test_a_pipe_that_is_named_as_a_script_is_not_waited_for(folder: Path) -> None:
    """Put a FIFO named as a script into the folder: it is not waited for."""
    os.mkfifo(folder / "pipe.py")
    assert warned(folder, "steps") == []


def test_a_script_that_a_container_made_huge_is_passed_over(folder: Path) -> None:
    """Put a script of 1 TiB into the folder: it is skipped."""
    (folder / "huge.py").touch()
    os.truncate(folder / "huge.py", 1 << 40)
    assert warned(folder, "steps") == []


def test_a_key_may_be_the_beginning_of_an_option(folder: Path) -> None:
    """Set the beginning of an option: no warning."""
    assert warned(folder, "learn") == []


def test_what_a_script_elsewhere_takes_is_not_known(folder: Path, tmp_path: Path) -> None:
    """Set keys of a script elsewhere, or of one without options: no warning."""
    assert warned(folder, "lerning-rate", script=str(tmp_path / "own.py")) == []
    (folder / "hello.py").write_text("print(1)")
    assert warned(folder, "lerning-rate") == []


# --- going on from a run -------------------------------------------------------------------------------------


def ran(lab: Path, run_id: str, options: request.RunOptions, **changes: object) -> None:
    """Write the record of an ended run of `hello` with these options; ``changes`` go to its job.json."""
    path = lab / "runs" / run_id
    path.mkdir(parents=True)
    (path / "result.json").write_text("{}")
    recorded = request.recorded(workload(), options)
    (path / "job.json").write_text(json.dumps({"workload": "hello", "request": recorded, **changes}))


def test_a_run_is_started_again_with_the_options_of_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume a run: workload and all options of its record, paths absolute, no retries."""
    monkeypatch.chdir(tmp_path)
    options = request.RunOptions(
        arguments=(("steps", "9"), ("fast", None)),
        words=("-x",),
        expect=(Criterion(metric="loss", max=2.0), Criterion(metric="m", relative=Relative(">=", -0.05, "latest"))),
        timeout=90.0,
        launcher="mpirun",
        launcher_arguments=("--map-by", "node"),
        deepspeed_config=Path("ds.json"),
        hostfile=tmp_path / "nodes",
        rehearse=True,
        retries=3,
    )
    ran(tmp_path, "r1", options)
    again = request.resumed(tmp_path, "", request.RunOptions(resume="latest"))
    kept = replace(options, deepspeed_config=tmp_path / "ds.json", retries=0, resume="r1")
    assert again == ("hello", kept)


def test_what_is_given_now_comes_on_top(tmp_path: Path) -> None:
    """Resume with new options: they replace those of the record, the rest stays."""
    before = request.RunOptions(arguments=(("steps", "9"), ("seed", "1")), timeout=90.0, include="worker-0")
    ran(tmp_path, "r1", before)
    now = request.RunOptions(resume="r1", arguments=(("steps", "20"),), exclude="worker-1", detach=True)
    _, options = request.resumed(tmp_path, "hello", now)
    assert options.arguments == (("steps", "20"), ("seed", "1"))
    assert (options.timeout, options.include, options.exclude, options.detach) == (90.0, "", "worker-1", True)


def refused(lab: Path, run_id: str, name: str = "") -> ConfigError:
    """Return the ConfigError that resuming the run raises."""
    with pytest.raises(ConfigError) as caught:
        request.resumed(lab, name, request.RunOptions(resume=run_id))
    return caught.value


def test_a_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    """Resume a misspelt run id: the hint names the nearest."""
    ran(tmp_path, "20260102-150405-hello-3fa2", request.RunOptions())
    error = refused(tmp_path, "20260102-150405-hello-3fa3")
    assert (error.message.startswith("no run `"), error.hint) == (True, "did you mean `20260102-150405-hello-3fa2`?")


def test_a_run_of_another_workload_is_refused(tmp_path: Path) -> None:
    """Resume a run of another workload: ConfigError names both."""
    ran(tmp_path, "r1", request.RunOptions())
    assert refused(tmp_path, "r1", "opt-tiny").message == "run r1 ran `hello`, not `opt-tiny`"


def test_a_run_that_is_under_way_is_refused(tmp_path: Path) -> None:
    """Resume a running run: ConfigError."""
    ran(tmp_path, "r1", request.RunOptions())
    (tmp_path / "runs/r1/result.json").unlink()
    with filelock.held(store.lock(tmp_path, "r1"), "run r1"):
        assert refused(tmp_path, "r1").message == "run r1 is still running"


@pytest.mark.parametrize(
    "recorded", [None, {}, {"workload": "hello", "options": {"timeout": "x"}}, {"workload": 3, "options": {}}]
)
def test_a_record_without_its_options_is_refused(tmp_path: Path, recorded: Any) -> None:
    """Resume a record of an earlier labctl, without its options, and with others: ConfigError."""
    ran(tmp_path, "r1", request.RunOptions(), request=recorded)
    assert "has no record of its options" in refused(tmp_path, "r1").message


@pytest.mark.parametrize(
    ("given", "remaining"),
    [
        ({}, {"exclude": "worker-1"}),
        ({"exclude": "worker-2,worker-3"}, {"exclude": "worker-2@worker-3@worker-1"}),
        ({"exclude": "worker-0:0,2"}, {"exclude": "worker-0:0,2@worker-1"}),
        ({"include": "worker-0@worker-1:0,2"}, {"include": "worker-0"}),
        ({"include": "worker-0,worker-1,worker-2"}, {"include": "worker-0@worker-2"}),
    ],
)
def test_a_node_that_is_lost_is_left_out(given: dict[str, Any], remaining: dict[str, Any]) -> None:
    """Leave out worker-1: it is excluded, or taken from the included nodes."""
    assert request.without(request.RunOptions(**given), ("worker-1",)) == request.RunOptions(**remaining)


# --- relative criteria ---------------------------------------------------------------------------------------


def judged(
    lab: Path, run_id: str, verdict: str = "PASS", name: str = "hello", **metrics: dict[str, float | None]
) -> None:
    """Write the record of a run with this verdict and these metrics."""
    path = lab / "runs" / run_id
    path.mkdir(parents=True)
    fields = {"run_id": run_id, "workload": name, "launcher": "mpirun", "lab": "demo", "cause": None, "message": "."}
    (path / "result.json").write_text(json.dumps({**fields, "verdict": verdict, "exit_code": 0, "metrics": metrics}))


def expecting(run: str, share: float = -0.05, metric: str = "speed") -> Workload:
    """Return a workload with one relative criterion against this run."""
    return workload(criteria=(Criterion(metric=metric, relative=Relative(">=", share, run)),))


@pytest.mark.parametrize(
    ("metric", "share", "bound"),
    [
        ({"value": 200.0}, -0.05, 190.0),
        ({"first": 8.0, "last": 4.0}, 0.25, 5.0),
        ({"value": -2.0}, -0.5, -3.0),
        ({"value": 0}, -0.05, 0),
    ],
)
def test_a_relative_criterion_gets_its_number_from_its_run(
    tmp_path: Path, metric: dict[str, float | None], share: float, bound: float
) -> None:
    """Bound a relative criterion: min is its share above or below the run's number."""
    judged(tmp_path, "r1", speed=metric)
    (criterion,) = request.bounded(tmp_path, expecting("r1", share)).criteria
    assert criterion == Criterion(metric="speed", min=bound, relative=Relative(">=", share, "r1"))


def test_latest_is_the_latest_run_of_the_workload_that_passed(tmp_path: Path) -> None:
    """Bound by "latest": the latest run of the workload with verdict PASS; bounded again it stays."""
    judged(tmp_path, "r1", speed={"value": 100.0})
    judged(tmp_path, "r2", speed={"value": 200.0})
    judged(tmp_path, "r3", "FAIL", speed={"value": 1.0})
    judged(tmp_path, "r4", name="other", speed={"value": 1.0})
    ran(tmp_path, "r5", request.RunOptions())
    bounded = request.bounded(tmp_path, expecting("latest"))
    assert bounded.criteria == (Criterion(metric="speed", min=190, relative=Relative(">=", -0.05, "r2")),)
    judged(tmp_path, "r6", speed={"value": 300.0})
    assert request.bounded(tmp_path, bounded) == bounded, "the bound moved with a run of the same batch"


@pytest.mark.parametrize(
    ("run", "metric", "reason"),
    [
        ("r9", "speed", "no run `r9`"),
        ("r1", "loss", "run r1 has no `loss`"),
        ("r1", "odd", "run r1 has no `odd`"),
        ("r2", "speed", "run r2 has no `speed`"),
        ("latest", "speed", "no run of hello has passed yet"),
    ],
)
def test_a_run_that_has_not_the_number_is_refused(tmp_path: Path, run: str, metric: str, reason: str) -> None:
    """Bound by a run without the number: ConfigError with the reason."""
    judged(tmp_path, "r1", "FAIL", speed={"value": 1.0}, odd={"value": None})
    ran(tmp_path, "r2", request.RunOptions())
    with pytest.raises(ConfigError, match=reason):
        request.bounded(tmp_path, expecting(run, metric=metric))


# --- metrics -------------------------------------------------------------------------------------------------


def expecting_all(of: Workload, *names: str, is_program: bool = False, metrics: tuple[Metric, ...] = ()) -> Workload:
    """Return the workload with criteria of these names and metrics of the command line."""
    criteria = tuple(Criterion(metric=name, max=1) for name in names)
    return request.with_metrics(of, request.RunOptions(expect=criteria, metrics=metrics), is_program=is_program)


SPEED = Metric(name="speed", pattern="speed (.*)")


@pytest.mark.parametrize(
    ("declared", "names", "how"),
    [((), (), "all"), ((), ("loss",), "all"), ((SPEED,), ("speed",), "none"), ((SPEED,), ("speed", "loss"), "asked")],
)
def test_undeclared_metrics_are_found_if_none_is_declared_or_a_criterion_asks_for_one(
    declared: tuple[Metric, ...], names: tuple[str, ...], how: str
) -> None:
    """Ask for metrics: "all" without declared ones, "asked" if a criterion needs another, else "none"."""
    chosen = expecting_all(workload(metrics=declared), *names)
    assert chosen.known_metrics == how
    assert [criterion.metric for criterion in chosen.criteria] == [*names]


def test_a_criterion_has_the_name_that_its_metric_is_found_by() -> None:
    """Name metrics by other spellings: the criteria have the names under which they are found."""
    chosen = expecting_all(workload(), "acc", "Valid.Loss", "My.Score", is_program=True)
    assert [criterion.metric for criterion in chosen.criteria] == ["accuracy", "val_loss", "my.score"]


def test_a_workload_has_only_metrics_that_it_declares_or_programs_print_in_known_ways() -> None:
    """Ask for an unknown metric: ConfigError, the hint shows how to declare it."""
    with pytest.raises(ConfigError, match="hello has no metric `bleu`") as caught:
        expecting_all(workload(metrics=(SPEED,)), "bleu")
    assert caught.value.hint == "it has speed; declare it in its workload.yml, or by `labctl run --metric 'bleu=REGEX'`"
    with pytest.raises(ConfigError, match="hello has no metric `bleu`"):
        expecting_all(workload(), "bleu")


def test_a_workload_without_metrics_may_have_criteria_on_those_that_programs_print_in_known_ways() -> None:
    """Declare criteria without metrics: known ones by the names of the output; another is refused."""
    known = workload(criteria=(Criterion(metric="Valid.Loss", max=1),))
    assert [criterion.metric for criterion in expecting_all(known).criteria] == ["val_loss"]
    with pytest.raises(ConfigError, match="hello has no metric `bleu`"):
        expecting_all(workload(criteria=(Criterion(metric="bleu", max=1),)))


def test_a_metric_of_the_command_line_is_added_or_replaces_the_one_of_its_name() -> None:
    """Give --metric: it replaces the declared one of its name, others are added."""
    bleu, speed = Metric(name="bleu", pattern="b (.*)"), Metric(name="speed", pattern="s (.*)")
    chosen = expecting_all(workload(metrics=(SPEED,)), "bleu", metrics=(bleu, speed))
    assert (chosen.metrics, chosen.known_metrics) == ((speed, bleu), "none")
    assert expecting_all(workload(), "bleu", metrics=(bleu,)).known_metrics == "all"


def test_a_criterion_that_is_relative_to_a_run_finds_its_loss_by_another_name(tmp_path: Path) -> None:
    """Bound `loss` by a run that recorded train_loss: its number is used."""
    judged(tmp_path, "r1", train_loss={"value": 2.0})
    (criterion,) = request.bounded(tmp_path, expecting("r1", 0.5, metric="loss")).criteria
    assert criterion.min == 3.0
