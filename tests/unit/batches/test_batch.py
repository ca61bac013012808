"""Batches with simulated runs."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders
from support.in_memory import InMemory

from labctl.backends import Backend
from labctl.batches import batch as batches
from labctl.batches import evaluate, logs, record
from labctl.batches.record import Batch, BatchJob
from labctl.errors import ConfigError, HostError, Interrupted, LabError
from labctl.jobs.request import RunOptions
from labctl.model import Criterion, Event, Lab, Metric, Result
from labctl.records.store import RunSummary
from labctl.runs import judge, start

# Seconds that a test waits for what must happen.
LIMIT = 60
WORKLOAD = builders.workload(
    metrics=(Metric(name="loss", pattern="x"), Metric(name="throughput", pattern="y", unit="samples/s")),
    criteria=(Criterion(metric="throughput", min=1),),
)
Note = Callable[[BatchJob], None]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return a lab of four nodes below tmp_path; nothing is written."""
    return builders.lab(4, directory=tmp_path / "lab")


def hostfiles(directory: Path, *groups: str) -> Path:
    """Write a hostfile for each group, whose letters are the workers' numbers; return the directory."""
    directory.mkdir(parents=True)
    for number, group in enumerate(groups, start=1):
        text = "".join(f"worker-{worker} slots=1\n" for worker in group)
        (directory / f"hostfile_{len(group)}xN_batch{number:04}").write_text(text)
    return directory


ASKED = RunOptions(timeout=60, words=("30",), arguments=(("steps", "9"),))


def planned(lab: Lab, *directories: Path, asked: RunOptions = ASKED, **options: Any) -> Batch:
    """Plan a batch of WORKLOAD with these sets of hostfiles."""
    return batches.plan(lab, WORKLOAD, directories, asked, **options)


def passed(job: BatchJob, value: float = 100, **changes: Any) -> Result:
    """Return a PASS result with this throughput for the job; ``changes`` replace its fields."""
    plain = Result(
        run_id=f"run-of-{job.log}",
        workload="hello",
        launcher="deepspeed",
        lab="demo",
        verdict="PASS",
        cause=None,
        message="Completed.",
        exit_code=0,
        metrics={"throughput": {"value": value}},
    )
    return replace(plain, **changes)


def ends_at_once(job: BatchJob, note: Note) -> Result:
    """Note the job's run id, and return a PASS result at once."""
    note(replace(job, run_id=f"run-of-{job.log}"))
    return passed(job)


def no_stop(run_ids: list[str]) -> None:
    """Fail the test: no run may be stopped."""
    raise AssertionError(f"stopped: {run_ids}")


def nothing(_: object) -> None:
    pass


def carry_out(
    directory: Path,
    batch: Batch,
    run: Callable[[BatchJob, Note], Result] = ends_at_once,
    stop: Callable[[list[str]], None] = no_stop,
    **options: Any,
) -> Batch:
    """Write the batch's record and carry it out with this ``run`` and ``stop``; return the batch at its end."""
    batches.begin(directory, batch, builders.lab(directory=directory), resume=False)
    return batches.carry_out(directory, batch, run, stop, nothing, **options)


# --- planning ------------------------------------------------------------------------------------------------


def test_every_hostfile_is_a_job_once_for_each_repeat_with_a_log_named_as_lambdas(lab: Lab, tmp_path: Path) -> None:
    """Plan two hostfiles with repeat=2: four waiting jobs, logs named <workload>_<repeat>_<hostfile>.log."""
    batch = planned(lab, hostfiles(tmp_path / "4nodes_2xN", "01", "23"), repeat=2)
    assert [(job.log, job.nodes) for job in batch.jobs] == [
        ("hello_1_2xN_batch0001.log", ("worker-0", "worker-1")),
        ("hello_1_2xN_batch0002.log", ("worker-2", "worker-3")),
        ("hello_2_2xN_batch0001.log", ("worker-0", "worker-1")),
        ("hello_2_2xN_batch0002.log", ("worker-2", "worker-3")),
    ]
    assert {(job.set, job.state) for job in batch.jobs} == {("4nodes_2xN", "waiting")}
    assert (batch.metric, batch.unit) == ("throughput", "samples/s")


