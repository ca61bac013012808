"""Batches on a lab of four nodes: failing jobs, concurrent jobs, and a batch that resumes after labctl was ended."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Answer, Lab, Running, wait_until

from labctl.batches import record
from labctl.batches.record import Batch, BatchJob

pytestmark = pytest.mark.docker

# Print steps for a second, then a number, unless the job is to hang, to run until it is killed, or to be slow.
STEPS = """
import os, sys, time

with open(os.environ["LABCTL_RUN_DIR"] + "/hostfile") as hostfile:
    job = "+".join(line.split()[0] for line in hostfile)
told = dict(word.split("=") for word in sys.argv[2:]).get(job)
for step in range(10_000 if told == "endless" else int(sys.argv[1])):
    print(f"step {step} at {time.time():.2f}", flush=True)
    time.sleep(0.1)
if told == "hangs":
    time.sleep(600)
if os.environ["RANK"] == "0":
    print(f"Throughput: {50 if told == 'slow' else 100} samples/sec", flush=True)
    open(os.environ["LABCTL_RUN_DIR"] + "/whole", "w").close()
"""
WORKLOAD = """
description: makes steps
launcher: mpirun
script: steps.py
timeout: 60s
metrics:
  throughput: {pattern: 'Throughput: (\\S+) samples/sec', unit: samples/s, reduce: last}
criteria:
  - {metric: throughput, min: 80}
"""
NODES = tuple(f"worker-{number}" for number in range(4))
# Limit of seconds between two steps of a rank on a busy machine, unless it was paused.
PAUSE = 3


@pytest.fixture(scope="module")
def lab(lend_module: FreshLab) -> Lab:
    """Return a lab of four nodes, up, with workload `steps` and folders of hostfiles of one and of two nodes."""
    lab = lend_module(LAB_NODES="4")
    folder = lab.path / "workloads/steps"
    folder.mkdir()
    (folder / "steps.py").write_text(STEPS)
    (folder / "workload.yml").write_text(WORKLOAD)
    hostfiles(lab, "4nodes_1xN", *((node,) for node in NODES))
    hostfiles(lab, "4nodes_2xN", *((NODES[first], NODES[second]) for first, second in ((0, 1), (3, 2), (2, 0), (1, 3))))
    hostfiles(lab, "2nodes_1xN", *((node,) for node in NODES[:2]))
    return lab


def hostfiles(lab: Lab, name: str, *groups: tuple[str, ...]) -> None:
    """Write a hostfile, one slot per node, for each group of nodes to hostfiles/NAME of the lab."""
    folder = lab.path / "hostfiles" / name
    folder.mkdir()
    for number, group in enumerate(groups, start=1):
        text = "".join(f"{node} slots=1\n" for node in group)
        (folder / f"hostfile_{len(group)}xN_batch{number:04}").write_text(text)


def batch(lab: Lab, out: str) -> Batch:
    """Return the recorded batch in the folder ``out``."""
    loaded = record.load(lab.path / out)
    assert loaded
    return loaded


def nothing_runs(lab: Lab) -> bool:
    """Return True if no container has a process of any run."""
    return lab.processes_of("2") == []


def began(lab: Lab, out: str, running: Running, log: str, text: str) -> None:
    """Wait until a job's log in the batch's folder ``out`` has this text; fail if labctl ends before."""

    def has_said() -> bool:
        """Return True if the log exists and has the text; fail if labctl has ended."""
        assert running.process.poll() is None, running.err
        path = lab.path / out / log
        return path.exists() and text in path.read_text()

    wait_until(has_said, 120, f"{log} says `{text}`")


def overlap(first: BatchJob, other: BatchJob) -> bool:
    """Return True if both jobs ran at some time."""
    return (first.began or 0) < (other.ended or 0) and (other.began or 0) < (first.ended or 0)


@pytest.fixture(scope="module")
def beats() -> Iterator[list[float]]:
    """Yield the list to which a thread adds the time each 0.1 s: where it has a gap, this machine paused."""
    times, over = [time.time()], threading.Event()

    def beat() -> None:
        """Add the time until the module's tests have ended."""
        while not over.wait(0.1):
            times.append(time.time())

    thread = threading.Thread(target=beat)
    thread.start()
    yield times
    over.set()
    thread.join()


