"""`labctl eval` on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.commandline import Labctl
from support.logs import throughput, write_log

from labctl.batches import record
from labctl.batches.record import Batch, BatchJob


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Write logs of three jobs on one node each, ml-003 slow; return the folder."""
    for number, value in enumerate((1000, 1010, 800), 1):
        write_log(tmp_path / "out", f"1xN_batch000{number}", [f"ml-00{number}"], throughput(value))
    return tmp_path / "out"


def test_a_batch_is_told_as_jobs_sizes_and_nodes(labctl: Labctl, out: Path) -> None:
    """Run eval with limits: tables of jobs, sizes and nodes, the verdict as last line, exit code 5."""
    write_log(out, "2xN_batch0001", ["ml-001", "ml-002"], throughput(1900))
    answer = labctl("eval", "out", "--min", "900", "--per-node", "--within", "5%")
    assert (answer.code, answer.err) == (5, "")
    assert (
        answer.out
        == """\
JOB            NODES  VALUE  PER NODE  VS MEDIAN  STATUS  CAUSE
1xN_batch0003  1      800    800       -20 %      FAIL    below-min: 800 is below 900
1xN_batch0001  1      1,000  1,000     +0 %       PASS
1xN_batch0002  1      1,010  1,010     +1 %       PASS
2xN_batch0001  2      1,900  950       +0 %       PASS

NODES  JOBS  MEAN PER NODE  MEDIAN  SPREAD  MIN  MAX    EFFICIENCY
1      3     936.7          1,000   12.6 %  800  1,010  100 %
2      1     950            950     -       950  950    101 %
values in samples/s

WORST NODES  VS MEDIAN  STATUS  EVIDENCE
ml-003       -20 %      FAIL    1 of 1 jobs failed: 1xN_batch0003
ml-001       +0 %       PASS
ml-002       +0.5 %     PASS

FAIL: 3 of 4 jobs passed, 2 of 3 nodes passed
"""
    )


def test_a_batch_that_passes_ends_with_zero(labctl: Labctl, out: Path) -> None:
    """Run eval with a low minimum: exit code 0 and PASS as last line."""
    answer = labctl("eval", str(out), "--min", "800")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "PASS: 3 of 3 jobs passed, 3 of 3 nodes passed")


def test_without_a_threshold_nothing_is_judged_and_a_job_far_below_the_others_is_named(
    labctl: Labctl, out: Path
) -> None:
    """Run eval without limits: nothing is judged, the slow job is named, exit code 0."""
    answer = labctl("eval", "out")
    assert (answer.code, answer.err) == (0, "")
    assert (
        answer.out
        == """\
JOB            NODES  VALUE  PER NODE  VS MEDIAN  STATUS  CAUSE
1xN_batch0003  1      800    800       -20 %      -       far below the others
1xN_batch0001  1      1,000  1,000     +0 %       -
1xN_batch0002  1      1,010  1,010     +1 %       -

NODES  JOBS  MEAN PER NODE  MEDIAN  SPREAD  MIN  MAX
1      3     936.7          1,000   12.6 %  800  1,010
values in samples/s

WORST NODES  VS MEDIAN  STATUS  EVIDENCE
ml-003       -20 %      -
ml-001       +0 %       -
ml-002       +1 %       -

1 of 3 jobs is far below the others of its size: 1xN_batch0003 (80 % of the median)
nothing judged: no threshold; --within 10% compares jobs of a size
"""
    )
    document = labctl("eval", "out", "--json").document
    assert (document["passed"], document["judged"], len(document["remarks"])) == (True, False, 1)
    assert [(job["status"], job["outlier"]) for job in document["jobs"]] == [
        ("PASS", False),
        ("PASS", False),
        ("PASS", True),
    ]