def test_sets_with_the_same_job_names_have_logs_in_directories_of_their_own(lab: Lab, tmp_path: Path) -> None:
    """Plan two sets with equal job names: each set's logs are in a folder of its name, and both jobs run."""
    batch = planned(lab, hostfiles(tmp_path / "old", "0"), hostfiles(tmp_path / "new", "1"))
    assert [job.log for job in batch.jobs] == ["old/hello_1_1xN_batch0001.log", "new/hello_1_1xN_batch0001.log"]
    done = carry_out(tmp_path / "out", batch)
    assert [job.verdict for job in done.jobs] == ["PASS", "PASS"]


def test_two_sets_of_one_name_are_refused(lab: Lab, tmp_path: Path) -> None:
    """Plan two sets in folders of the same name: ConfigError."""
    sets = (hostfiles(tmp_path / "old/2xN", "01"), hostfiles(tmp_path / "new/2xN", "23"))
    with pytest.raises(ConfigError, match="two directories of hostfiles are named 2xN"):
        planned(lab, *sets)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-9 slots=1\n", "lab demo has no node `worker-9`"),
        ("worker-0 slots=2\n", "worker-0 has 1 slots, not 2"),
        ("worker-0 8\n", "expected `slots=N`, found `8`"),
        ("", "no nodes listed"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused_before_anything_runs(
    lab: Lab, tmp_path: Path, text: str, message: str
) -> None:
    """Plan a hostfile with an unknown node, wrong slots or no line: ConfigError names the file and the reason."""
    directory = hostfiles(tmp_path / "set", "0")
    (directory / "hostfile_1xN_batch0002").write_text(text)
    with pytest.raises(ConfigError, match=rf"hostfile_1xN_batch0002.*{message}"):
        planned(lab, directory)


def test_machines_that_the_lab_calls_otherwise_are_told(lab: Lab, tmp_path: Path) -> None:
    """Plan a hostfile with localhost: the job's node is worker-0, and renamed() says so."""
    directory = hostfiles(tmp_path / "set", "1")
    (directory / "hostfile_1xN_batch0002").write_text("localhost slots=1\n")
    batch = planned(lab, directory)
    assert [(job.names, job.nodes) for job in batch.jobs][1] == (("localhost",), ("worker-0",))
    assert batches.renamed(batch) == "localhost is worker-0"


def test_without_a_directory_the_logs_go_where_the_sets_and_the_workload_say() -> None:
    """Ask for the default directory: output/<set>_<workload>, output/2sets_... for two sets."""
    assert batches.default_directory((Path("hostfiles/4nodes_1xN"),), "opt") == Path("output/4nodes_1xN_opt")
    assert batches.default_directory((Path("a"), Path("b")), "dschat/run") == Path("output/2sets_dschat-run")


def test_a_batch_after_a_complete_one_gets_a_directory_of_its_own(lab: Lab, tmp_path: Path) -> None:
    """Ask for the next directory: the same while a batch is incomplete, a numbered one after a complete one."""

    def directory(*, resume: bool = False) -> str:
        """Return the name of the next directory for output."""
        return batches.next_directory(tmp_path / "out", resume=resume).name

    batch = planned(lab, hostfiles(tmp_path / "set", "0"))
    assert directory() == directory(resume=True) == "out"
    for name, following in (("out", "out-2"), ("out-2", "out-3")):
        record.create(tmp_path / name, batch)
        assert directory() == directory(resume=True) == name
        ends: tuple[dict[str, Any], ...] = ({"cause": "interrupted"}, {"cause": None})
        for end, expected in zip(ends, (name, following), strict=True):
            record.change(tmp_path / name, replace(batch.jobs[0], state="done", **end))
            assert (directory(), directory(resume=True)) == (expected, name)


# --- running -------------------------------------------------------------------------------------------------


def test_jobs_on_disjoint_nodes_run_at_once(lab: Lab, tmp_path: Path) -> None:
    """Run four jobs of pairs: two on disjoint nodes run at the same time, the others after them."""
    together = threading.Barrier(2)

    def run(job: BatchJob, note: Note) -> Result:
        """Wait until two jobs run at once; return PASS."""
        together.wait(LIMIT)
        return passed(job)

    done = carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "01", "23", "02", "13")), run)
    assert [job.verdict for job in done.jobs] == ["PASS"] * 4
    assert done.jobs[0].began < done.jobs[1].ended < done.jobs[2].ended  # type: ignore[operator]


