from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from support.logs import throughput, write_log

from labctl.batches import export, logs
from labctl.batches.evaluate import Limits, judge


def lambda_csv(directory: Path, **limits: float) -> bytes:
    """Return Lambda's CSV of the directory's logs with minimum 600; per node if any limit is named."""
    return export.lambda_results(logs.find(directory), Limits(min=600, per_node=bool(limits))).encode()


def test_lambdas_csv_of_lambdas_logs_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """Export five logs of one and two nodes, failed and empty: the CSV equals Lambda's byte for byte."""
    write_log(tmp_path, "2xN_batch0002", ["ml-003", "ml-004"], "ml-003: Throughput: 599.9999 samples/sec")
    write_log(tmp_path, "2xN_batch0001", ["ml-001", "ml-002"], "ml-001: Throughput: 600.0000 samples/sec", "bye")
    write_log(tmp_path, "2xN_batch0003", ["ml-005", "ml-006"], "ml-005: CUDA out of memory")
    write_log(tmp_path, "1xN_batch0001", ["ml-001"], "Throughput: 943.2510 samples/sec")
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "notes.txt").write_text("Throughput: 1.0 samples/sec")
    assert lambda_csv(tmp_path) == (
        b"Hostnames,Throughput (samples/sec),Status\r\n"
        b",-1,Fail\r\n"
        b"ml-001,943.251,Success\r\n"
        b'"ml-001, ml-002",600.0,Success\r\n'
        b'"ml-003, ml-004",599.9999,Fail\r\n'
        b'"ml-005, ml-006",-1,Fail\r\n'
    )


def test_lambdas_csv_takes_what_lambdas_script_takes(tmp_path: Path) -> None:
    """Export a log with odd lines: the first decimal number counts, and the words before slots= are the hosts."""
    lines = ("found: 2 slots=4", throughput(7), throughput("nan"), throughput("1.5"), throughput("900.5"), "x slots=1")
    write_log(tmp_path, "1xN_batch0001", ["ml-001"], "slots= Throughput: 3.5 samples/sec", *lines)
    assert lambda_csv(tmp_path).splitlines()[1] == b'"ml-001, slots=, found:",1.5,Fail'


def test_lambdas_csv_reads_lines_that_end_in_any_way(tmp_path: Path) -> None:
    """Export a log with mixed line ends and invalid UTF-8: hosts and number are found."""
    (tmp_path / "a.log").write_bytes(b"ml-001 slots=8\r\n 10%\rml-002 slots=8\n\xff\xfe\nThroughput: 700.5 samples/sec")
    assert lambda_csv(tmp_path).splitlines()[1] == b'"ml-001, ml-002",700.5,Success'


def test_lambdas_threshold_is_multiplied_by_the_nodes(tmp_path: Path) -> None:
    """Export pairs with per_node: 1199.5 fails and 1200.0 succeeds against 600."""
    write_log(tmp_path, "2xN_batch0001", ["a", "b"], throughput("1199.5"))
    write_log(tmp_path, "2xN_batch0002", ["c", "d"], throughput("1200.0"))
    assert lambda_csv(tmp_path, per_node=True).splitlines()[1:] == [b'"a, b",1199.5,Fail', b'"c, d",1200.0,Success']


def test_lambdas_csv_has_a_line_for_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    """Export a folder named a.log: a line without hosts, -1 and Fail."""
    (tmp_path / "a.log").mkdir()
    assert lambda_csv(tmp_path).splitlines()[1:] == [b",-1,Fail"]


def test_the_csv_has_job_cause_and_spread(tmp_path: Path) -> None:
    """Export three jobs as CSV: every column, with cause and message for the failed ones."""
    directory = tmp_path / "out"
    write_log(directory, "1xN_batch0001", ["ml-001"], throughput(1000))
    write_log(directory, "1xN_batch0002", ["ml-002"], "nothing")
    write_log(directory, "2xN_batch0001", ["ml-001", "ml-002"], throughput(1500))
    text = export.results_csv(judge(logs.read(directory), Limits(min=800, per_node=True)))
    assert text.split("\r\n") == [
        "job,set,workload,hostnames,nodes,value,unit,per_node,vs_median,repeats,spread,status,cause,message",
        "1xN_batch0001,out,opt-350m_1,ml-001,1,1000.0,samples/s,1000.0,0.0,1,,PASS,,",
        r"1xN_batch0002,out,opt-350m_1,ml-002,1,,samples/s,,,1,,FAIL,no-metric,"
        r"nothing matches `Throughput: (\S+) samples/sec`",
        '2xN_batch0001,out,opt-350m_1,"ml-001, ml-002",2,1500.0,samples/s,750.0,0.0,1,,FAIL,below-min,'
        "1500 is below 1600 (800 on each of 2 nodes)",
        "",
    ]


def test_junit_has_a_case_for_each_job_and_node(tmp_path: Path) -> None:
    """Export two jobs as JUnit XML: a test case for each job and node, failures with type and message."""
    directory = tmp_path / "out"
    write_log(directory, "1xN_batch0001", ["ml-001"], throughput(600))
    write_log(directory, "1xN_batch0002", ["ml-002"], throughput("<nan>"))
    text = export.junit_xml(judge(logs.read(directory), Limits(min=600)))
    assert (
        text
        == """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="labctl eval">
  <testsuite name="jobs" tests="2" failures="1">
    <testcase classname="out" name="1xN_batch0001" />
    <testcase classname="out" name="1xN_batch0002">
      <failure type="no-metric" message="`&lt;nan&gt;` is not a number" />
    </testcase>
  </testsuite>
  <testsuite name="nodes" tests="2" failures="1">
    <testcase classname="nodes" name="ml-002">
      <failure type="jobs-failed" message="1 of 1 jobs failed: 1xN_batch0002 (no-metric)" />
    </testcase>
    <testcase classname="nodes" name="ml-001" />
  </testsuite>
</testsuites>
"""
    )


def test_junit_is_xml_whatever_a_log_is_called(tmp_path: Path) -> None:
    """Export a log whose name and text have control characters: the XML parses."""
    (tmp_path / "\x1b[31m\udcff&.log").write_bytes(b"\0 slots=8\n\nThroughput: \x02 samples/sec\n")
    root = ElementTree.fromstring(export.junit_xml(judge(logs.read(tmp_path), Limits())))  # noqa: S314
    assert [case.get("name") for case in root.iter("testcase")] == ["?[31m?&", "?"]
