"""The text of a validation."""

from __future__ import annotations

from support.commandline import Labctl

from labctl.batches.baseline import ValidationReport
from labctl.cli.validate import report_text
from labctl.reports.validation import Figure, StepResult, Validation

SPEED = Figure(
    step="matmul", what="tflops", node="worker-0", value=1.25, unit="TFLOP/s", passed=True, values=(1.2, 1.25, 1.3)
)
ONCE = Figure(step="allreduce", what="busbw", value=11.0, unit="GB/s", passed=None)
REPORT = ValidationReport(
    validation=Validation(
        lab="red",
        profile="quick",
        started="2026-11-20T14:15:02Z",
        seconds=42,
        verdict="PASS",
        message="All 2 nodes are good.",
        steps=(StepResult(name="matmul", status="passed", seconds=4),),
        figures=(SPEED, ONCE),
    ),
    page="report.html",
    data="report.json",
)


def test_each_measurement_is_shown_on_request() -> None:
    """Format the report verbosely: each figure with all its values."""
    assert "matmul: tflops    worker-0  TFLOP/s  1.2  1.25  1.3" in report_text(REPORT, verbose=True)
    assert "allreduce: busbw  all       GB/s     11" in report_text(REPORT, verbose=True)


def test_measurements_are_not_shown_unasked() -> None:
    """Format the report: no single values, only verdict and page."""
    assert report_text(REPORT).split("\n\n")[1:] == ["PASS: All 2 nodes are good.\nreport: report.html"]


def test_the_profile_that_is_printed_is_the_one_that_the_file_of_hosts_names(labctl: Labctl) -> None:
    """Print the profile without --profile: that of the hosts' file, as validate runs it; --profile goes before it."""
    labctl.env("LAB_HOSTS=hosts.env\n")
    labctl.write("hosts.env", "MASTER_IP=10.0.0.1\nMEMBER_IPS=10.0.0.2\nTEST_CONFIGURATION=full\n")
    full = labctl("validate", "--profile", "full", "--print-profile").out
    assert labctl("validate", "--print-profile").out == full
    assert labctl("validate", "--profile", "quick", "--print-profile").out != full