def test_no_more_jobs_run_at_once_than_asked_for(lab: Lab, tmp_path: Path) -> None:
    """Carry out three jobs with parallel=1: no two run at the same time."""
    alone = threading.Lock()

    def run(job: BatchJob, note: Note) -> Result:
        """Fail if another job holds the lock; return PASS."""
        assert alone.acquire(blocking=False)
        alone.release()
        return passed(job)

    batch = planned(lab, hostfiles(tmp_path / "set", "0", "1", "2"))
    assert len(carry_out(tmp_path / "out", batch, run, parallel=1).jobs) == 3


def test_a_job_that_fails_stops_no_other_and_the_batch_ends_with_five(lab: Lab, tmp_path: Path) -> None:
    """Let the jobs on worker-0 fail: the others pass, the report's exit code is 5, the record is complete."""
    failed = {"verdict": "FAIL", "cause": "criteria", "message": "too slow", "exit_code": 5}

    def run(job: BatchJob, note: Note) -> Result:
        """Return FAIL for the job on worker-0 alone, PASS for others."""
        return passed(job, 50, **failed) if job.nodes == ("worker-0",) else passed(job)

    done = carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "0", "1", "2", "3", "03")), run)
    assert [(job.verdict, job.cause, job.value) for job in done.jobs] == [
        ("FAIL", "criteria", 50),
        *[("PASS", None, 100)] * 4,
    ]
    report = batches.report(tmp_path / "out", done)
    assert (report.passed, report.failed, report.exit_code) == (4, 1, 5)
    assert record.load(tmp_path / "out") == done


def test_a_batch_that_passes_ends_with_zero(lab: Lab, tmp_path: Path) -> None:
    """Carry out one job that passes: the report's exit code is 0."""
    report = batches.report(tmp_path, carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "0"))))
    assert (report.passed, report.failed, report.exit_code) == (1, 0, 0)


def test_the_ideal_time_is_that_of_the_busiest_node(lab: Lab, tmp_path: Path) -> None:
    """Give three jobs their times: the report has 20 s in total and 15 s as ideal."""
    batch = planned(lab, hostfiles(tmp_path / "set", "01", "12", "23"))
    times = ((100.0, 110.0), (112.0, 117.0), (118.0, 120.0))
    jobs = (replace(job, began=began, ended=other) for job, (began, other) in zip(batch.jobs, times, strict=True))
    report = batches.report(tmp_path, replace(batch, jobs=tuple(jobs)))
    assert (report.seconds, report.ideal) == (20, 15)


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        ({"throughput": {"value": 7}}, 7.0),
        ({"throughput": {"first": 1, "last": 9}}, 9.0),
        ({"throughput": {"value": None, "note": "nan"}}, None),
        ({"loss": {"value": 7}}, None),
        ({}, None),
    ],
)
def test_the_value_of_a_job_is_its_runs_number_of_the_batchs_metric(
    lab: Lab, tmp_path: Path, metrics: dict[str, Any], value: float | None
) -> None:
    """End a job with a metric's value, last value, none or another metric: its value is that number or None."""
    (job,) = planned(lab, hostfiles(tmp_path / "set", "0")).jobs
    figure = batches.ended(job, "throughput", passed(job, metrics=metrics)).value
    assert (figure, type(figure)) == (value, type(value))


