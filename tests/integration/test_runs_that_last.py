"""Runs that outlive labctl: detached, followed by several, concurrent, and after labctl is killed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import FreshLab
from support.harness import Lab, wait_until

from docker import DockerClient

pytestmark = pytest.mark.docker

# Print the numbers of steps, one after the other, until the file `enough` exists.
STEPS = """
import os, sys, time
for step in range(int(sys.argv[1])):
    print(f"step {step} of rank {os.environ['RANK']} at {time.time():.2f}", flush=True)
    time.sleep(float(sys.argv[2]))
    if os.path.exists(os.environ["PROJECT_PATH"] + "/workloads/enough"):
        break
"""


@pytest.fixture
def lab(lab: Lab) -> Lab:
    """Return the module's lab of two nodes, up, with a script that prints steps."""
    (lab.path / "steps.py").write_text(STEPS)
    return lab


def detached(lab: Lab, steps: int, pause: float, *flags: str) -> str:
    """Start a detached run of the script with so many steps; return its id."""
    argv = ("run", "--script", "steps.py", "--launcher", "mpirun", "--detach", "--json", *flags)
    document = lab.call(*argv, "--", str(steps), str(pause)).expect(0).json
    assert document["state"] in ("running", "waiting")
    return str(document["run_id"])


def runs(lab: Lab) -> dict[str, dict[str, Any]]:
    """Return run id -> entry of `runs --json`."""
    return {run["run_id"]: run for run in lab.call("runs", "--json").expect(0).json["runs"]}


def steps_in(text: str, rank: int) -> list[int]:
    """List the numbers of the steps that a rank printed in the text, in order."""
    return [int(step) for step in re.findall(rf"step (\d+) of rank {rank} ", text)]


def test_a_detached_run_is_followed_by_two_at_once_with_every_line_once(lab: Lab) -> None:
    """Two `attach` and output.log show every step of both ranks once, and the run passes."""
    run_id = detached(lab, 40, 0.1)
    assert (runs(lab)[run_id]["state"], len(runs(lab)[run_id]["nodes"])) == ("running", 2)
    with lab.start("attach", run_id) as first, lab.start("attach", run_id) as second:
        answers = [first.answer(120), second.answer(120)]
    for answer in answers:
        answer.expect(0)
        assert "verdict completed, nothing judged" in answer.out
        for rank in range(2):
            assert steps_in(answer.err, rank) == list(range(40))
    output = (lab.path / "runs" / run_id / "output.log").read_text()
    assert steps_in(output, 1) == list(range(40))
    assert lab.processes_of(run_id) == []
    assert "verdict completed, nothing judged" in lab.call("attach", run_id).expect(0).out


def test_a_run_that_nobody_followed_is_judged_by_who_looks_first(lab: Lab) -> None:
    """`runs` shows a finished detached run as done with verdict PASS."""
    run_id = detached(lab, 3, 0.1)
    run = wait_until(lambda: runs(lab)[run_id] if runs(lab)[run_id]["state"] == "done" else None, 120, "it ended")
    assert (run["verdict"], run["cause"]) == ("PASS", None)
    assert steps_in((lab.path / "runs" / run_id / "output.log").read_text(), 1) == [0, 1, 2]


def test_runs_on_other_nodes_are_side_by_side_and_harm_each_other_not(lend: FreshLab) -> None:
    """Three runs on disjoint nodes; `stop` of one pauses no other, and a fourth waits."""
    lab = lend(LAB_NODES="4")
    (lab.path / "steps.py").write_text(STEPS)
    nodes = ("worker-0", "worker-1", "worker-2@worker-3")
    first, stopped, third = (detached(lab, 6000, 0.1, "--include", include) for include in nodes)
    waiting = detached(lab, 3, 0.1, "--include", "worker-3", "--wait")
    assert wait_until(lambda: re.fullmatch(r"step \d+", runs(lab)[first]["step"]), 120, "it says its step")
    listed = runs(lab)
    assert [listed[run]["state"] for run in (first, stopped, third, waiting)] == [*["running"] * 3, "waiting"]
    busy = lab.call("run", "hello", "--include", "worker-1").expect(3).err
    assert f"worker-1: in use by run {stopped}" in busy
    assert lab.call("down", "--dry-run").expect(0).err.count("run ") >= 4
    assert "cannot change the lab" in lab.call("up", "-s", "LAB_SHM_SIZE=300m").expect(3).err
    began = time.time()
    lab.call("stop", stopped, "--grace", "1").expect(0)
    ended = time.time()
    (lab.path / "workloads/enough").touch()
    for run in (first, third):
        answer = lab.call("attach", run, limit=120).expect(0)
        times = [float(moment) for moment in re.findall(r"of rank 0 at ([0-9.]+)", answer.err)]
        assert steps_in(answer.err, 0) == list(range(len(times)))
        # Stopping the other run did not pause this one.
        assert len([at for at in times if began < at < ended]) > ended - began
    lab.call("attach", waiting, limit=120).expect(0)
    results = {run: runs(lab)[run] for run in (first, stopped, third, waiting)}
    assert [run["verdict"] for run in results.values()] == ["PASS", "ERROR", "PASS", "PASS"]
    assert results[stopped]["cause"] == "interrupted"


