"""Commands on a backend that labctl knows by its row in the registry only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import wait_until

from labctl import flows
from labctl.batches import search
from labctl.config.context import Context
from labctl.config.settings import BACKENDS
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import Event

DECLARED = """\
description: made up
launcher: mpirun
script: made_up.py
timeout: 1m
metrics:
  {metric}: {{pattern: '{metric}: (\\S+)', reduce: min}}
criteria: ['{metric} > 0']
rehearse: {{}}
"""
PROGRAM = """\
import os, pathlib, sys, time
if "--wait" in sys.argv:
    print("step 3/9", flush=True)
    while not pathlib.Path(sys.argv[-1]).exists():
        time.sleep(0.01)
nodes = {nodes!r}
print("{metric}:", nodes.get(os.environ["MADE_UP_NODE"], 8))
"""
TURNS = """
if os.environ["RANK"] == "0":
    for number in range(int(sys.argv[sys.argv.index("--turns") + 1])):
        for node in range(4):
            print(f"turn {number} of node {node} (n{node}): 8 TFLOP/s, lost 0.010 to others, 0.000 to its own quota")
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the made-up backend and initialise a lab of four nodes on it; return its directory."""
    monkeypatch.setitem(BACKENDS, "made-up", "support.made_up_backend")
    # Other tests use the cores of this machine.
    monkeypatch.setattr("labctl.system.load.SCRIPT", "true")
    flows.init(tmp_path)
    settings = ("LAB_NAME=demo", "LAB_ENGINE=made-up", "LAB_NODES=4", f"HOST_CACHE_PATH={tmp_path}/cache")
    (tmp_path / ".env").write_text("\n".join(settings))
    return tmp_path


@pytest.fixture
def events() -> list[Event]:
    """Return the list that collects events."""
    return []


@pytest.fixture
def context(directory: Path, events: list[Event]) -> Iterator[Context]:
    """Yield a Context of the lab; bring it down at the end."""
    made = Context(directory=directory, environ={}, emit=events.append, flags={})
    yield made
    flows.down(made)


def declare(directory: Path, name: str, metric: str = "throughput", program: str = "", **nodes: float) -> None:
    """Write a workload whose ranks print a number, 8 or as given for the node, and then run ``program``."""
    folder = directory / "workloads" / name
    folder.mkdir(exist_ok=True)
    (folder / "workload.yml").write_text(DECLARED.format(metric=metric))
    numbers = {f"worker-{node.removeprefix('n')}": number for node, number in nodes.items()}
    (folder / "made_up.py").write_text(PROGRAM.format(metric=metric, nodes=numbers) + program)


def test_a_run_is_followed_judged_and_recorded(context: Context, directory: Path, events: list[Event]) -> None:
    """Run a workload: PASS with its number, all ranks, the record and the printed lines."""
    flows.up(context)
    declare(directory, "mine")
    result = flows.run(context, "mine", RunOptions())
    assert (result.verdict, result.message) == ("PASS", "All criteria met on 4 ranks: throughput 8 (> 0 wanted).")
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(number, f"worker-{number}") for number in range(4)]
    assert flows.show(context, "latest").result == result
    lines = "\n".join(event.text for event in events if event.kind == "line").splitlines()
    assert "throughput: 8" in lines


def test_a_batch_runs_on_the_nodes_of_each_hostfile(context: Context, directory: Path) -> None:
    """Run a batch of two hostfiles: each on its nodes with its value, the log begins with the hostfile."""
    flows.up(context)
    declare(directory, "mine", n3=2)
    hostfiles = directory / "sets"
    hostfiles.mkdir()
    (hostfiles / "hostfile_first").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    (hostfiles / "hostfile_second").write_text("worker-3 slots=1\n")
    report = flows.batch(context, "mine", (hostfiles,), RunOptions(), lambda _: None, out=directory / "logs")
    assert (report.passed, report.failed) == (2, 0)
    assert {job.job: (job.nodes, job.value) for job in report.batch.jobs} == {
        "first": (("worker-0", "worker-1"), 8.0),
        "second": (("worker-3",), 2.0),
    }
    (log,) = (directory / "logs").glob("*second*")
    assert log.read_text().startswith("worker-3 slots=1\n\nlabctl: rank 0 of 1 on worker-3\n")


def test_a_slow_node_is_found_by_bisecting(context: Context, directory: Path) -> None:
    """Bisect with worker-2 slow: it alone is bad, the others are good."""
    flows.up(context)
    declare(directory, "mine", "busbw", n2=2)
    report = flows.bisect(context, "mine", RunOptions(), lambda _: None, minimum=5, out=directory / "rounds")
    assert [(bad.node, bad.kind) for bad in report.diagnosis.bad] == [("worker-2", "slow")]
    assert set(report.diagnosis.good) == {"worker-0", "worker-1", "worker-3"}
    # What a page shows later.
    assert search.read_report(directory / "rounds") == report
    notes = search.read_notes(directory / "rounds")
    assert len([note for note in notes if note.startswith("round ")]) == report.diagnosis.rounds
    assert any(note.startswith("worker-2 is slow") for note in notes)


def test_a_search_keeps_the_load_before_each_round_and_notes_a_busy_host_once(
    context: Context, directory: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bisect on a busy host: a load for each round, and one notice."""
    monkeypatch.setattr("labctl.system.load.SCRIPT", "printf 'times 0 0 0 0\\ntimes 9 11 0 0\\ncores 2\\n'")
    flows.up(context)
    declare(directory, "mine", "busbw")
    report = flows.bisect(context, "mine", RunOptions(), lambda _: None, minimum=5, out=directory / "rounds")
    assert [(load.step, load.host, load.used) for load in report.loads][:2] == [
        ("round01", "local", 0.9),
        ("round02", "local", 0.9),
    ]
    assert len(report.loads) == report.diagnosis.rounds
    busy = [event.text for event in events if "busy" in event.text]
    assert busy == ["this machine is busy: 0.9 of 2 cores in use by other programs"]