def test_the_run_of_a_job_is_in_the_record_once_it_is_launched(lab: Lab, tmp_path: Path) -> None:
    """Load the record while the job runs: it has state running and the noted run id."""

    def run(job: BatchJob, note: Note) -> Result:
        """Note the run id, check the record, and return PASS."""
        note(replace(job, run_id="r1"))
        loaded = record.load(tmp_path / "out")
        assert loaded
        assert (loaded.jobs[0].state, loaded.jobs[0].run_id, loaded.jobs[0].ended) == ("running", "r1", None)
        return passed(job)

    carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "0")), run)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that waits until all jobs that fit are started and then sends SIGINT to the main thread."""
    waiting = threading.Event()

    def wait(*given: Any, **options: Any) -> Any:
        """Set ``waiting`` and call futures.wait."""
        waiting.set()
        return futures.wait(*given, **options)

    def press() -> None:
        """Wait until the batch waits for its jobs, then send SIGINT to the main thread."""
        assert waiting.wait(LIMIT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(batches, "wait", wait)
    return press


def test_ctrl_c_stops_what_runs_and_goes_on_once_that_has_ended(
    lab: Lab, tmp_path: Path, interrupt: Callable[[], None]
) -> None:
    """Send SIGINT during two jobs: KeyboardInterrupt, both are stopped and interrupted, the third stays waiting."""
    stopped, requests = threading.Event(), list[str]()

    def run(job: BatchJob, note: Note) -> Result:
        """Note a run id, send SIGINT on worker-1, wait for the stop, and return interrupted."""
        note(replace(job, run_id=f"r-{job.nodes[0]}"))
        if job.nodes == ("worker-1",):
            interrupt()
        assert stopped.wait(LIMIT)
        return passed(job, verdict="ERROR", cause="interrupted")

    def stop(run_ids: list[str]) -> None:
        """Record the run ids and let the runs end."""
        requests.extend(run_ids)
        stopped.set()

    batch = planned(lab, hostfiles(tmp_path / "set", "0", "1", "01"))
    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path / "out", batch, run, stop)
    loaded = record.load(tmp_path / "out")
    assert loaded
    assert [(job.state, job.cause) for job in loaded.jobs] == [*[("done", "interrupted")] * 2, ("waiting", None)]
    assert {"r-worker-1"} <= set(requests) <= {"r-worker-0", "r-worker-1"}


def test_a_run_that_is_launched_after_ctrl_c_is_stopped_too(
    lab: Lab, tmp_path: Path, interrupt: Callable[[], None]
) -> None:
    """Launch a run after SIGINT: stop is called for it too."""
    stopped, requests = threading.Event(), list[list[str]]()

    def run(job: BatchJob, note: Note) -> Result:
        """Send SIGINT, wait for the stop, note the run id only then, and return interrupted."""
        interrupt()
        assert stopped.wait(LIMIT)
        note(replace(job, run_id="late"))
        return passed(job, verdict="ERROR", cause="interrupted")

    def stop(run_ids: list[str]) -> None:
        """Record the run ids and let the run go on."""
        requests.append(run_ids)
        stopped.set()

    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "0")), run, stop)
    assert requests == [[], ["late"]]


def test_what_is_no_error_of_a_job_ends_the_batch_and_what_runs(lab: Lab, tmp_path: Path) -> None:
    """Raise HostError in one job: the batch stops the other run and raises the error."""
    stopped = threading.Event()

    def run(job: BatchJob, note: Note) -> Result:
        """Raise HostError on worker-0; else wait for the stop and return interrupted."""
        if job.nodes == ("worker-0",):
            raise HostError("cannot write the log")
        note(replace(job, run_id="r1"))
        assert stopped.wait(LIMIT)
        return passed(job, verdict="ERROR", cause="interrupted")

    with pytest.raises(HostError, match="cannot write the log"):
        carry_out(tmp_path / "out", planned(lab, hostfiles(tmp_path / "set", "0", "1")), run, lambda _: stopped.set())


def test_more_jobs_than_can_be_followed_wait_for_their_turn_and_are_not_started_by_ctrl_c(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]
) -> None:
    """Send SIGINT while two of four jobs are followed: the other two are never started."""
    monkeypatch.setattr(batches, "FOLLOWED", 2)
    stopped, begun = threading.Event(), list[str]()

    def run(job: BatchJob, note: Note) -> Result:
        """Record the node, send SIGINT on worker-1, wait for the stop, and return interrupted."""
        begun.append(job.nodes[0])
        if job.nodes == ("worker-1",):
            interrupt()
        assert stopped.wait(LIMIT)
        return passed(job, verdict="ERROR", cause="interrupted")

    batch = planned(lab, hostfiles(tmp_path / "set", "0", "1", "2", "3"))
    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path / "out", batch, run, lambda _: stopped.set())
    assert sorted(begun) == ["worker-0", "worker-1"]


# --- going on ------------------------------------------------------------------------------------------------


def test_a_directory_with_the_record_of_a_batch_is_refused_and_kept(lab: Lab, tmp_path: Path) -> None:
    """Begin a batch in a directory with a record: ConfigError hints at --resume, and the record stays."""
    batch = planned(lab, hostfiles(tmp_path / "set", "0"))
    carry_out(tmp_path / "out", batch)
    before = (tmp_path / "out" / record.RECORD).read_bytes()
    with pytest.raises(ConfigError, match="already has a batch") as caught:
        batches.begin(tmp_path / "out", batch, lab, resume=False)
    assert "--resume" in caught.value.hint
    assert (tmp_path / "out" / record.RECORD).read_bytes() == before


def test_what_is_done_is_not_run_again_and_what_was_interrupted_is(lab: Lab, tmp_path: Path) -> None:
    """Resume a batch: jobs that passed or failed are not run again, interrupted and waiting ones are."""
    sets = hostfiles(tmp_path / "set", "0", "1", "2", "3")
    first = planned(lab, sets)
    passes, fails, interrupted, waits = first.jobs
    record.create(tmp_path / "out", first)
    for job in (
        replace(passes, state="done", run_id="r1", verdict="PASS", value=1.0, began=1.0, ended=2.0),
        replace(fails, state="done", run_id="r2", verdict="FAIL", cause="criteria", began=1.0, ended=2.0),
        replace(interrupted, state="done", run_id="r3", verdict="ERROR", cause="interrupted", message="by ann"),
    ):
        record.change(tmp_path / "out", job)
    batch = batches.begin(tmp_path / "out", planned(lab, sets), lab, resume=True)
    assert batch.jobs[2] == interrupted
    ran: list[BatchJob] = []

    def run(job: BatchJob, note: Note) -> Result:
        """Record the job; return PASS."""
        ran.append(job)
        return passed(job)

    done = batches.carry_out(tmp_path / "out", batch, run, no_stop, nothing)
    assert sorted(job.log for job in ran) == [interrupted.log, waits.log]
    assert [job.verdict for job in done.jobs] == ["PASS", "FAIL", "PASS", "PASS"]
    assert record.load(tmp_path / "out") == done


def test_a_run_that_was_under_way_is_gone_on_with_from_when_it_began(lab: Lab, tmp_path: Path) -> None:
    """Resume a batch with a running job: it keeps its run id and begin time."""
    sets = hostfiles(tmp_path / "set", "0")
    first = planned(lab, sets)
    record.create(tmp_path / "out", first)
    record.change(tmp_path / "out", replace(first.jobs[0], state="running", run_id="r1", began=7.0))
    batch = batches.begin(tmp_path / "out", planned(lab, sets), lab, resume=True)

    def run(job: BatchJob, note: Note) -> Result:
        """Check that the job is running with run id r1; return PASS."""
        assert (job.state, job.run_id) == ("running", "r1")
        return passed(job, run_id="r1")

    (job,) = batches.carry_out(tmp_path / "out", batch, run, no_stop, nothing).jobs
    assert (job.run_id, job.began) == ("r1", 7.0)


def launched(lab: Lab, run_id: str, batch: Batch, job: BatchJob) -> None:
    """Write a run's folder with job.json of the batch's job and the file started, but no result."""
    folder = lab.directory / "runs" / run_id
    folder.mkdir(parents=True)
    (folder / "started").touch()
    request = {"workload": "hello", "options": {"hostfile": job.hostfile}, "batch": f"{batch.id} {job.log}"}
    (folder / "job.json").write_text(json.dumps({"workload": "hello", "request": request}))


def test_a_run_that_was_launched_and_not_noted_is_that_of_its_job(lab: Lab, tmp_path: Path) -> None:
    """Resume with a run folder that names a waiting job: it becomes running; another batch's run is not taken."""
    sets = hostfiles(tmp_path / "set", "0", "1", "2")
    first = planned(lab, sets)
    record.create(tmp_path / "out", first)
    record.change(tmp_path / "out", replace(first.jobs[1], state="running", run_id="noted", began=time.time()))
    launched(lab, "lost", first, first.jobs[0])
    launched(lab, "noted", first, first.jobs[1])
    launched(lab, "theirs", planned(lab, sets), first.jobs[2])
    batch = batches.begin(tmp_path / "out", planned(lab, sets), lab, resume=True)
    assert [(job.state, job.run_id) for job in batch.jobs] == [
        ("running", "lost"),
        ("running", "noted"),
        ("waiting", ""),
    ]


