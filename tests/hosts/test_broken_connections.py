"""A run goes on while labctl is cut off from a host that the other hosts still reach, and is judged afterwards."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from support.harness import Running, wait_until
from support.rack.rack import Rack, RackLab

from labctl.backends.docker.agent import PATIENCE

pytestmark = pytest.mark.docker

STEPS = """
import os, sys, time
for step in range(int(sys.argv[1])):
    print(f"step {step} of rank {os.environ['RANK']} at {time.time():.2f}", flush=True)
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def lab(shared_rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RackLab]:
    """Yield a lab over two hosts, up, with a script that prints steps."""
    made = shared_rack.lab(tmp_path_factory.mktemp("lab"), f"{family}-cut", shared_rack.hosts(2), {})
    (made.path / "steps.py").write_text(STEPS)
    made.call("up").expect(0)
    yield made
    shared_rack.clear()


def impatient(lab: RackLab) -> RackLab:
    """Return the lab with LAB_RUN_PATIENCE=10: runs end ten seconds after labctl is gone."""
    return replace(lab, environ={**lab.environ, "LAB_RUN_PATIENCE": "10"})


def steps_in(text: str, rank: int) -> list[int]:
    """List the numbers of the steps that a rank printed in the text, in order."""
    return [int(step) for step in re.findall(rf"step (\d+) of rank {rank} ", text)]


def pause_in(text: str, rank: int) -> float:
    """Return the longest time between two steps of a rank, in seconds."""
    times = [float(moment) for moment in re.findall(rf"of rank {rank} at ([0-9.]+)", text)]
    return max(after - before for before, after in pairwise(times))


def step_is_heard(running: Running, step: int) -> None:
    """Wait until labctl prints the step; fail with its output if it ends before."""

    def is_printed() -> bool:
        """Return True if labctl has printed the step; fail if it ended without."""
        ended, err = running.process.poll() is not None, running.err
        assert f"step {step} of" in err or not ended, f"labctl has ended before step {step}:\n{err}"
        return f"step {step} of" in err

    wait_until(is_printed, 120, f"step {step}")


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        pytest.param(0, 5, id="the-launchers-host"),
        pytest.param(0, 90, id="the-launchers-host, long", marks=pytest.mark.slow),
        pytest.param(1, 90, id="a-workers-host, long", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_while_a_host_is_cut_off_and_every_line_comes_once(
    lab: RackLab, number: int, seconds: int
) -> None:
    """Cut a host off for 5 or 90 s: the run passes, each step comes once, no rank pauses."""
    steps = 5 * seconds + 30
    host = lab.hosts[number]
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", "--", str(steps)) as running:
        step_is_heard(running, 5)
        host.cut()
        try:
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > seconds, seconds + 10, "the cut lasts")
        finally:
            host.cure()
        answer = running.answer(120).expect(0)
    assert "verdict completed, nothing judged" in answer.out
    for rank in (0, 1):
        assert steps_in(answer.err, rank) == list(range(steps))
        assert pause_in(answer.err, rank) < 3


def test_a_connection_that_is_hung_up_is_made_again(lab: RackLab) -> None:
    """Hang up both hosts twice during a run: it passes and each step comes once."""
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", "--", "40") as running:
        for step, number in ((5, 0), (12, 1), (19, 0), (26, 1)):
            step_is_heard(running, step)
            lab.hosts[number].hang_up()
        answer = running.answer(120).expect(0)
    assert [steps_in(answer.err, rank) for rank in (0, 1)] == [list(range(40))] * 2


def test_a_worker_that_dies_while_its_host_is_cut_off_is_told_of(lab: RackLab) -> None:
    """Kill worker-1 on a host that is cut off: the run ends as node-lost."""
    host = lab.hosts[1]
    with lab.start("run", "stubborn-own", "--json") as running:
        wait_until(lambda: running.err.count("does not listen") == 2, 120, "two ranks run")
        host.cut()
        try:
            lab.containers()["worker-1"].kill("SIGKILL")
            result = running.answer(PATIENCE + 60)
        finally:
            host.cure()
    assert (result.json["verdict"], result.json["cause"]) == ("ERROR", "node-lost")
    lab.call("up").expect(0)


@pytest.mark.slow
def test_labctl_says_when_it_gives_up_and_the_run_ends_as_long_after_as_is_said(lab: RackLab) -> None:
    """Cut the launcher's host off: exit code 3; the run ends 10 s later."""
    lab, host = impatient(lab), lab.hosts[0]
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", "--", "3000") as running:
        step_is_heard(running, 10)
        (run_id,) = set(lab.run_ids()) - judged(lab)
        host.cut()
        try:
            answer = running.answer(PATIENCE + 60).expect(3)
        finally:
            host.cure()
    assert f"labctl tries for {PATIENCE} s to connect to run {run_id} again" in answer.err
    assert f"run {run_id} goes on without labctl" in answer.err
    assert f"labctl attach {run_id}" in answer.err
    wait_until(lambda: run_id in judged(lab), 60, "it ended")
    assert lab.call("show", run_id, "--json").json["message"] == "labctl was away for 10 s"
    assert lab.processes_of(run_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_run_whose_labctl_is_killed_is_followed_again_or_ends(
    lab: RackLab, number: signal.Signals, comes_back: bool
) -> None:
    """SIGKILL or SIGHUP: `attach` shows all steps, and without it the run ends by itself."""
    lab = impatient(lab)
    with lab.start("run", "--script", "steps.py", "--launcher", "mpirun", "--", "60") as running:
        step_is_heard(running, 10)
        (run_id,) = set(lab.run_ids()) - judged(lab)
        running.press(number)
        running.process.wait()
    if comes_back:
        answer = lab.call("attach", run_id).expect(0)
        assert [steps_in(answer.err, rank) for rank in (0, 1)] == [list(range(60))] * 2
    else:
        wait_until(lambda: run_id in judged(lab), 60, "it ended")
    assert lab.processes_of(run_id) == []


@pytest.mark.slow
def test_a_run_whose_launchers_machine_was_rebooted_with_its_labctl_is_closed_as_lost(lab: RackLab) -> None:
    """Kill labctl and the host: the run is done, lab-lost; up and run work."""
    host = lab.hosts[0]
    with lab.start("run", "stubborn", "--launcher", "deepspeed") as running:
        wait_until(lambda: running.err.count("does not listen") == 2, 120, "two ranks run")
        (run_id,) = set(lab.run_ids()) - judged(lab)
        running.press(signal.SIGKILL)
        host.kill()
        host.cure()
    (run,) = [run for run in lab.call("runs", "--json").json["runs"] if run["run_id"] == run_id]
    assert (run["state"], run["cause"]) == ("done", "lab-lost")
    lab.call("up").expect(0)
    lab.call("run", "hello").expect(0)
    assert lab.processes_of(run_id) == []


def judged(lab: RackLab) -> set[str]:
    """Return the ids of the runs that `runs` lists as done."""
    return {run["run_id"] for run in lab.call("runs", "--json").expect(0).json["runs"] if run["state"] == "done"}