def test_a_job_without_a_number_fails_also_without_a_threshold(labctl: Labctl, out: Path) -> None:
    """Run eval without limits on a log without a number: exit code 5, FAIL."""
    write_log(out, "1xN_batch0004", ["ml-004"], "bye")
    answer = labctl("eval", "out")
    assert answer.code == 5
    assert "1xN_batch0004  1      -      -         -          FAIL    no-metric: nothing matches" in answer.out
    assert answer.out.splitlines()[-1] == (
        "FAIL: 1 of 4 jobs failed; nothing else judged: no threshold; --within 10% compares jobs of a size"
    )


def test_lines_have_a_hundred_columns_and_json_the_whole_message(labctl: Labctl, tmp_path: Path) -> None:
    """Run eval on long messages: lines have at most 100 columns, JSON has the whole message."""
    for number, value in enumerate((52.4839375, 24.72925, 52.4839375), 1):
        pair = [f"worker-{number}", f"worker-{number + 1}"]
        write_log(tmp_path / "out", f"2xN_batch000{number}", pair, throughput(2 * value))
    write_log(tmp_path / "out", "2xN_batch0004", ["worker-1", "worker-2"], "bye")
    options = ("out", "--min", "30", "--per-node", "--within", "20%", "--pattern", r"(?:Through)put: (\S+) samples/sec")
    answer = labctl("eval", *options)
    assert max(map(len, answer.out.splitlines())) <= 100
    assert re.search("^2xN_batch0002 .* below-min: 49.46 is below 60$", answer.out, re.MULTILINE)
    assert re.search(r"^2xN_batch0004 .* no-metric: nothing matches `[^`]*[.]{3}$", answer.out, re.MULTILINE)
    assert re.search("^worker-2 .* 2 of 3 jobs failed: 2xN_batch0002, 2xN_batch0004$", answer.out, re.MULTILINE)
    job = labctl("eval", *options, "--json").document["jobs"][1]
    assert job["message"] == (
        "49.46 is below 60 (30 on each of 2 nodes); 24.73 per node is 52.9 % below the median, 52.48"
    )


def test_json_has_jobs_sizes_and_nodes(labctl: Labctl, out: Path) -> None:
    """Run eval --json: limits, jobs with status and cause, sizes and nodes, exit code 5."""
    answer = labctl("eval", "out", "--within", "5%", "--json")
    document = answer.document
    assert (answer.code, document["passed"], document["unit"]) == (5, False, "samples/s")
    assert document["limits"] == {"min": None, "per_node": False, "within": 0.05}
    assert [(job["job"], job["status"], job["cause"]) for job in document["jobs"]] == [
        ("1xN_batch0001", "PASS", None),
        ("1xN_batch0002", "PASS", None),
        ("1xN_batch0003", "FAIL", "below-median"),
    ]
    assert document["sizes"][0]["median"] == 1000
    assert document["nodes"][0]["node"] == "ml-003"


def test_several_directories_are_one_evaluation(labctl: Labctl, out: Path) -> None:
    """Run eval on two directories, one named twice: one evaluation, each job once."""
    write_log(out.with_name("two"), "2xN_batch0001", ["ml-001", "ml-002"], throughput(1800))
    document = labctl("eval", "out", "two", "out", "--json").document
    assert [(size["size"], size["jobs"]) for size in document["sizes"]] == [(1, 3), (2, 1)]
    assert len(document["jobs"]) == 4


def test_of_many_jobs_the_failed_ones_are_shown(labctl: Labctl, tmp_path: Path) -> None:
    """Run eval on 60 jobs: all failed and 30 others are shown, the rest counted."""
    for number in range(60):
        write_log(tmp_path / "out", f"1xN_batch{number:04}", [f"ml-{number:03}"], throughput(590 + number))
    answer = labctl("eval", "out", "--min", "600")
    rows = re.findall(r"^1xN_batch\d+ .*(PASS|FAIL)", answer.out, re.MULTILINE)
    assert rows == ["FAIL"] * 10 + ["PASS"] * 30
    assert "... and 20 more jobs, 0 of them failed: --csv and --json list all" in answer.out
    assert answer.out.count("jobs failed: ") == 8
    assert "... and 2 more failed" in answer.out


