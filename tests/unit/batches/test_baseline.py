from __future__ import annotations

import json
from pathlib import Path

import pytest

from labctl.batches import baseline
from labctl.errors import ConfigError, HostError
from labctl.reports.validation import Figure, Validation

PASSED = Validation(
    lab="red",
    profile="quick",
    started="2026-11-20T14:15:02Z",
    seconds=60,
    verdict="PASS",
    message="All nodes are good.",
    figures=(Figure(step="disk", what="disk", node="worker-0", value=2.5, unit="GB/s", passed=None),),
)
FAILED = Validation(lab="red", profile="quick", started="", seconds=1, verdict="FAIL", message="worker-1 is slow.")


def test_a_validation_is_written_as_a_page_and_as_json(tmp_path: Path) -> None:
    """Write a validation: the page has its message, the JSON its schema and figures."""
    report = baseline.write(tmp_path / "reports/1", PASSED)
    assert "All nodes are good." in Path(report.page).read_text()
    document = json.loads(Path(report.data).read_text())
    assert (document["schema"], document["figures"][0]["value"]) == (1, 2.5)


def test_figures_of_a_validation_that_passed_are_recorded(tmp_path: Path) -> None:
    """Record a validation with verdict PASS: the baseline file has its figures and start."""
    path = tmp_path / "baseline.json"
    report = baseline.write(tmp_path, PASSED)
    assert baseline.record(path, report).file == str(path)
    parsed = baseline.read(path)
    assert parsed
    assert (parsed.recorded, parsed.figures) == (PASSED.started, PASSED.figures)


def test_a_report_is_never_written_over_another(tmp_path: Path) -> None:
    """Ask for a report directory: ConfigError if it has a report, HostError for a file, a number added if wanted."""
    directory = baseline.new_directory(tmp_path / "out", numbered=False)
    baseline.write(directory, PASSED)
    with pytest.raises(ConfigError, match="has the report of a validation"):
        baseline.new_directory(directory, numbered=False)
    (tmp_path / "file").touch()
    with pytest.raises(HostError):
        baseline.new_directory(tmp_path / "file", numbered=False)
    usual = [baseline.new_directory(tmp_path / "today", numbered=True).name for _ in range(3)]
    assert usual == ["today", "today-2", "today-3"]


def test_nothing_is_recorded_of_a_validation_that_failed(tmp_path: Path) -> None:
    """Record a validation with verdict FAIL: no file is written."""
    path = tmp_path / "baseline.json"
    assert baseline.record(path, baseline.write(tmp_path, FAILED)).file == ""
    assert baseline.read(path) is None


def test_a_broken_baseline_is_an_error_with_its_file(tmp_path: Path) -> None:
    """Read a baseline of {}: ConfigError names the file."""
    path = tmp_path / "baseline.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"baseline\.json: cannot be read"):
        baseline.read(path)
