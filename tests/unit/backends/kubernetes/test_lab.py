"""A lab in an in-memory cluster: its runs and pods, and jobs submitted without labctl."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import clusters, running
from support.api_server import SUCCESS, failure
from support.fake_api import MPIJOBS, TRAINJOBS
from support.running import RunningApi, labelled, launched, pod_of, prints, put, runs, unplaced, waits

from labctl.backends.kubernetes import checks
from labctl.backends.kubernetes import lab as labs
from labctl.backends.kubernetes.api import OUT, Manifest, Refused
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions, choose_workload


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks of the cluster."""
    monkeypatch.setattr(checks, "preflight", lambda *_: None)


@pytest.fixture
def api() -> RunningApi:
    """Return a cluster in memory that knows MPIJob and TrainJob."""
    return RunningApi(knows=[MPIJOBS, TRAINJOBS])


@pytest.fixture
def there(api: RunningApi, tmp_path: Path) -> ClusterLab:
    """Return a lab with a workload of its own on the cluster in memory."""
    return clusters.lab(api, running.own_workload(tmp_path), LAB_ACCELERATOR="cpu")


# --- what is known of runs -----------------------------------------------------------------------------------


def test_a_run_says_where_it_is(there: ClusterLab) -> None:
    """active() has the run's state, nodes and last printed step."""
    run = launched(there, **runs())
    prints(there, run, "step 1/9", "step 2/9", "loss 3")
    found = labs.active(there)[run.run_id]
    assert (found.state, found.waits, found.step) == ("running", False, "step 2/9")
    assert found.nodes == ("worker-0", "worker-1")


def test_where_no_run_is_under_way_the_server_is_not_asked(there: ClusterLab) -> None:
    """active() without runs is empty and asks a silent server nothing."""
    there.api.fails = 0  # type: ignore[attr-defined]
    assert labs.active(there) == {}


def test_who_may_list_one_kind_of_job_needs_no_rights_to_the_other(there: ClusterLab) -> None:
    """jobs() without the right to list TrainJobs lists MPIJobs; without both it raises Refused."""
    run = launched(there)
    there.api.denied = {"list trainjobs.trainer.kubeflow.org"}  # type: ignore[attr-defined]
    assert [one["metadata"]["name"] for one in labs.jobs(there)] == [run.name]
    there.api.denied |= {"list mpijobs.kubeflow.org"}  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="cannot list mpijobs"):
        labs.jobs(there)


# --- status, and what is entered -----------------------------------------------------------------------------


def test_a_lab_without_pods_is_down(there: ClusterLab) -> None:
    """status() of a lab without pods is `down`, and says what starts some."""
    assert (labs.status(there).state, labs.status(there).hint) == ("down", "labctl run opt-tiny")


def test_a_lab_says_what_keeps_its_pods_from_running(there: ClusterLab) -> None:
    """status() is `partial` with the reason of a pod that is not placed, without deleted pods; then `up`."""
    run = launched(there, **runs())
    put(there, pod_of(run, "worker-1", **unplaced("0/1 nodes are available")))
    put(there, pod_of(run, "worker-2", deleted=True, **runs()))
    found = labs.status(there)
    assert found.state == "partial"
    assert [(one.name, one.state, one.reason) for one in found.nodes] == [
        ("launcher", "running", ""),
        ("worker-0", "running", ""),
        ("worker-1", "created", "0/1 nodes are available"),
    ]
    put(there, pod_of(run, "worker-1", **runs()))
    assert (labs.status(there).state, labs.status(there).hint) == ("up", "")


def test_the_pods_of_two_runs_are_told_apart(there: ClusterLab) -> None:
    """With two runs, status() has the pods of both by their own names."""
    names = {f"{launched(there, **runs()).name}-launcher" for _ in range(2)}
    assert names <= {one.name for one in labs.status(there).nodes}


def test_a_node_that_is_entered_is_one_that_runs(there: ClusterLab) -> None:
    """pod_of() returns a running pod by node or pod name; a pending or unknown one raises an error that names it."""
    with pytest.raises(HostError, match="lab demo has no pods"):
        labs.pod_of(there, "launcher")
    run = launched(there, **runs())
    put(there, pod_of(run, "worker-1", **waits("ErrImagePull", "no such host")))
    assert labs.pod_of(there, "worker-0") == labs.pod_of(there, f"{run.name}-worker-0") == f"{run.name}-worker-0"
    with pytest.raises(HostError, match="worker-1 is created: ErrImagePull: no such host"):
        labs.pod_of(there, "worker-1")
    with pytest.raises(ConfigError, match="lab demo has no node `worker-7`") as unknown:
        labs.pod_of(there, "worker-7")
    assert unknown.value.hint == "it has launcher, worker-0, worker-1"
    assert labs.workers(there) == ("worker-0",)