def test_workloads_are_told_apart(labctl: Labctl, out: Path) -> None:
    """Run eval on two workloads: jobs and sizes are named with their workload."""
    (out / "opt-13b_1_1xN_batch0001.log").write_text("ml-001 slots=8\n\nThroughput: 70 samples/sec\n")
    answer = labctl("eval", "out")
    assert re.search(r"^out/opt-13b_1_1xN_batch0001 +1 +70 ", answer.out, re.MULTILINE)
    assert re.search(r"^opt-350m_1 +1 +3 ", answer.out, re.MULTILINE)


def test_repeats_of_a_record_are_one_row_with_a_spread(labctl: Labctl, tmp_path: Path) -> None:
    """Run eval on a record with two repeats: one row with mean and spread."""
    jobs = [
        BatchJob(
            job="1xN_batch0001",
            set="1node_1xN",
            repeat=repeat,
            hostfile="h",
            names=("a",),
            nodes=("worker-0",),
            log=f"1xN_batch0001_{repeat}.log",
            state="done",
            verdict="PASS",
            value=value,
        )
        for repeat, value in enumerate((590.0, 610.0), 1)
    ]
    batch = Batch(workload="opt", lab="demo", metric="throughput", timeout=9, began=0, jobs=tuple(jobs))
    record.create(tmp_path / "out", batch)
    assert labctl("eval", "out").out.splitlines()[:2] == [
        "JOB            NODES  VALUE  SPREAD  PER NODE  VS MEDIAN  STATUS  CAUSE",
        "1xN_batch0001  1      600    2.4 %   600       +0 %       -",
    ]


def test_files_are_written_also_where_it_fails(labctl: Labctl, out: Path, tmp_path: Path) -> None:
    """Run eval with three output files and a failed job: all are written, exit code 5."""
    files = ("--csv", "results/ours.csv", "--lambda-csv", "results/theirs.csv", "--junit", "junit.xml")
    assert labctl("eval", "out", "--min", "900", *files).code == 5
    assert (tmp_path / "results/ours.csv").read_bytes().count(b"\r\n") == 4
    # Lambda's script reads no integers.
    assert (tmp_path / "results/theirs.csv").read_bytes().splitlines()[1] == b"ml-001,-1,Fail"
    assert (tmp_path / "junit.xml").read_text().endswith("</testsuites>\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "`labctl eval` needs DIR..."),
        (["eval", "none"], "none: no such directory"),
        (["eval", "out", "--per-node"], "--per-node needs --min"),
        (["eval", "out", "--lambda-csv", "x.csv"], "--lambda-csv needs --min"),
        (["eval", "out", "--min", "nan"], "--min nan: not a finite number"),
        (["eval", "out", "--within", "0.05"], "--within 0.05: not a share"),
        (["eval", "out", "--within", "x%"], "--within x%: not a share"),
        (["eval", "out", "--within", "-5%"], "--within -5%: not a share"),
        (["eval", "out", "--within", "101%"], "--within 101%: not a share"),
        (["eval", "out", "--pattern", "("], "--pattern `(`"),
        (["eval", "out", "--pattern", "x"], "--pattern `x` has no capturing groups"),
    ],
)
def test_what_cannot_be_used_is_refused(labctl: Labctl, out: Path, arguments: list[str], message: str) -> None:
    """Run eval with invalid arguments: exit code 2 with the reason."""
    answer = labctl(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


def test_a_file_that_cannot_be_written_is_named(labctl: Labctl, out: Path) -> None:
    """Run eval with a folder as --csv: exit code 3 names it."""
    answer = labctl("eval", "out", "--csv", "out")
    assert answer.code == 3
    assert "cannot write out: Is a directory" in answer.err