def longest_gap(times: Iterable[float]) -> float:
    """Return the most seconds between two of these times."""
    return max(after - before for before, after in pairwise(sorted(times)))


@pytest.fixture(scope="module")
def mixed(lab: Lab, beats: list[float]) -> Answer:
    """Return the answer of a batch of eight jobs: one hangs, one is killed, one is slow, and five are good."""
    behaviours = ("worker-0+worker-1=hangs", "worker-3+worker-2=endless", "worker-3=slow")
    sets = ("hostfiles/4nodes_2xN", "hostfiles/4nodes_1xN")
    argv = ("batch", "steps", *sets, "--out", "out", "--timeout", "30s", "--json", "--", "10", *behaviours)
    with lab.start(*argv) as running:
        began(lab, "out", running, "4nodes_2xN/steps_1_2xN_batch0002.log", "step 5 ")
        lab.inside("worker-2", "pkill", "-KILL", "-f", "steps.py")
        return running.answer(300)


def test_jobs_that_fail_stop_no_others_and_their_causes_are_told(lab: Lab, mixed: Answer) -> None:
    """Five of eight jobs pass; the others are timeout, rank-crashed and criteria; exit code 5."""
    report = mixed.expect(5).json
    assert (report["passed"], report["failed"]) == (5, 3)
    failed = {job.nodes: job for job in batch(lab, "out").jobs if job.verdict != "PASS"}
    assert {nodes: job.cause for nodes, job in failed.items()} == {
        ("worker-0", "worker-1"): "timeout",
        ("worker-3", "worker-2"): "rank-crashed",
        ("worker-3",): "criteria",
    }
    assert "timed out after 30 s" in failed["worker-0", "worker-1"].message
    assert re.search(r"rank 1 on worker-2 .*SIGKILL", failed["worker-3", "worker-2"].message)
    assert (failed["worker-3",].value, failed["worker-3",].exit_code) == (50, 5)
    assert {job.value for job in batch(lab, "out").jobs if job.verdict == "PASS"} == {100}
    # Samplers end by themselves, once the run has.
    wait_until(lambda: nothing_runs(lab), 60, "no process of a run is left")


def test_jobs_on_disjoint_nodes_run_at_once_and_no_node_has_two(lab: Lab, mixed: Answer) -> None:
    """Jobs overlap only on disjoint nodes, and the batch takes less than twice the ideal time."""
    jobs = {job.log: job for job in batch(lab, "out").jobs}
    together = [pair for pair in combinations(jobs.values(), 2) if overlap(*pair)]
    assert len(together) >= 4
    assert all(set(first.nodes).isdisjoint(other.nodes) for first, other in together)
    # The other jobs use the other two nodes while the first job hangs.
    assert sum(overlap(jobs["4nodes_2xN/steps_1_2xN_batch0001.log"], job) for job in jobs.values()) > 2
    assert mixed.json["seconds"] < 2 * mixed.json["ideal"]


def test_no_job_pauses_while_others_begin_end_or_are_killed(lab: Lab, mixed: Answer, beats: list[float]) -> None:
    """No job has 3 s between two steps, besides those in which the machine paused."""
    limit = PAUSE + longest_gap(beats[:])
    for job in batch(lab, "out").jobs:
        times = [
            float(moment) for moment in re.findall(r"step \d+ at ([0-9.]+)", (lab.path / "out" / job.log).read_text())
        ]
        assert len(times) >= 5
        assert longest_gap(times) < limit, job.log