def test_the_quick_profile_validates_from_nothing_and_back(context: Context, directory: Path) -> None:
    """Validate with profile quick: PASS, all steps passed, logs in the report, the lab is down."""
    for name in ("ssh-check", "allreduce"):
        declare(directory, name, "busbw")
    declare(directory, "matmul", "tflops", TURNS)
    shutil.rmtree(directory / "workloads/opt")
    declare(directory, "opt-tiny", program='print("Loss curve: 6 steps, SHA-256 abc on X")')
    with (directory / "workloads/opt-tiny/workload.yml").open("a") as declared:
        declared.write("notes: {loss_curve: 'Loss curve: (.*)'}\n")
    report = flows.validate(context, "quick", out=directory / "report")
    assert (report.validation.verdict, report.validation.message) == ("PASS", "All 4 nodes are good.")
    assert {step.name: step.status for step in report.validation.steps} == dict.fromkeys(
        (
            *("doctor", "network", "up", "nodes", "ssh-check", "matmul", "same-losses", "allreduce"),
            *("network after", "clean-up"),
        ),
        "passed",
    )
    step = next(step for step in report.validation.steps if step.name == "ssh-check")
    page = directory / "report"
    assert (page / report.validation.runs / step.run_id / "output.log").is_file()
    assert [(page / folder).is_dir() for folder in step.logs] == [True]
    assert report.validation.hardware
    assert flows.status(context).state == "down"


def test_a_detached_run_is_looked_at(context: Context, directory: Path) -> None:
    """Launch detached: top shows step and samples, attach the verdict, then no run is active."""
    flows.up(context)
    declare(directory, "mine")
    end = directory / "end"
    run_id = flows.launch(context, "mine", RunOptions(words=("--wait", str(end)))).run_id
    wait_until(lambda: flows.top(context).progress.step == 3, 30, "the third step")
    view = flows.top(context)
    assert (view.run_id, view.state, view.progress.step, view.progress.steps) == (run_id, "running", 3, 9)
    assert [node.values["cpu"].value for node in view.nodes] == [50.0] * 4
    end.touch()
    assert flows.attach(context, run_id).verdict == "PASS"
    with pytest.raises(HostError, match="no run is under way"):
        flows.top(context)


def test_a_preview_of_a_run_names_what_this_backend_writes(context: Context, directory: Path) -> None:
    """Plan a run: the first step names the four record files."""
    declare(directory, "mine")
    (stage, *_) = flows.plan_run(context, "mine", RunOptions()).plan
    assert "job.json, settings.json, versions.json, started" in stage


def test_a_profile_without_figures_has_no_baseline(context: Context, directory: Path) -> None:
    """Record a baseline of a profile without figures: ConfigError."""
    declare(directory, "mine")
    (directory / "mine.yml").write_text("description: mine\nchecks: [{workload: mine}]\n")
    with pytest.raises(ConfigError, match="profile mine has no figure to record"):
        flows.baseline(context, str(directory / "mine.yml"))