def test_a_run_from_before_the_batch_is_none_of_its_jobs(lab: Lab, tmp_path: Path) -> None:
    """Resume with a run older than the batch: the job gets no run id."""
    sets = hostfiles(tmp_path / "set", "0")
    first = replace(planned(lab, sets), began=time.time() + 100)
    launched(lab, "earlier", first, first.jobs[0])
    record.create(tmp_path / "out", first)
    batch = batches.begin(tmp_path / "out", planned(lab, sets), lab, resume=True)
    assert batch.jobs[0].run_id == ""


def test_of_two_repeats_each_has_one_of_the_runs_that_were_launched(lab: Lab, tmp_path: Path) -> None:
    """Resume three repeats with two launched runs: each of the first two gets one."""
    sets = hostfiles(tmp_path / "set", "0")
    first = planned(lab, sets, repeat=3)
    record.create(tmp_path / "out", first)
    for run_id, job in zip(("r1", "r2"), first.jobs, strict=False):
        launched(lab, run_id, first, job)
    batch = batches.begin(tmp_path / "out", planned(lab, sets, repeat=3), lab, resume=True)
    assert [job.run_id for job in batch.jobs] == ["r1", "r2", ""]


def refusal(directory: Path, batch: Batch, lab: Lab) -> str:
    """Return the message of the ConfigError that resuming raises, without the directory."""
    with pytest.raises(ConfigError) as caught:
        batches.begin(directory, batch, lab, resume=True)
    return caught.value.message.removeprefix(str(directory))


