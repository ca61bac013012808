"""Report files of a validation (page and JSON), and the baseline: figures that later validations are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from labctl.errors import ConfigError
from labctl.reports import validation as pages
from labctl.reports.validation import Figure, Validation
from labctl.system import files
from labctl.system.decode import decode

INTERRUPTED = "interrupted"
"""Message of a step that Ctrl-C interrupted or kept from starting."""
DATA = "report.json"
"""JSON file of a validation, in the directory of its report."""
CHECKS = "checks"
"""Directory of the logs of the checks, beside it."""
FILE = "baseline.json"
"""Baseline file of the lab, in the lab directory."""


class Baseline(Struct, frozen=True, kw_only=True):
    """Figures of a validation that passed, for later validations to be compared with."""

    schema: int = 1
    lab: str
    profile: str
    recorded: str
    """Date, ISO 8601."""
    checks: Mapping[str, str]
    """Digest by check name: figures are compared only if the digests are equal."""
    hosts: Mapping[str, str]
    """Host by node. Figures of a node are compared with those of its host, of all nodes with those of as many nodes."""
    figures: tuple[Figure, ...]


class ValidationReport(Struct, frozen=True, kw_only=True):
    """A validation, and the paths of its page and its JSON file."""

    validation: Validation
    page: str
    data: str

    @property
    def exit_code(self) -> int:
        """Return 0 for PASS, 5 for FAIL, 6 for UNSURE, 3 for ERROR, 130 after Ctrl-C."""
        interrupted = any(step.message == INTERRUPTED for step in self.validation.steps)
        return 130 if interrupted else {"PASS": 0, "FAIL": 5, "UNSURE": 6, "ERROR": 3}[self.validation.verdict]


class BaselineReport(Struct, frozen=True, kw_only=True):
    """A validation and the baseline file that has its figures; ``file`` is empty if it did not pass."""

    report: ValidationReport
    file: str
    replaced: str = ""
    """Date of the baseline that was replaced; empty if none was."""


def new_directory(path: Path, *, numbered: bool) -> Path:
    """Create and return a report's directory, with ``numbered`` under a free name; ConfigError if it has a report.

    HostError if it cannot be created.
    """
    directory, number = path, 1
    while numbered and directory.exists():
        number += 1
        directory = path.with_name(f"{path.name}-{number}")
    if (directory / DATA).exists() or (directory / CHECKS).exists():
        raise ConfigError(f"{directory} has the report of a validation", hint="--out names another directory")
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=not numbered)
    return directory


def read(path: Path) -> Baseline | None:
    """Read a baseline file; None if it does not exist. ConfigError if it cannot be read."""
    try:
        return decode(path.read_bytes(), Baseline)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        hint = f"rm {path}, then `labctl baseline` records another"
        raise ConfigError(f"{path}: cannot be read: {error}", hint=hint) from error


def write(directory: Path, validation: Validation) -> ValidationReport:
    """Write report.html and the JSON file of a validation; return it with both paths. HostError if that fails."""
    page, data = directory / "report.html", directory / DATA
    pages.write(page, validation)
    _write(data, validation)
    return ValidationReport(validation=validation, page=str(page), data=str(data))


def record(path: Path, report: ValidationReport, before: Baseline | None = None) -> BaselineReport:
    """Write a passed validation's figures to the baseline file; return a report, ``file`` empty if not passed.

    ``before`` is the baseline that is replaced.
    """
    validation = report.validation
    if validation.verdict != "PASS":
        return BaselineReport(report=report, file="")
    baseline = Baseline(
        lab=validation.lab,
        profile=validation.profile,
        recorded=validation.started,
        checks=validation.checks,
        hosts={node.node: node.host for node in validation.nodes},
        figures=validation.figures,
    )
    _write(path, baseline)
    return BaselineReport(report=report, file=str(path), replaced=before.recorded[:10] if before else "")


def _write(path: Path, document: Struct) -> None:
    """Write a struct to a file as indented JSON, with mode 644. HostError if that fails."""
    files.write(path, msgspec.json.format(msgspec.json.encode(document)).decode() + "\n", mode=0o644)