@pytest.mark.smoke
def test_ctrl_c_on_attach_leaves_the_run_and_logs_shows_it(lab: Lab) -> None:
    """Ctrl-C on `attach` gives 130 and leaves the run; `logs -f` follows it until `stop`."""
    run_id = detached(lab, 600, 0.1, "--include", "worker-0")
    with lab.start("attach", run_id) as attached:
        wait_until(lambda: steps_in(attached.err, 0), 120, "it is followed")
        attached.press(signal.SIGINT)
        answer = attached.answer(120)
    assert "no longer followed: the run goes on" in answer.expect(130).err
    assert runs(lab)[run_id]["state"] == "running"
    with lab.start("logs", "--run", run_id, "-f") as logs:
        wait_until(lambda: steps_in(logs.out, 0), 120, "it is followed")
        lab.call("stop", run_id, "--grace", "0").expect(0)
        assert steps_in(logs.answer(120).out, 0)[:3] == [0, 1, 2]


def test_a_run_that_waits_is_ended_by_stop_and_by_ctrl_c_and_never_starts(lab: Lab) -> None:
    """`stop` and Ctrl-C end waiting runs, whose output.log has no step."""
    first = detached(lab, 600, 0.1, "--include", "worker-0")
    second = detached(lab, 3, 0.1, "--include", "worker-0", "--wait")
    assert lab.call("stop", second, "--json").expect(0).json["cause"] == "interrupted"
    before = set(lab.run_ids())
    argv = ("run", "--script", "steps.py", "--launcher", "mpirun", "--include", "worker-0", "--wait", "--", "3", "0.1")
    with lab.start(*argv) as waiting:
        (third,) = wait_until(lambda: set(lab.run_ids()) - before, 120, "it has a record")
        wait_until(lambda: runs(lab)[third]["state"] == "waiting", 120, "it waits")
        waiting.press(signal.SIGINT)
        waiting.answer(120).expect(130)
    lab.call("stop", first, "--grace", "0")
    assert [steps_in((lab.path / "runs" / run / "output.log").read_text(), 0) for run in (second, third)] == [[], []]


LATE_WORDS = """
import os, signal, sys, time

def end(*_):
    print("told to end", flush=True)
    time.sleep(1)
    open(os.environ["LABCTL_RUN_DIR"] + "/saved", "w").close()
    print("saved", flush=True)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("listens", flush=True)
time.sleep(600)
"""


def test_a_rank_that_prints_when_it_is_told_to_end_has_its_grace(lab: Lab) -> None:
    """A rank that prints and saves after SIGTERM does both within `stop --grace 8`."""
    (lab.path / "late.py").write_text(LATE_WORDS)
    argv = ("run", "--script", "late.py", "--launcher", "torchrun", "--include", "worker-0", "--detach", "--json")
    run_id = lab.call(*argv).expect(0).json["run_id"]
    rank = lab.path / "runs/.outputs" / run_id / "ranks/rank-0.log"
    wait_until(lambda: rank.exists() and "listens" in rank.read_text(), 120, "it listens")
    lab.call("stop", run_id, "--grace", "8").expect(0)
    record = lab.path / "runs" / run_id
    assert (record / "saved").exists()
    assert (record / "ranks/rank-0.log").read_text().splitlines()[-2:] == ["told to end", "saved"]


# Print the second half of the steps once the file `seen` exists.
BARS = """
import os, sys, time
for step in range(1, 61):
    sys.stderr.write(f"\\r {step}%|###       | {step}/60 [00:10<00:23,  2.93it/s]\\r{' ' * 60}\\r")
    print({"loss": 1.5, "step": step}, flush=True)
    time.sleep(0.05)
    while step == 30 and not os.path.exists(os.environ["PROJECT_PATH"] + "/workloads/seen"):
        time.sleep(0.05)
"""