def test_another_batch_is_not_gone_on_with(lab: Lab, tmp_path: Path) -> None:
    """Resume with no record, another workload, options, jobs or nodes: ConfigError says which; the record stays."""
    sets = hostfiles(tmp_path / "set", "0", "1")
    batch = planned(lab, sets)
    assert refusal(tmp_path / "out", batch, lab) == " has no batch to resume"
    record.create(tmp_path / "out", batch)
    before = (tmp_path / "out" / record.RECORD).read_bytes()
    assert refusal(tmp_path / "out", replace(batch, workload="vit"), lab) == " is a batch of `hello`, not of `vit`"
    other = planned(lab, sets, asked=RunOptions(timeout=60, rehearse=True))
    assert "was started with other options" in refusal(tmp_path / "out", other, lab)
    more = planned(lab, sets, repeat=2)
    assert refusal(tmp_path / "out", more, lab).endswith(
        "hello_2_1xN_batch0001.log was not in this batch, or ran on other nodes"
    )
    (sets / "hostfile_1xN_batch0001").write_text("worker-2 slots=1\n")
    assert "hello_1_1xN_batch0001.log was not in this batch" in refusal(tmp_path / "out", planned(lab, sets), lab)
    (sets / "hostfile_1xN_batch0001").write_text("worker-0 slots=1\n")
    (sets / "hostfile_1xN_batch0002").unlink()
    fewer = planned(lab, sets)
    assert refusal(tmp_path / "out", fewer, lab) == ": the batch also had hello_1_1xN_batch0002.log"
    assert (tmp_path / "out" / record.RECORD).read_bytes() == before


