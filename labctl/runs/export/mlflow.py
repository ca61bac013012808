"""A run logged to MLflow by its client, which the user has installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.owner import owner
from labctl.errors import ConfigError, HostError
from labctl.model import Result
from labctl.records import store
from labctl.runs import compare
from labctl.runs.compare import RecordedRun
from labctl.runs.export import points
from labctl.system import human

URI = "MLFLOW_TRACKING_URI"
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
RUN_ID = "labctl.run_id"
"""Tag by which a run that was logged before is found."""
LIMITS = {"metrics": 1000, "params": 100}
"""Entities in a request, at most."""
LONGEST = {"params": 6000, "tags": 5000}
"""Characters of a value, at most, as servers of all kinds take them."""
ARTIFACTS = (store.RESULT, store.OUTPUT)
LARGEST_ARTIFACT = 10 << 20
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
# What a request that failed says last, as `Caused by NewConnectionError("HTTPConnection(...): ... refused")`.
_CAUSED_BY = re.compile(r"\(Caused by \w+\(\W*(?:\w+\([^)]*\): )?(.*?)[\"']?\)\)")
LONGEST_REASON = 600
T = TypeVar("T")


class LoggedRun(Struct, frozen=True, kw_only=True):
    """A run in MLflow."""

    run_id: str
    experiment: str
    url: str
    """Its page; empty where the tracking URI is not of a server's pages."""
    is_new: bool
    """False if it had been logged before; then only its tags were written."""
    left_out: tuple[str, ...] = ()
    """Files that were not logged, and why."""


class Tracking(Struct, frozen=True, kw_only=True):
    """A client of MLflow, with the entities that it takes and the errors that it raises."""

    client: Any
    entities: Any
    errors: tuple[type[Exception], ...]
    uri: str
    """Address without a password."""
    experiment: str
    """Name of the experiment; empty for the workload's."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Convert an error of the client in the block to a HostError with the address and what came back."""
        try:
            yield
        except self.errors as error:
            hint = f"check {URI}, and that the server runs"
            if self.uri.startswith("http"):
                hint = f"{hint}: curl {self.uri}/health"
            raise HostError(f"cannot log to MLflow at {self.uri}: {_reason(error)}", hint=hint) from error


def connect(environ: Mapping[str, str]) -> Tracking:
    """Return a client of the tracking server that the environment names. ConfigError if unset or not installed."""
    uri = environ.get(URI)
    if not uri:
        raise ConfigError(f"{URI} is not set", hint=f"export {URI}=http://HOST:5000")
    try:
        from mlflow import MlflowClient, entities
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        hint = "pipx inject labctl-train mlflow-skinny, or pip install mlflow-skinny where labctl is installed"
        raise ConfigError(f"cannot import MLflow: {error}", hint=hint) from error
    # Stores without a server raise those of files and missing packages.
    tracking = Tracking(
        client=None,
        entities=entities,
        errors=(MlflowException, ImportError, OSError),
        uri=without_password(uri).rstrip("/"),
        experiment=environ.get(EXPERIMENT, ""),
    )
    with tracking.asking():
        return replace(tracking, client=MlflowClient(tracking_uri=uri))


def without_password(text: str) -> str:
    """Return a text without the names and passwords of its URLs."""
    return _PASSWORD.sub("", text)


def _reason(error: Exception) -> str:
    """Return the first line of a client's error, or its cause if it quotes one, without passwords."""
    text = without_password(str(error).strip().partition("\n")[0])
    cause = _CAUSED_BY.search(text)
    return human.shortened(cause[1] if cause else text, LONGEST_REASON)


def log(tracking: Tracking, lab: Path, run: RecordedRun) -> LoggedRun:
    """Log an ended run, unless its experiment has it already: then only its tags, as its note may be new.

    A run that was logged in part, as its export was stopped, is replaced. HostError with what came back if it fails.
    """
    client, tags = tracking.client, _tags(lab, run)
    name = tracking.experiment or run.result.workload
    with tracking.asking():
        experiment = _experiment(client, name)
        earlier = _earlier(client, experiment, run.result.run_id)
        if earlier and earlier.status != "RUNNING":
            for key, value in tags.items():
                client.set_tag(earlier.run_id, key, value)
            return _logged(tracking, earlier.run_id, experiment, name, is_new=False)
        if earlier:
            client.delete_run(earlier.run_id)
        run_id, left_out = _log_new(tracking, lab, run, experiment, tags)
        return _logged(tracking, run_id, experiment, name, is_new=True, left_out=left_out)


