"""`labctl hostfiles` and `labctl batch` on the command line, without an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.commandline import Labctl

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import readiness
from labctl.batches import batch as batches
from labctl.batches import record
from labctl.batches.batch import BatchReport
from labctl.batches.record import Batch, BatchJob
from labctl.cli import batch as commands
from labctl.cli.output import Output
from labctl.errors import HostError
from unit.cli.test_output import unread

METRICS = """\
description: hello
launcher: deepspeed
script: hello.py
timeout: 60s
metrics: {throughput: {pattern: 'Throughput: (\\S+)', unit: samples/s, reduce: last}}
"""


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make DockerEngine.observe raise HostError "Docker Engine does not answer"."""

    def fail(*_: object) -> None:
        raise HostError("Docker Engine does not answer")

    monkeypatch.setattr(DockerEngine, "observe", fail)


# --- hostfiles -----------------------------------------------------------------------------------------------


def test_a_set_is_written_and_what_is_left_over_is_named(labctl: Labctl) -> None:
    """Run hostfiles for seven nodes by two: three files are written, the seventh node is named as left over."""
    labctl.write("nodes.txt", "".join(f"ml-{number:03} slots=8\n" for number in range(1, 8)))
    answer = labctl("hostfiles", "nodes.txt", "--size", "2")
    directory = labctl.directory / "hostfiles/7nodes_2xN"
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "hostfiles/7nodes_2xN: 3 hostfiles of 2 nodes\nleft over: ml-007 (in no hostfile)\n"
    assert sorted(path.name for path in directory.iterdir()) == [f"hostfile_2xN_batch000{n}" for n in (1, 2, 3)]
    assert (directory / "hostfile_2xN_batch0003").read_text() == "ml-005 slots=8\nml-006 slots=8\n"


def test_one_node_is_one_node(labctl: Labctl) -> None:
    """Run hostfiles for one node: the answer says "1 hostfile of 1 node"."""
    labctl.write("nodes.txt", "ml-001 slots=8\n")
    answer = labctl("hostfiles", "nodes.txt", "--size", "1")
    assert answer.out == "hostfiles/1node_1xN: 1 hostfile of 1 node\n"


def test_a_set_as_json_has_its_files_and_what_is_left_over(labctl: Labctl) -> None:
    """Run hostfiles --json: directory, size, pattern, files and left-over nodes."""
    labctl.write("nodes.txt", "a slots=2\nb slots=2\nc slots=2\n")
    document = labctl("hostfiles", "nodes.txt", "--size", "2", "--pattern", "random", "--out", "o", "--json").document
    assert document["directory"] == "o"
    assert (document["size"], document["pattern"]) == (2, "random")
    assert document["hostfiles"] == ["hostfile_2xN_batch0001"]
    assert len(document["left_over"]) == 1


@pytest.mark.parametrize(
    ("text", "options", "written"),
    [
        ("worker-0\nworker-1\n", (), "worker-0 slots=3\nworker-1 slots=3\n"),
        ("localhost\n127.0.0.1\n", (), "localhost slots=3\n127.0.0.1 slots=3\n"),
        ("worker-0 slots=2\nworker-1\n", (), "worker-0 slots=2\nworker-1 slots=3\n"),
        ("worker-0 slots=2\nml-001\n", ("--slots", "4"), "worker-0 slots=4\nml-001 slots=4\n"),
    ],
)
def test_slots_are_those_of_the_option_the_list_or_the_lab(
    labctl: Labctl, text: str, options: tuple[str, ...], written: str
) -> None:
    """Run hostfiles: slots come from --slots, else the list, else LAB_SLOTS."""
    labctl.env("LAB_SLOTS=3\n")
    labctl.write("nodes.txt", text)
    assert labctl("hostfiles", "nodes.txt", "--size", "2", "--out", "o", *options).code == 0
    assert (labctl.directory / "o/hostfile_2xN_batch0001").read_text() == written


