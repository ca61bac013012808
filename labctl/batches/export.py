"""Export an evaluation: CSV, the CSV of Lambda's eval_batch.py, JUnit XML for CI servers."""

from __future__ import annotations

import csv as tables
import io
from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

from labctl.batches import logs
from labctl.batches.evaluate import Evaluation, JobResult, Limits, judge
from labctl.runs.export.junit import xml_document, xml_text
from labctl.system import files

COLUMNS = (
    "job", "set", "workload", "hostnames", "nodes", "value", "unit", "per_node", "vs_median", "repeats", "spread",
    "status", "cause", "message",
)  # fmt: skip


def evaluate(
    directories: Iterable[Path],
    limits: Limits,
    *,
    pattern: str = "",
    csv: Path | None = None,
    lambda_csv: Path | None = None,
    junit: Path | None = None,
) -> Evaluation:
    """Judge batches or logs of directories together; write CSV, Lambda's CSV and JUnit XML to given paths."""
    named = tuple(dict.fromkeys(directories))
    evaluation = judge([run for directory in named for run in logs.read(directory, pattern)], limits)
    if csv:
        _write(csv, results_csv(evaluation))
    if junit:
        _write(junit, junit_xml(evaluation))
    if lambda_csv:
        _write(lambda_csv, lambda_results([log for directory in named for log in logs.paths(directory)], limits))
    return evaluation


def _write(path: Path, text: str) -> None:
    """Write text to a file, newlines as they are, creating its directory. HostError if that fails."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def results_csv(evaluation: Evaluation) -> str:
    """Render CSV with a header and one line per job; shares are fractions, not per cent, unknown values empty."""
    return _csv(COLUMNS, (_row(job, evaluation.unit) for job in evaluation.jobs))


def _row(job: JobResult, unit: str) -> tuple[object, ...]:
    """Return a job's values in the order of COLUMNS, its nodes joined by commas."""
    numbers = (job.size, job.value, unit, job.per_node, job.vs_median, job.repeats, job.spread)
    return job.job, job.set, job.workload, ", ".join(job.nodes), *numbers, job.status, job.cause, job.message


def lambda_results(paths: Iterable[str], limits: Limits) -> str:
    """Render the CSV of Lambda's eval_batch.py for these logs, byte for byte; its threshold is ``limits.min``."""
    rows = []
    for path in paths:
        hosts, value = logs.lambda_row(path)
        least = (limits.min or 0) * (len(hosts) if limits.per_node else 1)
        success = value is not None and value >= least
        throughput = -1 if value is None else value
        rows.append((", ".join(hosts), throughput, "Success" if success else "Fail"))
    return _csv(("Hostnames", "Throughput (samples/sec)", "Status"), rows)


def _csv(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Render a header and rows as CSV text."""
    text = io.StringIO()
    writer = tables.writer(text)
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def junit_xml(evaluation: Evaluation) -> str:
    """Render JUnit XML with a suite of jobs and a suite of nodes, as Jenkins and GitLab read it."""
    root = Element("testsuites", name="labctl eval")
    jobs = [(job.set, job.job, job.status, job.cause or "", job.message) for job in evaluation.jobs]
    nodes = [("nodes", node.node, node.status, "jobs-failed", node.message) for node in evaluation.nodes]
    for name, cases in (("jobs", jobs), ("nodes", nodes)):
        failures = sum(status == "FAIL" for _, _, status, _, _ in cases)
        suite = SubElement(root, "testsuite", name=name, tests=str(len(cases)), failures=str(failures))
        for group, case, status, cause, message in cases:
            element = SubElement(suite, "testcase", classname=xml_text(group), name=xml_text(case))
            if status == "FAIL":
                SubElement(element, "failure", type=xml_text(cause), message=xml_text(message))
    return xml_document(root)