def test_a_lab_without_a_worker_that_runs_has_none(there: ClusterLab) -> None:
    """workers() of a lab without a running worker raises HostError."""
    launched(there, **waits("ContainerCreating"))
    with pytest.raises(HostError, match="no worker of lab demo is running"):
        labs.workers(there)


def test_a_command_in_several_nodes_has_their_lines_marked_and_the_largest_code(
    there: ClusterLab, capfd: pytest.CaptureFixture[str]
) -> None:
    """execute() in two workers marks each line with its node and returns the largest code; in one it does not."""
    launched(there, **runs())
    there.api.programs = lambda pod, _: (  # type: ignore[attr-defined]
        (OUT, f"I am {pod[-1]}\n".encode()),
        failure(4) if pod.endswith("0") else SUCCESS,
    )
    assert labs.execute(there, ("worker-0", "worker-1"), ("make",)) == 4
    assert sorted(capfd.readouterr().out.splitlines()) == ["worker-0: I am 0", "worker-1: I am 1"]
    assert labs.execute(there, ("worker-1",), ("make",)) == 0
    assert capfd.readouterr().out == "I am 1\n"


# --- jobs submitted by hand ----------------------------------------------------------------------------------


def claim(name: str = "demo-storage", lab: str = "demo") -> Manifest:
    """Return a storage claim of the lab."""
    return {"kind": "PersistentVolumeClaim", **labelled(name, lab)}


def kinds(there: ClusterLab) -> list[str]:
    """Return the kinds of the objects in the cluster, sorted."""
    return sorted({kind for kind, _ in there.api.objects})  # type: ignore[attr-defined]


def test_a_job_that_was_submitted_by_hand_is_deleted_with_what_it_has(there: ClusterLab) -> None:
    """delete() removes job, ConfigMap and runtime, and with storage the claim; of nothing it raises ConfigError."""
    name = "demo-hello"
    put(there, *({"kind": kind, **labelled(name)} for kind in ("TrainJob", "ConfigMap", "TrainingRuntime")), claim())
    done = labs.delete(there, "hello", storage=False)
    assert done.objects == (f"TrainJob/{name}", f"ConfigMap/{name}", f"TrainingRuntime/{name}")
    assert kinds(there) == ["PersistentVolumeClaim"]
    assert labs.delete(there, "hello", storage=True).objects == ("PersistentVolumeClaim/demo-storage",)
    with pytest.raises(ConfigError, match="job demo-hello not found in namespace demo"):
        labs.delete(there, "hello", storage=True)


def test_what_was_submitted_by_hand_is_deleted_by_who_may_not_read_it(there: ClusterLab, api: RunningApi) -> None:
    """delete() removes a ConfigMap and a Secret that may not be read."""
    put(there, *({"kind": kind, **labelled("demo-hello")} for kind in ("MPIJob", "ConfigMap", "Secret")))
    api.denied = {"get configmaps", "get secrets"}
    done = labs.delete(there, "hello", storage=False)
    assert done.objects == ("MPIJob/demo-hello", "ConfigMap/demo-hello", "Secret/demo-hello")


def test_a_job_that_is_there_is_not_submitted_again(there: ClusterLab) -> None:
    """job_of() of a job that is in the namespace raises ConfigError, with `labctl k8s delete` as hint."""
    workload = choose_workload(there.directory, "hello", RunOptions(), there.settings)
    labs.job_of(there, workload, RunOptions())
    put(there, {"kind": "MPIJob", **labelled("demo-hello")})
    with pytest.raises(ConfigError, match="MPIJob demo-hello is already in namespace demo") as refused:
        labs.job_of(there, workload, RunOptions())
    assert refused.value.hint.startswith("labctl k8s delete hello ")


def test_a_claim_of_another_lab_is_not_deleted(there: ClusterLab) -> None:
    """delete() with storage raises ConfigError for another lab's claim, and keeps it."""
    put(there, claim("theirs", "another"))
    with pytest.raises(ConfigError, match="not found"):
        labs.delete(there, "hello", storage=True)
    assert kinds(there) == ["PersistentVolumeClaim"]