def _log_new(
    tracking: Tracking, lab: Path, run: RecordedRun, experiment: str, tags: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """Log a run that the experiment does not have; return its id there, and which files were left out, and why."""
    client, result, began = tracking.client, run.result, round(points.began(run.result) * 1000)
    run_id = client.create_run(experiment, start_time=began, tags=tags, run_name=result.run_id).info.run_id
    _log_values(tracking, lab, run, run_id)
    left_out = tuple(_log_artifacts(tracking, store.directory(lab, result.run_id), run_id))
    # Until now it is `RUNNING`, which tells that it is not complete.
    client.set_terminated(run_id, _status(result), began + round(result.seconds * 1000))
    return run_id, left_out


def _logged(tracking: Tracking, run_id: str, experiment: str, name: str, **fields: Any) -> LoggedRun:
    """Return a logged run with the address of its page, if the server is reached by HTTP."""
    page = f"{tracking.uri}/#/experiments/{experiment}/runs/{run_id}" if tracking.uri.startswith("http") else ""
    return LoggedRun(run_id=run_id, experiment=name, url=page, **fields)


def _experiment(client: Any, name: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name))


def _earlier(client: Any, experiment: str, run_id: str) -> Any:
    """Return what MLflow tells of the run that an earlier export logged; None if there is none."""
    runs = client.search_runs([experiment], filter_string=f"tags.`{RUN_ID}` = '{run_id}'", max_results=1)
    return runs[0].info if runs else None


def _status(result: Result) -> str:
    """Return MLflow's status of an ended run."""
    if result.cause == "interrupted":
        return "KILLED"
    return "FINISHED" if result.verdict == "PASS" else "FAILED"


def _tags(lab: Path, run: RecordedRun) -> dict[str, str]:
    """Return a run's verdict, origin and note as tags, those that it has; MLflow's own names where it has one."""
    result = run.result
    clones = compare.versions(store.directory(lab, result.run_id)).get("code") or ()
    commit = next((clone["commit"] for clone in clones), "")
    tags = {
        RUN_ID: result.run_id,
        "labctl.verdict": result.verdict,
        "labctl.cause": result.cause,
        "labctl.message": result.message,
        "labctl.workload": result.workload,
        "labctl.lab": result.lab,
        "labctl.image": run.facts.get("image"),
        "labctl.command": run.command,
        "mlflow.source.name": run.command,
        "mlflow.source.git.commit": commit,
        "mlflow.user": owner().partition("@")[0],
        "mlflow.note.content": store.summary(lab, result.run_id).note,
    }
    return {name: text[: LONGEST["tags"]] for name, text in tags.items() if text}


def _log_values(tracking: Tracking, lab: Path, run: RecordedRun, run_id: str) -> None:
    """Log hyperparameters, then samples with step and time, in as few requests as the server takes."""
    entities, began = tracking.entities, points.began(run.result)
    texts = points.parameters(run).items()
    parameters = (entities.Param(name, text[: LONGEST["params"]]) for name, text in texts)
    metrics = (
        entities.Metric(sample.metric, sample.number, round(1000 * (began + (sample.seconds or 0))), step)
        for step, sample in points.stepped(points.samples(lab, run.result.run_id))
    )
    for kind, values in (("params", parameters), ("metrics", metrics)):
        for batch in _batches(values, LIMITS[kind]):
            tracking.client.log_batch(run_id, **{kind: batch})


def _batches(values: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the values in lists of at most this size."""
    values = iter(values)
    while batch := list(islice(values, size)):
        yield batch


def _log_artifacts(tracking: Tracking, record: Path, run_id: str) -> Iterator[str]:
    """Log the result and the output of a run; yield why a file was left out, as a large one or where none can go.

    Where artifacts are kept is often another machine than the server, with a client of its own.
    """
    for name in ARTIFACTS:
        try:
            size = (record / name).stat().st_size
            if size > LARGEST_ARTIFACT:
                yield f"{name}: {human.size(size)}, more than {human.size(LARGEST_ARTIFACT)}"
                continue
            tracking.client.log_artifact(run_id, str(record / name))
        except tracking.errors as error:
            yield f"{name}: {_reason(error)}"
