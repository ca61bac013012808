"""A run logged to a stand-in for MLflow's client, which keeps what it is given as a server does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support import records

from labctl.errors import HostError
from labctl.model import Result
from labctl.records import store
from labctl.runs import compare
from labctl.runs.export import mlflow

RUN = "20261125-203600-opt-tiny-0d07"
BEGAN = 1795638975000


class Param(NamedTuple):
    key: str
    value: str


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Client:
    """Experiments and runs of a server, with the methods of MlflowClient that an export calls."""

    def __init__(self) -> None:
        """Start without experiments and runs."""
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self.calls: list[int] = []
        """Number of metrics in each call that had some."""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def search_runs(self, experiments: Sequence[str], filter_string: str, max_results: int) -> list[Any]:
        _, wanted, _ = filter_string.split("'")
        matching = (run for run in self.runs.values() if run.tags["labctl.run_id"] == wanted)
        return [run for run in matching if run.experiment in experiments][:max_results]

    def create_run(self, experiment: str, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        info = SimpleNamespace(run_id=f"m{len(self.runs) + 1}", status="RUNNING", start=start_time, name=run_name)
        run = SimpleNamespace(info=info, experiment=experiment, tags=dict(tags), params={}, metrics=[], artifacts=[])
        self.runs[info.run_id] = run
        return run

    def delete_run(self, run_id: str) -> None:
        self.runs[run_id].tags["labctl.run_id"] = "deleted"

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id].tags[key] = value

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        assert (len(metrics) <= 1000, len(params) <= 100) == (True, True)
        self.calls += [len(metrics)] if metrics else []
        self.runs[run_id].metrics += metrics
        self.runs[run_id].params.update(params)

    def log_artifact(self, run_id: str, path: str) -> None:
        self.runs[run_id].artifacts.append(Path(path).name)

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.runs[run_id].info.status, self.runs[run_id].info.end = status, end_time


@pytest.fixture
def client() -> Client:
    return Client()


def exported(lab: Path, client: Client, **changes: Any) -> mlflow.LoggedRun:
    """Log the record to the client by an address with a password; return what labctl answers."""
    fields = {
        "client": client,
        "entities": SimpleNamespace(Param=Param, Metric=Metric),
        "errors": (OSError,),
        "uri": "http://127.0.0.1:5000",
        "experiment": "",
    }
    return mlflow.log(mlflow.Tracking(**{**fields, **changes}), lab, compare.read(lab, result(lab)))


def result(lab: Path) -> Result:
    """Return the result of the record."""
    recorded = store.read(lab, RUN).result
    assert recorded
    return recorded


def test_a_run_is_logged_with_its_name_parameters_metrics_tags_and_times(tmp_path: Path, client: Client) -> None:
    """Log a run that passed: all that MLflow shows of a run, and no secret."""
    arguments = ("lr=0.1", "hub_token=hidden", "--steps", "40", "--api-key", "hidden")
    code = {"code": [{"path": "/work", "commit": "abc123", "dirty": False}]}
    request = {"workload": "opt-tiny", "options": {"rehearse": True}}
    records.write(tmp_path, RUN, losses=[8.0, None], arguments=arguments, versions=code, request=request)
    logged = exported(tmp_path, client)
    run = client.runs["m1"]
    assert (logged.experiment, logged.is_new, logged.left_out) == ("opt-tiny", True, ())
    assert logged.url == "http://127.0.0.1:5000/#/experiments/1/runs/m1"
    info = run.info
    assert (info.name, info.status, info.start, info.end) == (RUN, "FINISHED", BEGAN, BEGAN + 23_400)
    assert (run.params["arguments"], run.params["steps"]) == ("lr=0.1 hub_token=[REDACTED]", "40")
    assert (run.params["api-key"], run.params["ranks"]) == ("[REDACTED]", "2")
    assert "hidden" not in str(run)
    assert run.metrics[0] == Metric("loss", 8.0, BEGAN + 1000, 1)
    assert str(run.metrics[1]) == str(Metric("loss", float("nan"), BEGAN + 2000, 2))
    assert run.artifacts == ["result.json", "output.log"]
    expected = {
        "labctl.run_id": RUN, "labctl.verdict": "PASS", "labctl.lab": "demo", "labctl.image": "labctl/cpu",
        "labctl.command": "labctl run opt-tiny --rehearse", "mlflow.source.git.commit": "abc123",
    }  # fmt: skip
    assert expected.items() <= run.tags.items()
    assert "labctl.cause" not in run.tags


@pytest.mark.parametrize(
    ("verdict", "cause", "status"),
    [("FAIL", "criteria", "FAILED"), ("ERROR", "timeout", "FAILED"), ("ERROR", "interrupted", "KILLED")],
)
def test_a_run_that_did_not_pass_has_the_status_of_its_end(
    tmp_path: Path, client: Client, verdict: str, cause: str, status: str
) -> None:
    """Log runs that failed or were stopped: FAILED or KILLED, with the cause as a tag."""
    records.write(tmp_path, RUN, verdict=verdict, cause=cause)
    exported(tmp_path, client)
    assert (client.runs["m1"].info.status, client.runs["m1"].tags["labctl.cause"]) == (status, cause)


def test_an_experiment_that_is_named_is_used(tmp_path: Path, client: Client) -> None:
    """Log to a named experiment that exists: no other is created."""
    client.create_experiment("team")
    records.write(tmp_path, RUN)
    assert exported(tmp_path, client, experiment="team").experiment == "team"
    assert client.experiments == {"team": "1"}


def test_many_samples_take_a_call_per_thousand(tmp_path: Path, client: Client) -> None:
    """Log 2,500 losses: three calls, all samples in order."""
    records.write(tmp_path, RUN, losses=[float(step) for step in range(2500)])
    exported(tmp_path, client)
    assert client.calls == [1000, 1000, 500]
    assert [metric.value for metric in client.runs["m1"].metrics] == [*range(2500)]


def test_a_run_that_was_logged_before_gets_its_tags_only(tmp_path: Path, client: Client) -> None:
    """Log a run twice: one run in MLflow with each metric once; a tag that was removed is back."""
    records.write(tmp_path, RUN, losses=[8.0])
    exported(tmp_path, client)
    del client.runs["m1"].tags["labctl.verdict"]
    again = exported(tmp_path, client)
    assert (again.run_id, again.is_new, len(client.runs)) == ("m1", False, 1)
    assert (len(client.runs["m1"].metrics), client.runs["m1"].tags["labctl.verdict"]) == (1, "PASS")


def test_a_run_that_was_logged_in_part_is_replaced(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the server while metrics are logged, then log again: the first is deleted, the second is complete."""
    records.write(tmp_path, RUN, losses=[8.0])

    def lost(*_: object, **__: object) -> None:
        """Raise the error of a connection that is gone."""
        raise ConnectionResetError("connection reset at http://me:secret@127.0.0.1:5000/api")

    with monkeypatch.context() as gone:
        gone.setattr(client, "log_batch", lost)
        with pytest.raises(HostError) as error:
            exported(tmp_path, client)
    assert error.value.message == (
        "cannot log to MLflow at http://127.0.0.1:5000: connection reset at http://127.0.0.1:5000/api"
    )
    assert error.value.hint.endswith("curl http://127.0.0.1:5000/health")
    assert exported(tmp_path, client).is_new
    assert [run.tags["labctl.run_id"] for run in client.runs.values()] == ["deleted", RUN]
    assert client.runs["m2"].info.status == "FINISHED"