def test_logs_are_named_as_lambdas_and_begin_with_their_hostfile(lab: Lab, mixed: Answer) -> None:
    """Logs are SET/steps_1_NxN_batchNNNN.log and begin with the text of the job's hostfile."""
    for job in batch(lab, "out").jobs:
        assert re.fullmatch(rf"{job.set}/steps_1_[12]xN_batch\d{{4}}\.log", job.log)
        assert (lab.path / "out" / job.log).read_text().startswith(f"{Path(job.hostfile).read_text()}\n")


def test_eval_of_the_result_fails_and_names_the_jobs(lab: Lab, mixed: Answer) -> None:
    """`eval --min 80` exits with 5 and shows the causes of the failed jobs."""
    out = lab.call("eval", "out", "--min", "80").expect(5).out
    rows = {row.split()[0]: row for row in out.splitlines() if row.startswith(("1xN", "2xN"))}
    assert "criteria" in rows["1xN_batch0004"]
    assert "timeout" in rows["2xN_batch0001"]
    assert "5 of 8 jobs passed" in out


def test_a_batch_whose_labctl_was_killed_goes_on_and_runs_every_job_once(lab: Lab) -> None:
    """SIGKILL after the first job: only --resume goes on, with the other three jobs."""
    argv = ("batch", "steps", "hostfiles/2nodes_1xN", "--out", "killed", "--repeat", "2")
    with lab.start(*argv, "--", "30") as running:
        wait_until(lambda: "PASS" in running.err, 120, "a job has passed")
        running.press(signal.SIGKILL)
        running.process.wait()
    before = batch(lab, "killed").jobs
    assert {job.state for job in before} > {"done"}
    done = {job.log: job for job in before if job.state == "done"}
    refused = lab.call(*argv, "--", "30").expect(2).err
    assert "killed already has a batch" in refused
    answer = lab.call(*argv, "--resume", "--json", "--", "30").expect(0)
    after = batch(lab, "killed").jobs
    assert [(job.state, job.verdict) for job in after] == [("done", "PASS")] * 4
    assert {job.log: job for job in after if job.log in done} == done
    runs = {job.run_id for job in after}
    assert len(runs) == 4
    made = [run for run in lab.run_ids() if run >= min(runs)]
    assert sorted(made) == sorted(runs)
    assert all((lab.path / "runs" / run / "whole").exists() for run in runs)
    assert answer.json["passed"] == 4


def test_ctrl_c_ends_what_runs_and_the_batch_can_be_gone_on_with(lab: Lab) -> None:
    """Ctrl-C: exit code 130, the job is interrupted; --resume runs both jobs."""
    argv = ("batch", "steps", "hostfiles/2nodes_1xN", "--out", "stopped", "--parallel", "1", "--", "40")
    with lab.start(*argv) as running:
        began(lab, "stopped", running, "steps_1_1xN_batch0001.log", "step 5 ")
        running.press(signal.SIGINT)
        err = running.answer(120).expect(130).err
    assert "stopped by Ctrl-C" in err
    assert "--resume goes on with the batch" in err
    # Samplers end by themselves, once the run has.
    wait_until(lambda: nothing_runs(lab), 60, "no process of a run is left")
    stopped = batch(lab, "stopped").jobs
    assert [(job.state, job.cause) for job in stopped] == [("done", "interrupted"), ("waiting", None)]
    lab.call(*argv[:-2], "--resume", *argv[-2:]).expect(0)
    assert [job.verdict for job in batch(lab, "stopped").jobs] == ["PASS"] * 2


def test_a_hostfile_may_call_this_machine_localhost(lab: Lab) -> None:
    """A hostfile with localhost runs on worker-0, which stderr says."""
    hostfiles(lab, "1node_1xN_here", ("localhost",))
    err = lab.call("batch", "steps", "hostfiles/1node_1xN_here", "--out", "here", "--", "1").expect(0).err
    assert "localhost is worker-0" in err
    (job,) = batch(lab, "here").jobs
    assert (job.names, job.nodes) == (("localhost",), ("worker-0",))
    assert (lab.path / "here" / job.log).read_text().startswith("localhost slots=1\n\n")
