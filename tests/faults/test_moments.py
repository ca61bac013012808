"""labctl or a node is killed at some moment of a run: `runs`, `status` and `doctor` right afterwards and at the end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import FreshLab
from support.harness import Lab, Running, wait_until

pytestmark = pytest.mark.docker

# Seconds that a run goes on without labctl, and the time limit of a run's end.
PATIENCE, ENDING = 10, 120
# Print steps until stopped, and then take a while to end, or end at the last step.
STEPS = """
import os, signal, sys, time

def end(*_):
    open(os.environ["LABCTL_RUN_DIR"] + "/told", "w").close()
    time.sleep(3)
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
for step in range(int(sys.argv[1])):
    print(f"step {step} of rank {os.environ['RANK']}", flush=True)
    time.sleep(0.1)
"""
LONG = "6000"


@pytest.fixture
def lab(lend: FreshLab) -> Iterator[Lab]:
    """Yield a lab of two nodes, up; then stop its runs, bring it up, and assert that doctor finds no error."""
    lent = lend(LAB_RUN_PATIENCE=str(PATIENCE))
    (lent.path / "steps.py").write_text(STEPS)
    yield lent
    for run_id, run in runs(lent).items():
        if run["state"] != "done":
            lent.call("stop", run_id, "--grace", "0")
    lent.ensure_up()
    assert looks(lent) == ("up", [])
    assert {run["state"] for run in runs(lent).values()} <= {"done"}


def runs(lab: Lab) -> dict[str, dict[str, Any]]:
    """Return run id -> entry of `runs --json`."""
    return {run["run_id"]: run for run in lab.call("runs", "--json").expect(0).json["runs"]}


def looks(lab: Lab) -> tuple[str, list[str]]:
    """Return the lab's state and doctor's sorted error codes; assert that `status` and `runs` agree on runs."""
    before = runs(lab)
    status = lab.call("status", "--json").expect(0).json
    after = runs(lab)
    for run in status["runs"]:
        states = before[run["run_id"]]["state"], after[run["run_id"]]["state"]
        # A run may begin and end between these requests; `status` does not judge an ended run.
        between = {"waiting": ("running", "ended"), "running": ("ended",)}.get(states[0], ())
        assert run["state"] in (*states, *between)
    doctor = lab.call("doctor", "--json")
    assert doctor.code in (0, 3), doctor.err
    return status["state"], sorted(
        finding["code"] for finding in doctor.json["findings"] if finding["level"] == "error"
    )


@contextlib.contextmanager
def under_way(lab: Lab, *flags: str, steps: str = LONG, output: str = "step 3 ") -> Iterator[tuple[Running, str]]:
    """Start a run and wait for this output; yield it with its id."""
    before = set(lab.run_ids())
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", *flags, "--", steps) as running:
        wait_until(lambda: output in running.err, 120, f"it prints `{output}`")
        (run_id,) = set(lab.run_ids()) - before
        yield running, run_id


def detached(lab: Lab, steps: str = LONG) -> str:
    """Start a detached run of so many steps; return its id."""
    argv = ("run", "--script", "steps.py", "--launcher", "mpirun", "--detach", "--json", "--", steps)
    return str(lab.call(*argv).expect(0).json["run_id"])


def ended(lab: Lab, run_id: str, limit: float = ENDING) -> dict[str, Any]:
    """Wait until a run no longer runs; return its entry in `runs`; assert that its processes are gone."""

    def done() -> dict[str, Any] | None:
        """Return the run's entry in `runs`, or None while it is running."""
        run = runs(lab)[run_id]
        assert run["state"] in ("running", "ended", "done", "orphaned")
        return run if run["state"] != "running" else None

    run = wait_until(done, limit, "it has ended")
    assert lab.processes_of(run_id) == []
    return run


def test_labctl_is_killed_before_the_launch(lab: Lab) -> None:
    """SIGKILL labctl once the record is written: the run ends as done, and the next one passes."""
    before = set(lab.run_ids())
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", "--", LONG) as running:
        # The mark is the last file of a record that is written before the launch.
        (run_id,) = wait_until(
            lambda: {mark.parent.name for mark in lab.path.glob("runs/*/started")} - before, 120, "it has a record"
        )
        running.press(signal.SIGKILL)
        running.process.wait()
    run = runs(lab)[run_id]
    assert run["state"] in ("done", "running")
    assert looks(lab) == ("up", [])
    assert ended(lab, run_id)["state"] == "done"
    lab.call("run", "hello").expect(0)


def test_labctl_is_killed_or_loses_its_terminal_while_the_ranks_run(lab: Lab) -> None:
    """SIGKILL or SIGHUP: the run goes on for 10 s, then it is ended as interrupted."""
    begun = []
    for node, number in (("worker-0", signal.SIGKILL), ("worker-1", signal.SIGHUP)):
        with under_way(lab, "--include", node) as (running, run_id):
            running.press(number)
            running.process.wait()
        assert runs(lab)[run_id]["state"] == "running"
        begun.append(run_id)
    assert looks(lab) == ("up", [])
    for run_id in begun:
        assert (ended(lab, run_id)["verdict"], runs(lab)[run_id]["cause"]) == ("ERROR", "interrupted")
        shown = lab.call("show", run_id, "--json").expect(0).json
        assert shown["message"] == f"labctl was away for {PATIENCE} s"