def test_artifacts_that_do_not_go_are_told_and_the_run_is_complete(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log a run with a large output, to a store that takes no file: both are told, the status is set."""
    monkeypatch.setattr(mlflow, "LARGEST_ARTIFACT", 2000)
    records.write(tmp_path, RUN, log="x" * 3000)

    def refused(*_: object) -> None:
        """Raise an error of the store."""
        raise PermissionError("access denied")

    monkeypatch.setattr(client, "log_artifact", refused)
    assert exported(tmp_path, client).left_out == ("result.json: access denied", "output.log: 3 kB, more than 2 kB")
    assert client.runs["m1"].info.status == "FINISHED"


@pytest.mark.parametrize(
    ("quoted", "reason"),
    [
        (
            "API request to http://me:secret@h:5/api failed with exception HTTPConnectionPool(host='h', port=5): Max "
            "retries exceeded with url: /api?name=x (Caused by NewConnectionError(\"HTTPConnection(host='h', port=5): "
            'Failed to establish a new connection: [Errno 111] Connection refused"))',
            "Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        (
            "API request to http://me:secret@h/api failed with error code 401",
            "API request to http://h/api failed with error code 401",
        ),
        ("first\nsecond", "first"),
    ],
)
def test_the_reason_of_an_error_is_short_and_has_no_password(quoted: str, reason: str) -> None:
    """Shorten errors as MLflow words them: the cause, else the first line."""
    assert mlflow._reason(OSError(quoted)) == reason
