"""Export a run: a table in CSV, TensorBoard event files, JUnit XML for CI servers, a run of MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.model import Result
from labctl.runs import compare
from labctl.runs.compare import RecordedRun
from labctl.runs.export import csv, junit, mlflow, points, tensorboard
from labctl.runs.export.mlflow import LoggedRun
from labctl.system import files


class Formats(Struct, frozen=True, kw_only=True):
    """Formats to export: a file for each path, and a run in MLflow."""

    csv: Path | None = None
    tensorboard: Path | None = None
    junit: Path | None = None
    mlflow: bool = False


class ExportedRun(Struct, frozen=True, kw_only=True):
    """A run, the files that were written, and its run in MLflow; None if it was not logged."""

    run_id: str
    files: tuple[str, ...]
    mlflow: LoggedRun | None = None


def write(lab: Path, result: Result, formats: Formats, environ: Mapping[str, str]) -> ExportedRun:
    """Write a run in these formats; return absolute paths. ``environ`` has the address of MLflow's server.

    ConfigError for a directory in place of a file, for CSV of a run without samples, and if MLflow cannot be used.
    """
    _require_files(formats, result.run_id)
    tracking = mlflow.connect(environ) if formats.mlflow else None
    recorded = compare.read(lab, result)
    paths = tuple(str(path.absolute()) for path in _write_files(lab, recorded, formats))
    logged = mlflow.log(tracking, lab, recorded) if tracking else None
    return ExportedRun(run_id=result.run_id, files=paths, mlflow=logged)


def _write_files(lab: Path, run: RecordedRun, formats: Formats) -> Iterator[Path]:
    """Write the files that have a path, first the table, which may be refused; yield the path of each."""
    result = run.result
    if formats.csv:
        files.write(formats.csv.absolute(), _table(lab, result.run_id), mode=0o644)
        yield formats.csv
    if formats.tensorboard:
        samples = points.samples(lab, result.run_id)
        yield tensorboard.event_file(formats.tensorboard, result, samples, points.parameters(run))
    if formats.junit:
        files.write(formats.junit.absolute(), junit.junit_xml(result), mode=0o644)
        yield formats.junit


def _require_files(formats: Formats, run_id: str) -> None:
    """Raise ConfigError if a path that is to be a file is a directory."""
    for option, path, suffix in (("--csv", formats.csv, "csv"), ("--junit", formats.junit, "xml")):
        if path and path.is_dir():
            hint = f"name a file: {option} {path / run_id}.{suffix}"
            raise ConfigError(f"{option} {path}: is a directory", hint=hint)


def _table(lab: Path, run_id: str) -> str:
    """Render the samples of a run as CSV. ConfigError if it has none."""
    samples = points.samples(lab, run_id)
    first = next(samples, None)
    if first is None:
        hint = "a run prints metrics that its workload.yml or `labctl run --metric NAME=REGEX` declares"
        raise ConfigError(f"run {run_id} has no metrics", hint=hint)
    return csv.table(chain([first], samples))