def test_outside_a_lab_a_node_has_eight_slots(labctl: Labctl) -> None:
    """Run hostfiles without .env: each node has 8 slots."""
    (labctl.directory / ".env").unlink()
    labctl.write("nodes.txt", "10.0.0.1\n10.0.0.2\n")
    assert labctl("hostfiles", "nodes.txt", "--size", "2", "--out", "o").code == 0
    assert (labctl.directory / "o/hostfile_2xN_batch0001").read_text() == "10.0.0.1 slots=8\n10.0.0.2 slots=8\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a slots=1\na slots=1\n", ("--size", "1"), "nodes.txt:2: duplicate host `a`, first named on line 1"),
        ("a slots=1\n", ("--size", "0"), "--size"),
        ("a slots=1\n", ("--size", "2"), "--size 2: the list has only 1 node"),
        ("a slots=1\n", (), "--size"),
        ("a slots=1\n", ("--size", "1", "--pattern", "sequental"), "did you mean `sequential`?"),
        ("a slots=1\nb slots=1\nc slots=1\n", ("--size", "3", "--pattern", "pairs"), "makes pairs, not groups of 3"),
        ("a\n", ("--size", "1"), "lab demo has no node `a`"),
        ("", ("--size", "1"), "nodes.txt:1: "),
    ],
)
def test_a_list_or_a_set_that_cannot_be_is_refused(
    labctl: Labctl, text: str, options: tuple[str, ...], message: str
) -> None:
    """Run hostfiles with an invalid list or size: exit code 2 with the reason, and no folder is made."""
    labctl.write("nodes.txt", text)
    answer = labctl("hostfiles", "nodes.txt", *options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert not (labctl.directory / "hostfiles").exists()


def test_a_list_that_is_not_there_is_named(labctl: Labctl) -> None:
    """Run hostfiles with a missing list: exit code 2 names it."""
    answer = labctl("hostfiles", "none.txt", "--size", "1")
    assert (answer.code, "none.txt: no such file" in answer.err) == (2, True)


def test_other_hostfiles_are_kept(labctl: Labctl) -> None:
    """Run hostfiles into a folder of another set: exit code 2 names a file of it; the same set again is 0."""
    labctl.write("nodes.txt", "a slots=1\nb slots=1\n")
    for _ in range(2):
        assert labctl("hostfiles", "nodes.txt", "--size", "1", "--out", "o").code == 0
    answer = labctl("hostfiles", "nodes.txt", "--size", "2", "--out", "o")
    assert answer.code == 2
    assert "o/hostfile_1xN_batch0001 does not belong to this set of hostfiles" in answer.err


def test_where_no_directory_can_be_made_is_named(labctl: Labctl) -> None:
    """Run hostfiles with a file as --out: exit code 3 names it."""
    labctl.write("nodes.txt", "a slots=1\n")
    answer = labctl("hostfiles", "nodes.txt", "--size", "1", "--out", "nodes.txt")
    assert answer.code == 3
    assert "cannot write nodes.txt: File exists" in answer.err


# --- batch ---------------------------------------------------------------------------------------------------


def hostfiles(labctl: Labctl, *groups: str) -> str:
    """Write a hostfile for each group of node numbers; return the folder relative to the lab."""
    folder = labctl.directory / "hostfiles/set"
    folder.mkdir(parents=True)
    for number, group in enumerate(groups, start=1):
        (folder / f"hostfile_{number}").write_text("".join(f"worker-{node} slots=1\n" for node in group))
    return "hostfiles/set"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("helo", "hostfiles/set"), "hello"),
        (("hello", "hostfiles/none"), "hostfiles/none: no such directory"),
        (("hello", "."), "has no file hostfile_*"),
        (("hello", "hostfiles/set", "--expect", "speed>=1"), "hello has no metric `speed`"),
        (("hello", "hostfiles/set", "--timeout", "soon"), "soon"),
        (("hello", "hostfiles/set", "--repeat", "0"), "--repeat"),
        (("hello",), "HOSTFILES_DIR"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(labctl: Labctl, arguments: tuple[str, ...], message: str) -> None:
    """Run batch with an unknown workload, set, metric or value: exit code 2 with the reason."""
    hostfiles(labctl, "0", "1")
    answer = labctl("batch", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


def test_a_hostfile_with_an_unknown_node_is_refused_before_anything_is_written(labctl: Labctl) -> None:
    """Run batch with a hostfile of an unknown node: exit code 2, and --out is not created."""
    answer = labctl("batch", "hello", hostfiles(labctl, "0", "7"), "--out", "o")
    assert answer.code == 2
    assert re.search(r"hostfile_2: lab demo has no node `worker-7`", answer.err)
    assert not (labctl.directory / "o").exists()


def test_where_no_engine_answers_nothing_is_recorded(labctl: Labctl) -> None:
    """Run batch without an engine: exit code 3, and --out is not created."""
    answer = labctl("batch", "hello", hostfiles(labctl, "0"), "--out", "o")
    assert (answer.code, answer.out) == (3, "")
    assert "Docker Engine does not answer" in answer.err
    assert not (labctl.directory / "o").exists()


Change = Callable[[Batch], None]


def done(batch: Batch, *ends: dict[str, Any]) -> Batch:
    """Return the batch with its jobs done so, in ten seconds each, one after the other."""
    jobs = (
        replace(job, state="done", run_id=f"r{number}", began=100.0 + 10 * number, ended=110.0 + 10 * number, **end)
        for number, (job, end) in enumerate(zip(batch.jobs, ends, strict=True))
    )
    return replace(batch, jobs=tuple(jobs))


PASS = {"verdict": "PASS", "value": 1234.5, "message": "Completed."}
FAIL = {"verdict": "FAIL", "cause": "criteria", "value": 1.5, "exit_code": 5, "message": "too slow"}
LOST = {"verdict": "ERROR", "cause": "node-lost", "exit_code": 4, "message": "worker-1: gone"}


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, labctl: Labctl) -> Callable[..., None]:
    """Return a function that makes `batch` end its jobs as given, without a run; the launcher counts as ready."""

    def set_ends(*ends: dict[str, Any]) -> None:
        """Replace batches.run_jobs by one that ends the jobs so."""

        def run_jobs(*given: Any, **_: object) -> Batch:
            """Show the plan, its first job running and the end; return the ended batch."""
            plan, show = given[4], given[5]
            show(plan)
            first = replace(plan.jobs[0], state="running", run_id="r0")
            show(replace(plan, jobs=(first, *plan.jobs[1:])))
            ended = done(plan, *ends)
            show(ended)
            return ended

        monkeypatch.setattr(batches, "run_jobs", run_jobs)

    labctl.workload(METRICS)
    monkeypatch.setattr(readiness, "require_launcher", lambda *_: None)
    return set_ends


def test_a_batch_is_told_line_by_line_and_then_as_a_timeline(labctl: Labctl, ends: Callable[..., None]) -> None:
    """Run batch with PASS, FAIL and ERROR: a line for each on stderr, a timeline on stdout, exit code 5."""
    ends(PASS, FAIL, LOST)
    answer = labctl("batch", "hello", hostfiles(labctl, "0", "1", "01"), "--out", "o")
    assert answer.code == 5
    assert answer.err.splitlines() == [
        "1 on worker-0: running, run r0",
        "1 on worker-0: PASS, throughput 1,234 samples/s, 10 s",
        "2 on worker-1: FAIL (criteria): too slow",
        "3 on worker-0, worker-1: ERROR (node-lost): worker-1: gone",
    ]
    assert (
        answer.out
        == """\
JOB  REPEAT  NODES              TIME (0 to 30 s)                          SECONDS  THROUGHPUT  VERDICT  CAUSE
1    1       worker-0           #############...........................  10       1,234       PASS     -
2    1       worker-1           .............#############..............  10       1.5         FAIL     criteria
3    1       worker-0,worker-1  ...........................#############  10       -           ERROR    node-lost
2 on worker-1: too slow
3 on worker-0, worker-1: worker-1: gone
1 passed, 2 failed in 30 s; the busiest node was in use for 20 s
files o
next: labctl eval o --within 10%
"""
    )


def test_jobs_far_below_the_others_are_named_before_the_command_that_judges_them(
    labctl: Labctl, ends: Callable[..., None]
) -> None:
    """Run batch with one job far below: the last lines name it and the command `labctl eval`."""
    ends(PASS, PASS, {**PASS, "value": 580.2}, PASS)
    answer = labctl("batch", "hello", hostfiles(labctl, "0", "1", "0", "1"), "--out", "my logs")
    assert answer.code == 0
    assert answer.out.splitlines()[-3:] == [
        "files my logs",
        "1 of 4 jobs is far below the others of its size: 3 (47 % of the median)",
        "next: labctl eval 'my logs' --within 10%",
    ]


def test_a_second_batch_has_a_directory_of_its_own_unless_the_first_is_incomplete_or_named(
    labctl: Labctl, ends: Callable[..., None]
) -> None:
    """Run batch twice: refused while the first is incomplete or named, else a folder with -2."""
    ends(PASS)
    argv = ("batch", "hello", hostfiles(labctl, "0"))
    labctl(*argv)
    again = labctl(*argv)
    assert (again.code, "output/set_hello already has a batch" in again.err) == (2, True)
    assert "--resume continues it" in again.err
    loaded = record.load(labctl.directory / "output/set_hello")
    assert loaded
    record.create(labctl.directory / "output/set_hello", done(loaded, PASS))
    assert labctl(*argv).out.splitlines()[-2:] == ["files output/set_hello-2", "next: labctl eval output/set_hello-2"]
    named = labctl(*argv, "--out", "output/set_hello")
    assert (named.code, "output/set_hello already has a batch" in named.err) == (2, True)


def test_help_tells_what_the_name_of_a_set_means(labctl: Labctl) -> None:
    """Run hostfiles --help: it explains 2xN."""
    assert "2xN is two nodes, all their slots" in " ".join(labctl("hostfiles", "--help").out.split())


def test_a_batch_that_passes_ends_with_zero(labctl: Labctl, ends: Callable[..., None]) -> None:
    """Run batch with two passed repeats: exit code 0, and the folder is named."""
    ends(PASS, PASS)
    answer = labctl("batch", "hello", hostfiles(labctl, "0"), "--repeat", "2")
    assert answer.code == 0
    assert "1 (2) on worker-0: PASS" in answer.err
    assert answer.out.splitlines()[-2:] == ["files output/set_hello", "next: labctl eval output/set_hello"]


def test_a_batch_as_json_is_one_document_with_every_job(labctl: Labctl, ends: Callable[..., None]) -> None:
    """Run batch --json with PASS and FAIL: counts, seconds and every job, exit code 5."""
    ends(PASS, FAIL)
    answer = labctl("batch", "hello", hostfiles(labctl, "0", "1"), "--out", "o", "--json")
    document = answer.document
    assert answer.code == 5
    assert (document["passed"], document["failed"], document["seconds"], document["ideal"]) == (1, 1, 20, 10)
    assert (document["batch"]["workload"], document["batch"]["unit"]) == ("hello", "samples/s")
    assert [(job["job"], job["verdict"], job["cause"], job["value"]) for job in document["batch"]["jobs"]] == [
        ("1", "PASS", None, 1234.5),
        ("2", "FAIL", "criteria", 1.5),
    ]


def test_ctrl_c_says_how_to_go_on(labctl: Labctl, ends: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a batch: exit code 130 and the hint --resume; without it the next call is refused."""

    def interrupted(*_: object, **__: object) -> BatchReport:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    monkeypatch.setattr(batches, "run_jobs", interrupted)
    answer = labctl("batch", "hello", hostfiles(labctl, "0"), "--out", "o")
    assert answer.code == 130
    assert "stopped by Ctrl-C\nhint: --resume goes on with the batch" in answer.err
    again = labctl("batch", "hello", "hostfiles/set", "--out", "o")
    assert (again.code, "o already has a batch" in again.err) == (2, True)


def test_a_batch_that_is_done_is_told_again_with_resume(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., None]
) -> None:
    """Run batch --resume on a complete record: no job runs, the answer is printed again, exit code 0."""
    ends(PASS)
    labctl("batch", "hello", hostfiles(labctl, "0"), "--out", "o")
    loaded = record.load(labctl.directory / "o")
    assert loaded
    record.create(labctl.directory / "o", done(loaded, PASS))

    def run_jobs(*given: Any, **_: object) -> Batch:
        """Carry the batch out with jobs that fail the test if they run."""
        return batches.carry_out(given[3], given[4], never, never, given[5])

    def never(*_: object) -> Any:
        raise AssertionError("a job that is done runs again")

    monkeypatch.setattr(batches, "run_jobs", run_jobs)
    answer = labctl("batch", "hello", "hostfiles/set", "--out", "o", "--resume")
    assert answer.code == 0
    assert "1 passed, 0 failed in 10 s" in answer.out


def job(number: int, **changes: Any) -> BatchJob:
    """Return a waiting job with this number; ``changes`` replace its fields."""
    plain = BatchJob(job=f"j{number}", set="s", hostfile="h", names=("a",), nodes=(f"n{number}",), log=f"{number}.log")
    return replace(plain, **changes)


def test_a_table_under_way_has_what_runs_and_what_failed_and_no_more_rows_than_fit() -> None:
    """Format a batch under way: counts, then running and failed jobs, cut to ROWS with a count of the rest."""
    running = [job(number, state="running", began=100.0) for number in range(30)]
    ended = [job(30, state="done", began=100.0, ended=107.0, **FAIL), job(31, state="done", began=1.0, **PASS)]
    batch = Batch(workload="hello", lab="demo", timeout=60, began=100, jobs=(*running, *ended, job(32)))
    text = commands.live_text(batch, 112.0).splitlines()
    assert text[0] == "2 of 33 jobs done, 30 running, 1 failed"
    assert text[2].split() == ["j0", "n0", "12", "s", "running"]
    assert len(text) == 2 + commands.ROWS + 1
    assert text[-1] == "... and 11 more"
    few = commands.live_text(replace(batch, jobs=tuple(ended)), 112.0).splitlines()
    assert few[2].split() == ["j30", "n30", "7", "s", "FAIL", "(criteria)"]


def test_a_batch_goes_on_if_nobody_reads_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a job that runs to a closed pipe, as after `2>&1 | head`: no error, so that the batch goes on."""
    nodes = ("worker-0",)
    job = BatchJob(
        job="2xN_batch0001", set="2nodes_2xN", hostfile="hostfile", names=nodes, nodes=nodes, log="log", state="running"
    )
    with unread(monkeypatch):
        commands.Display(Output()).show(Batch(workload="hello", lab="demo", timeout=60, began=0, jobs=(job,)))


@pytest.mark.parametrize(("term", "is_live"), [("", False), ("dumb", False), ("xterm", True)])
def test_a_table_is_live_where_it_can_be_redrawn(monkeypatch: pytest.MonkeyPatch, term: str, is_live: bool) -> None:
    """Show a batch on terminals: a live table, but not where the cursor cannot be moved."""
    started: list[bool] = []
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("rich.live.Live.start", lambda _: started.append(True))
    with commands.Display(Output()):
        assert started == [True] * is_live
