"""What is kept of a validation: its page, its data, and figures that later validations are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from labctl.errors import ConfigError
from labctl.reports import validation as pages
from labctl.reports.validation import Figure, Validation
from labctl.system import files

INTERRUPTED = "interrupted"
"""What a step says that Ctrl-C ended, or kept from beginning."""
DATA = "report.json"
"""The data of a validation, in the directory of its report."""
FILE = "baseline.json"
"""The lab's baseline, in the lab directory."""


class Baseline(Struct, frozen=True, kw_only=True):
    """The figures of a validation that later ones are compared with."""

    schema: int = 1
    lab: str
    profile: str
    recorded: str
    """Date, ISO 8601."""
    checks: Mapping[str, str]
    """Digests of the checks: figures are compared with those of the same check."""
    hosts: Mapping[str, str]
    """The nodes' hosts: figures of a node are compared with its own, of all nodes together with those of as many."""
    figures: tuple[Figure, ...]


class ValidationReport(Struct, frozen=True, kw_only=True):
    """A validation, and the page and the data that were written of it."""

    validation: Validation
    page: str
    data: str

    @property
    def exit_code(self) -> int:
        """5 where a check failed, 3 where the environment did not allow any, 130 after Ctrl-C."""
        interrupted = any(step.message == INTERRUPTED for step in self.validation.steps)
        return 130 if interrupted else {"PASS": 0, "FAIL": 5, "ERROR": 3}[self.validation.verdict]


class BaselineReport(Struct, frozen=True, kw_only=True):
    """A validation whose figures were recorded in a file; empty if it did not pass."""

    report: ValidationReport
    file: str
    replaced: str = ""
    """The date of the baseline that was there."""


def new_directory(path: Path, *, numbered: bool) -> Path:
    """Make the directory of a report; one that has another is refused, or gets a number behind its name.

    ConfigError; HostError where it cannot be made.
    """
    found, number = path, 1
    while numbered and found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    if (found / DATA).exists() or (found / "checks").exists():
        raise ConfigError(f"{found} has the report of a validation", hint="--out names another directory")
    with files.writing(found):
        found.mkdir(parents=True, exist_ok=not numbered)
    return found


def read(path: Path) -> Baseline | None:
    """The baseline of a file; None where there is none. ConfigError where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        hint = f"rm {path}, then `labctl baseline` records another"
        raise ConfigError(f"{path}: cannot be read: {error}", hint=hint) from error


def write(directory: Path, validation: Validation) -> ValidationReport:
    """Write the page and the data of a validation. HostError where that fails."""
    page, data = directory / "report.html", directory / DATA
    pages.write(page, validation)
    _write(data, validation)
    return ValidationReport(validation=validation, page=str(page), data=str(data))


def record(path: Path, report: ValidationReport, before: Baseline | None = None) -> BaselineReport:
    """Record the figures of a validation that passed, in place of those before. HostError where that fails."""
    found = report.validation
    if found.verdict != "PASS":
        return BaselineReport(report=report, file="")
    baseline = Baseline(
        lab=found.lab,
        profile=found.profile,
        recorded=found.started,
        checks=found.checks,
        hosts={one.node: one.host for one in found.nodes},
        figures=found.figures,
    )
    _write(path, baseline)
    return BaselineReport(report=report, file=str(path), replaced=before.recorded[:10] if before else "")


def _write(path: Path, document: Struct) -> None:
    files.write(path, msgspec.json.format(msgspec.json.encode(document)).decode() + "\n", mode=0o644)