def test_a_terminal_shows_a_bar_below_the_whole_log_and_top_watches_beside_it(lab: Lab) -> None:
    """In a terminal each line is printed above a bar; `top` shows the same run."""
    (lab.path / "bars.py").write_text(BARS)
    argv = ("run", "--script", "bars.py", "--launcher", "torchrun", "--include", "worker-0")
    with lab.in_terminal(*argv) as terminal:
        wait_until(lambda: re.search(r"step +\d+/60  ━*─+", terminal.output), 120, "a bar")
        document = lab.call("top", "--json").expect(0).json
        assert (document["state"], document["progress"]["steps"]) == ("running", 60)
        assert f"run {document['run_id']}\nstep " in lab.call("top").expect(0).out
        (lab.path / "workloads/seen").touch()
        assert terminal.code(120) == 0
    # The prefix is repeated on a line that restarts after \r.
    printed = re.findall(r"\r\x1b\[2m  \| \x1b\[0m\{'loss': 1.5, 'step': (\d+)\}\r\n", terminal.output)
    assert printed == [str(step) for step in range(1, 61)]
    assert "/60  " not in terminal.output[terminal.output.index("result.json") :]
    record = lab.path / "runs" / document["run_id"] / "output.log"
    assert record.read_bytes().count(b"\r{'loss': 1.5") == 60
    assert lab.call("top").expect(3).err.startswith("error: no run is under way")


# Print this many lines, with a non-text byte and these words, each followed by empty lines.
MANY = r"""
import sys
for number in range(int(sys.argv[1])):
    sys.stdout.buffer.write(b"step %d \xff \xc3\xbc%s\n" % (number, sys.argv[2].encode()) + b"\n" * int(sys.argv[3]))
"""
MANY_LINES = ("run", "--script", "many.py", "--launcher", "mpirun", "--json", "--include")


def test_all_lines_of_ranks_that_print_much_arrive_once(lab: Lab) -> None:
    """30,000 lines with odd bytes of two ranks are all in the rank logs and once in output.log."""
    (lab.path / "many.py").write_text(MANY)
    argv = (*MANY_LINES, "worker-0@worker-1", "--", "30000", "", "2")
    record = lab.path / "runs" / lab.call(*argv).expect(0).json["run_id"]
    for rank in (0, 1):
        log = (record / f"ranks/rank-{rank}.log").read_bytes().split(b"\n", 1)[1]
        assert log == b"".join(b"step %d \xff \xc3\xbc\n\n\n" % number for number in range(30_000))
    # mpirun's own lines have no prefix: it may warn that a process group was set by another process first.
    printed = re.findall(r"^\[1,[01]\]:(.*)$", (record / "output.log").read_text(), re.MULTILINE)
    counts = {f"step {number} \ufffd ü": 2 for number in range(30_000)}
    assert Counter(line for line in printed if "labctl: " not in line) == {**counts, "": 120_000}


@pytest.mark.slow
def test_a_million_lines_take_about_as_long_as_docker_logs_of_them_and_little_memory(
    lab: Lab, engine: DockerClient
) -> None:
    """At most 1.3 times as long as `docker logs` (median of 5) and less than 150 MiB."""
    (lab.path / "many.py").write_text(MANY)
    arguments = ("1000000", " loss 2.5 tokens/s 1234.5 lr 1.0e-4 some more words", "0")
    ratios, peak = [], 0
    printer = engine.containers.run(lab.image(), ["-c", MANY, *arguments], entrypoint=["python"], detach=True)
    try:
        printer.wait(timeout=120)
        for _ in range(5):
            began = time.monotonic()
            with lab.start(*MANY_LINES, "worker-0", "--", *arguments) as running:
                while not running.ends_within(0.5):
                    peak = max(peak, memory_peak(running.process.pid))
            took = time.monotonic() - began
            answer = running.answer(1).expect(0)
            assert answer.err.count(" some more words\n") == 1_000_000
            began = time.monotonic()
            with (lab.path / "docker.log").open("wb") as log:
                subprocess.run(["docker", "logs", str(printer.id)], stdout=log, check=True)
            ratios.append(took / (time.monotonic() - began))
            shutil.rmtree(lab.path / "runs" / answer.json["run_id"])
    finally:
        printer.remove(force=True)
    assert median(ratios) <= 1.3, ratios
    assert 0 < peak < 150 << 20


def memory_peak(pid: int) -> int:
    """Return a process's peak memory in bytes; 0 for a zombie; raise FileNotFoundError if it is gone."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) << 10 if match else 0


def test_down_judges_the_runs_that_it_ends(lab: Lab) -> None:
    """`down` ends a detached run, whose record says interrupted by it and keeps its steps."""
    run_id = detached(lab, 600, 0.1)
    wait_until(lambda: runs(lab)[run_id]["step"], 120, "it makes steps")
    assert f"this ends run {run_id}" in lab.call("down").expect(0).err
    shown = lab.call("show", run_id, "--json").expect(0).json
    assert (shown["cause"], "took the lab down" in shown["message"]) == ("interrupted", True)
    assert steps_in((lab.path / "runs" / run_id / "output.log").read_text(), 0)[:3] == [0, 1, 2]