def test_labctl_is_killed_while_it_ends_a_run(lab: Lab) -> None:
    """SIGKILL after SIGTERM, while ranks end: the lab is up without errors, the run is an ERROR."""
    with under_way(lab) as (running, run_id):
        running.press(signal.SIGTERM)
        wait_until((lab.path / "runs/.outputs" / run_id / "told").exists, 120, "the ranks are told to end")
        running.press(signal.SIGKILL)
        running.process.wait()
    assert looks(lab) == ("up", [])
    assert ended(lab, run_id)["verdict"] == "ERROR"


def test_labctl_is_killed_once_the_ranks_have_ended(lab: Lab) -> None:
    """SIGKILL labctl after the ranks' end: the run still passes."""
    with under_way(lab, steps="30", output="step 29 of rank 1") as (running, run_id):
        wait_until(lambda: not lab.processes_of(run_id), 120, "the ranks have ended")
        running.press(signal.SIGKILL)
        running.process.wait()
    assert looks(lab) == ("up", [])
    assert ended(lab, run_id)["verdict"] == "PASS"


def test_who_follows_a_detached_run_is_killed(lab: Lab) -> None:
    """SIGKILL `attach`: the run goes on and passes."""
    run_id = detached(lab, "60")
    with lab.start("attach", run_id) as attached:
        wait_until(lambda: "step 3 " in attached.err, 120, "it is followed")
        attached.press(signal.SIGKILL)
        attached.process.wait()
    assert runs(lab)[run_id]["state"] == "running"
    assert looks(lab) == ("up", [])
    assert ended(lab, run_id)["verdict"] == "PASS"


@pytest.mark.slow
def test_who_follows_a_run_is_killed_at_ten_moments_and_its_record_says_how_far_it_came(lab: Lab) -> None:
    """SIGKILL `attach` ten times: output.log grows and has each line once."""
    run_id = detached(lab, "300")
    record = lab.path / "runs" / run_id
    before = -1
    for moment in range(10):
        with lab.start("attach", run_id) as attached:
            wait_until(lambda: f"step {20 * moment} of rank 0" in attached.err, 120, "it is followed so far")  # noqa: B023
            attached.press(signal.SIGKILL)
            attached.process.wait()
        run = runs(lab)[run_id]
        step = int(run["step"].removeprefix("step "))
        assert (run["state"], step > before) == ("running", True)
        before = step
        # Read the file from the first line each time; the last line may be incomplete.
        lines = (record / "output.log").read_text().splitlines()
        assert len(lines) >= 20 * moment
        assert all(" of rank " in line or "labctl: rank " in line for line in lines[:-1])
        lab.call("logs", "--run", run_id).expect(0)
        assert lab.call("show", run_id, "--json").expect(0).json["state"] == "running"
    assert ended(lab, run_id)["verdict"] == "PASS"
    text = (record / "output.log").read_text()
    assert all(text.count(f"step {step} of rank {rank}\n") == 1 for step in range(300) for rank in (0, 1))


def test_a_worker_is_killed_under_a_detached_run(lab: Lab) -> None:
    """Kill worker-1: status partial, LAB-NODE-001, and the run ends as ERROR."""
    run_id = detached(lab)
    wait_until(lambda: runs(lab)[run_id]["step"], 120, "it makes steps")
    lab.containers()["worker-1"].kill("SIGKILL")
    assert looks(lab) == ("partial", ["LAB-NODE-001"])
    assert ended(lab, run_id)["verdict"] == "ERROR"


def test_the_launcher_is_killed_under_a_detached_run(lab: Lab) -> None:
    """Kill the launcher: the run is orphaned, then judged as lab-lost; `up` and a run pass."""
    run_id = detached(lab)
    wait_until(lambda: runs(lab)[run_id]["step"], 120, "it makes steps")
    lab.containers()["launcher"].kill("SIGKILL")
    status = lab.call("status", "--json").expect(0).json
    assert {run["run_id"]: run["state"] for run in status["runs"]}[run_id] == "orphaned"
    row = runs(lab)[run_id]
    assert (row["state"], row["verdict"], row["cause"]) == ("done", "ERROR", "lab-lost")
    assert looks(lab) == ("partial", ["LAB-NODE-001"])
    lab.call("up").expect(0)
    lab.call("run", "hello").expect(0)
    assert (runs(lab)[run_id]["state"], lab.processes_of(run_id)) == ("done", [])


@pytest.mark.slow
def test_a_worker_is_killed_for_which_a_run_waits(lab: Lab) -> None:
    """Kill the worker of an active and a waiting run: both end, the waiting one as ERROR."""
    first = detached(lab)
    argv = ("run", "--script", "steps.py", "--launcher", "mpirun", "--include", "worker-1", "--wait", "--detach")
    second = lab.call(*argv, "--json", "--", "10").expect(0).json["run_id"]
    assert runs(lab)[second]["state"] == "waiting"
    lab.containers()["worker-1"].kill("SIGKILL")
    assert looks(lab) == ("partial", ["LAB-NODE-001"])
    ended(lab, first)
    run = wait_until(lambda: runs(lab)[second] if runs(lab)[second]["state"] == "done" else None, ENDING, "it ended")
    assert run["verdict"] == "ERROR"