# --- one job -------------------------------------------------------------------------------------------------


class Runs:
    """Stand-in for runs that a job launches and follows, with planted results in order."""

    def __init__(self, lab: Lab, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace judge.attach by _attach, and start with no launches and results."""
        self.lab, self.directory = lab, directory
        self.warned: list[str] = []
        self.followed: list[str] = []
        self.jobs: list[BatchJob] = []
        """As noted."""
        self.ends: dict[str, Result] = {}
        self.launches: list[RunSummary | LabError] = []
        monkeypatch.setattr(judge, "attach", self._attach)

    def _attach(self, backend: Backend, run_id: str) -> Result:
        """Record the run id, emit a line, a warning and a notice, and return the planted result."""
        self.followed.append(run_id)
        context = backend.context
        context.line(f"{run_id} says this")
        context.warn("beware")
        context.notice("of no interest")
        return self.ends[run_id]

    def _launch(self, _: Backend) -> RunSummary:
        """Return the next planted run, or raise the planted error."""
        begun = self.launches.pop(0)
        if isinstance(begun, LabError):
            raise begun
        return begun

    def run(self, job: BatchJob) -> Result:
        """Run the job with the planted launches; return its result."""

        def emit(event: Event) -> None:
            self.warned.append(event.text)

        backend = InMemory(self.lab, emit=emit)
        return batches.run_job(backend, self.directory, self._launch, job, self.jobs.append)

    @property
    def noted(self) -> list[str]:
        """Return the run ids that were noted."""
        return [job.run_id for job in self.jobs]

    def log(self, job: BatchJob) -> str:
        """Return the text of the job's log."""
        return (self.directory / job.log).read_text()


@pytest.fixture
def runs(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Create the lab directory; return planted runs for it."""
    lab.directory.mkdir()
    return Runs(lab, tmp_path / "out", monkeypatch)


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> BatchJob:
    """Return a planned job on worker-0 and worker-1."""
    return planned(lab, hostfiles(tmp_path / "set", "01")).jobs[0]


def summaries(*run_ids: str) -> Iterable[RunSummary]:
    """Return a running RunSummary for each run id."""
    return [RunSummary(run_id=run_id, state="running") for run_id in run_ids]


HEAD = "worker-0 slots=1\nworker-1 slots=1\n\n"


def test_a_log_has_the_hostfile_and_what_its_run_prints_and_warnings_name_the_job(runs: Runs, job: BatchJob) -> None:
    """Run a job: its log has hostfile and output, its run id is noted, the warning names the job."""
    runs.launches, runs.ends = [*summaries("r1")], {"r1": passed(job)}
    assert runs.run(job) == passed(job)
    assert runs.log(job) == f"{HEAD}r1 says this\n"
    assert (runs.noted, runs.followed, runs.warned) == (["r1"], ["r1"], ["2xN_batch0001: beware"])


def test_a_run_that_was_launched_before_is_followed_from_its_beginning(runs: Runs, job: BatchJob) -> None:
    """Run a job with a run id: nothing is launched, and the log is written again from the start."""
    runs.ends = {"r1": passed(job)}
    (runs.directory).mkdir()
    (runs.directory / job.log).write_text(f"{HEAD}half of wh")
    runs.run(replace(job, run_id="r1"))
    assert (runs.followed, runs.noted) == (["r1"], [])
    assert runs.log(job) == f"{HEAD}r1 says this\n"


def test_one_that_was_interrupted_meanwhile_is_run_again(runs: Runs, job: BatchJob) -> None:
    """Run a job whose run was interrupted: a second run is launched, followed and noted."""
    runs.launches = [*summaries("r2")]
    runs.ends = {"r1": passed(job, verdict="ERROR", cause="interrupted"), "r2": passed(job, 7)}
    assert runs.run(replace(job, run_id="r1")).metrics == {"throughput": {"value": 7}}
    assert (runs.followed, runs.noted) == (["r1", "r2"], ["r2"])


def test_a_run_that_is_refused_by_its_size_is_the_jobs_result(runs: Runs, job: BatchJob) -> None:
    """Refuse the launch with DoesNotFit: the job's result is the refusal's, and no run is followed."""
    refused = passed(job, verdict="ERROR", cause="does-not-fit")
    runs.launches = [start.DoesNotFit(refused)]
    assert runs.run(job) == refused
    assert runs.followed == []


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (HostError("worker-1 is unhealthy: gone", node="worker-1"), "node-lost", 3),
        (HostError("lab demo is not up: launcher: exited", node="launcher"), "lab-lost", 3),
        (HostError("cannot write the record"), "launcher-failed", 3),
        (ConfigError("no such script"), "launcher-failed", 2),
        (Interrupted("the batch was stopped before this job started"), "interrupted", 130),
    ],
)
def test_what_keeps_a_job_from_running_is_its_result_and_in_its_log(
    runs: Runs, job: BatchJob, error: LabError, cause: str, code: int
) -> None:
    """Raise an error at launch: the result is ERROR with its cause, message and exit code, and the log has it."""
    runs.launches = [error]
    result = runs.run(job)
    assert (result.verdict, result.cause, result.message, result.exit_code) == ("ERROR", cause, error.message, code)
    assert runs.log(job) == f"{HEAD}labctl: {error.message}\n"


def test_the_loss_of_the_launcher_is_no_nodes_and_its_job_runs_again(lab: Lab, tmp_path: Path) -> None:
    """End a job by the launcher's death: eval judges no node by it, and --resume runs it; a worker's death counts."""
    batch = planned(lab, hostfiles(tmp_path / "set", "0"))
    (job,) = batch.jobs
    died = passed(job, verdict="ERROR", cause="node-lost", message="launcher: container died with exit code 137")
    lost = batches.ended(job, "", died)
    assert not replace(batch, jobs=(lost,)).complete
    assert evaluate.judge(logs.of_batch(replace(batch, jobs=(lost,)), ""), evaluate.Limits()).nodes == ()
    assert batches.again(lost, {}, ()).state == "waiting"
    of_worker = batches.ended(job, "", replace(died, message="worker-0 (rank 0): container died with exit code 137"))
    (node,) = evaluate.judge(logs.of_batch(replace(batch, jobs=(of_worker,)), ""), evaluate.Limits()).nodes
    assert (node.node, node.status) == ("worker-0", "FAIL")


def test_a_log_that_cannot_be_written_is_named(runs: Runs, job: BatchJob) -> None:
    """Make the output directory a file: HostError names the log."""
    runs.directory.write_text("")
    with pytest.raises(HostError, match=r"cannot write .*out/hello_1_2xN_batch0001\.log"):
        runs.run(job)


def test_the_time_that_a_job_waited_for_nodes_is_not_its_own(lab: Lab, tmp_path: Path) -> None:
    """End a job that began 100 s ago with a run of 3 s: it lasts 3 s."""
    (job,) = planned(lab, hostfiles(tmp_path / "set", "0")).jobs
    done = batches.ended(replace(job, began=time.time() - 100), "", passed(job, seconds=3.0))
    assert done.began is not None
    assert done.ended is not None
    assert done.ended - done.began == pytest.approx(3)


def test_the_start_of_a_job_is_that_of_its_run_and_stays_when_it_ends(runs: Runs, job: BatchJob) -> None:
    """It is the time of the run's record, not that of the batch's first step for it; judging takes a moment."""
    runs.launches, runs.ends = [RunSummary(run_id="r1", state="running", age=2.0)], {"r1": passed(job)}
    before = time.time()
    runs.run(job)
    now = time.time()
    (noted,) = runs.jobs
    assert noted.began is not None
    assert before <= noted.began + 2 <= now
    done = batches.ended(replace(noted, began=now - 10), "", passed(job, seconds=9.5))
    assert done.began == now - 10
