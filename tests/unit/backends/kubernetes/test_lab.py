"""A lab in a cluster in memory: what is known of its runs, which are judged meanwhile, and what `down` leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import clusters, running
from support.api_server import SUCCESS, failure
from support.fake_api import MPIJOBS, TRAINJOBS
from support.running import RunningApi, condition, ended, pod_of, runs, unplaced, waits

from labctl.backends.kubernetes import lab as labs
from labctl.backends.kubernetes import run as cluster_runs
from labctl.backends.kubernetes.api import OUT, Manifest, Refused
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import ClusterRun
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions, choose_workload
from labctl.model import Event
from labctl.records import store
from labctl.system import filelock

MARK = "labctl: the launcher ended with exit code "
NAMESPACE: Manifest = {
    "kind": "Namespace",
    "metadata": {"name": "demo", "labels": {"labctl.lab": "demo"}},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_runs, "LOOK", 0.002)
    monkeypatch.setattr(labs, "LOOK", 0.002)


@pytest.fixture
def api() -> RunningApi:
    return RunningApi(knows=[MPIJOBS, TRAINJOBS])


@pytest.fixture
def said() -> list[Event]:
    return []


@pytest.fixture
def there(api: RunningApi, tmp_path: Path, said: list[Event]) -> ClusterLab:
    made = clusters.lab(api, running.own_workload(tmp_path), LAB_ACCELERATOR="cpu")
    return replace(made, context=replace(made.context, emit=said.append))


def launched(there: ClusterLab, **given: Any) -> ClusterRun:
    """A run that was submitted; with ``status`` its pods are so."""
    options = RunOptions()
    target, built = labs.begin(there, choose_workload(there.directory, "hello", options, there.settings), options)
    labs.record(there, target, built)
    run = labs.launch(there, target, built)
    for node in ("launcher", "worker-0", "worker-1") if given else ():
        put(there, pod_of(run, node, **given))
    return run


def put(there: ClusterLab, *objects: Manifest) -> None:
    assert isinstance(there.api, RunningApi)
    for one in objects:
        there.api.put(one)


def prints(there: ClusterLab, run: ClusterRun, *lines: str) -> None:
    assert isinstance(there.api, RunningApi)
    there.api.prints(f"{run.name}-launcher", *lines)


# --- begin ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("hostfile", "all"), ("include", "worker-0"), ("exclude", "worker-0"), ("resume", "latest"), ("retries", 2),
     ("wait", True)],
)  # fmt: skip
def test_options_of_docker_hosts_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is for Docker hosts"):
        labs.require_options(replace(RunOptions(), **{name: value}))


def test_other_options_are_not() -> None:
    labs.require_options(RunOptions(detach=True, dry_run=True, timeout=5))


def test_a_run_that_the_cluster_does_not_take_is_recorded_as_ended(there: ClusterLab) -> None:
    there.api.denied = {"patch mpijobs.kubeflow.org"}  # type: ignore[attr-defined]
    with pytest.raises(Refused, match=r"MPIJob demo-hello-.* was refused: cannot patch mpijobs"):
        launched(there)
    (run_id,) = store.ids(there.directory)
    result = store.read_result(there.directory, run_id)
    assert result
    assert (result.verdict, result.cause) == ("ERROR", "interrupted")


# --- what is known of runs -----------------------------------------------------------------------------------


def test_a_run_says_where_it_is(there: ClusterLab) -> None:
    run = launched(there, **runs())
    prints(there, run, "step 1/9", "step 2/9", "loss 3")
    found = labs.active(there)[run.run_id]
    assert (found.state, found.waits, found.step) == ("running", False, "step 2/9")
    assert found.nodes == ("worker-0", "worker-1")


def test_a_run_whose_pods_have_not_started_waits(there: ClusterLab) -> None:
    run = launched(there, **waits("ContainerCreating"))
    assert labs.active(there)[run.run_id].waits
    (summary,) = labs.listing(there)
    assert (summary.state, summary.step) == ("waiting", "")


@pytest.mark.parametrize("over", ["line", "job"])
def test_a_run_that_has_ended_since_is_judged_when_runs_are_listed(there: ClusterLab, over: str) -> None:
    run = launched(there, **runs())
    prints(there, run, "one", f"{MARK}3")
    if over == "job":
        put(there, {"kind": "MPIJob", **labelled(run.name), **condition("Failed", "BackoffLimitExceeded")})
        put(there, pod_of(run, "launcher", **ended(3)))
    assert labs.active(there)[run.run_id].state == "ended"
    (summary,) = labs.listing(there)
    assert (summary.state, summary.verdict, summary.cause) == ("done", "ERROR", "launcher-failed")
    assert labs.jobs(there) == []


def labelled(name: str, lab: str = "demo", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"labctl.lab": lab}, **more}}


def test_a_run_whose_job_somebody_deleted_is_judged_interrupted(there: ClusterLab) -> None:
    run = launched(there)
    there.api.delete("MPIJob", run.name)
    (summary,) = labs.listing(there)
    assert (summary.state, summary.verdict, summary.cause) == ("done", "ERROR", "interrupted")


def test_a_run_that_goes_on_is_not_judged(there: ClusterLab) -> None:
    run = launched(there, **runs())
    (summary,) = labs.listing(there)
    assert (summary.run_id, summary.state) == (run.run_id, "running")


def test_runs_are_unknown_to_a_silent_server_but_for_one_that_is_followed_here(there: ClusterLab) -> None:
    here, elsewhere = launched(there), launched(there)
    there.api.fails = 0  # type: ignore[attr-defined]
    with store.recording(there.directory, here.run_id):
        assert {run_id: found.state for run_id, found in labs.active(there).items()} == {elsewhere.run_id: "unknown"}
        assert {one.run_id: one.state for one in labs.listing(there)} == {
            here.run_id: "running",
            elsewhere.run_id: "unknown",
        }


def test_where_no_run_is_under_way_the_server_is_not_asked(there: ClusterLab) -> None:
    there.api.fails = 0  # type: ignore[attr-defined]
    assert labs.active(there) == {}


def test_a_run_that_begins_while_runs_are_listed_is_not_taken_for_a_lost_one(
    there: ClusterLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(there, **runs())
    known, new = labs.jobs, []

    def then_begins(of: ClusterLab) -> list[Manifest]:
        found = known(of)
        monkeypatch.setattr(labs, "jobs", known)
        new.append(launched(there, **runs()))
        return found

    monkeypatch.setattr(labs, "jobs", then_begins)
    followed: list[str] = []
    monkeypatch.setattr(labs, "attach", lambda _, run_id, *__: followed.append(run_id))
    labs.listing(there)
    assert new
    assert followed == []


def test_a_run_that_is_being_submitted_while_runs_are_listed_is_not_taken_for_a_lost_one(
    there: ClusterLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its labctl holds its lock until the job is there, and gives it up before this one has looked."""
    run = launched(there)
    (job,) = labs.jobs(there)
    there.api.delete("MPIJob", run.name)
    known = labs.jobs
    followed: list[str] = []
    monkeypatch.setattr(labs, "attach", lambda _, run_id, *__: followed.append(run_id))
    holding = store.recording(there.directory, run.run_id)
    holding.__enter__()

    def then_submitted(of: ClusterLab) -> list[Manifest]:
        found = known(of)
        put(there, job)
        holding.__exit__(None, None, None)
        return found

    monkeypatch.setattr(labs, "jobs", then_submitted)
    labs.listing(there)
    assert followed == []


def test_who_may_list_one_kind_of_job_needs_no_rights_to_the_other(there: ClusterLab) -> None:
    run = launched(there)
    there.api.denied = {"list trainjobs.trainer.kubeflow.org"}  # type: ignore[attr-defined]
    assert [one["metadata"]["name"] for one in labs.jobs(there)] == [run.name]
    there.api.denied |= {"list mpijobs.kubeflow.org"}  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="cannot list mpijobs"):
        labs.jobs(there)


# --- logs, attach, stop --------------------------------------------------------------------------------------


def test_what_a_run_has_printed_is_shown_without_marks_tokens_and_the_launchers_last_line(tmp_path: Path) -> None:
    api = RunningApi()
    there = clusters.lab(api, running.own_workload(tmp_path), LAB_ACCELERATOR="cpu", HF_TOKEN="hf_canary")  # noqa: S106
    run = launched(there, **runs())
    prints(there, run, "\x011\x02with hf_canary", f"no end{MARK}0")
    lines: list[str] = []
    labs.print_log(there, run.run_id, lines.append, follow=False)
    assert lines == ["with [REDACTED]", "no end"]
    prints(there, run, "\x010\x02of the other")
    labs.print_log(there, run.run_id, lines.append, follow=False, rank=1)
    assert lines[2:] == ["with [REDACTED]"]


def test_a_run_that_has_not_begun_has_no_log_yet(there: ClusterLab) -> None:
    run = launched(there, **waits("ContainerCreating"))
    with pytest.raises(HostError, match=f"run {run.run_id} has not begun"):
        labs.print_log(there, run.run_id, print, follow=True)


def test_a_run_that_was_judged_is_shown_from_its_record(there: ClusterLab) -> None:
    run = launched(there, **runs())
    prints(there, run, "one", f"{MARK}0")
    first, again = list[str](), list[str]()
    result = labs.attach(there, run.run_id, first.append)
    there.api.fails = 0  # type: ignore[attr-defined]
    assert labs.attach(there, run.run_id, again.append) == result
    assert first == again == ["one"]


def test_who_attaches_to_a_run_that_another_records_gets_its_result(there: ClusterLab) -> None:
    run = launched(there, **runs())
    prints(there, run, "one", f"{MARK}0")
    lines: list[str] = []
    holding = store.recording(there.directory, run.run_id)
    holding.__enter__()

    def line(text: str) -> None:
        lines.append(text)
        store.abandon(run.lab, run.run_id)
        holding.__exit__(None, None, None)

    assert labs.attach(there, run.run_id, line).cause == "interrupted"
    assert lines == ["one"]


def test_a_run_that_another_leaves_without_a_result_can_be_attached_to_again(there: ClusterLab) -> None:
    run = launched(there)
    with pytest.raises(HostError, match=f"run {run.run_id} has no result yet") as none:
        labs.judged(there, run.run_id)
    assert none.value.hint == f"labctl attach {run.run_id}"


def test_a_run_that_is_stopped_is_told_by_whom_and_judged(there: ClusterLab) -> None:
    run = launched(there, **runs())
    api = there.api
    assert isinstance(api, RunningApi)

    def program(_: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        if argv[-1].startswith("stopped by "):
            prints(there, run, f"{MARK}143; {argv[-1]}")
        return (SUCCESS,)

    api.programs = program
    result = labs.stop(there, run.run_id)
    assert result.cause == "interrupted"
    assert result.message.startswith("stopped by ")
    with pytest.raises(HostError, match=f"run {run.run_id} has ended: ERROR"):
        labs.stop(there, run.run_id)


def test_a_run_whose_pods_have_not_started_is_stopped_with_its_job(there: ClusterLab) -> None:
    run = launched(there, **waits("ContainerCreating"))
    assert labs.stop(there, run.run_id).cause == "interrupted"
    assert labs.jobs(there) == []


def test_a_run_whose_launcher_looks_for_the_workers_yet_is_stopped_with_its_job(there: ClusterLab) -> None:
    run = launched(there, **runs())
    # It has no command that could be told.
    there.api.programs = lambda *_: (failure(labs.NO_COMMAND),)  # type: ignore[attr-defined]
    assert labs.stop(there, run.run_id).cause == "interrupted"
    assert labs.jobs(there) == []


def test_a_run_whose_command_has_just_ended_keeps_its_results(there: ClusterLab) -> None:
    run = launched(there, **runs())
    prints(there, run, "one", f"{MARK}0")
    # There is no such process any more.
    there.api.programs = lambda _, argv: (failure(1),) if "kill" in argv[2] else (SUCCESS,)  # type: ignore[attr-defined]
    assert labs.stop(there, run.run_id).cause == "launcher-failed"


# --- status, and what is entered -----------------------------------------------------------------------------


def test_a_lab_without_pods_is_down(there: ClusterLab) -> None:
    assert labs.status(there).state == "down"


def test_a_lab_says_what_keeps_its_pods_from_running(there: ClusterLab) -> None:
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
    assert [(one.run_id, one.state) for one in found.runs] == [(run.run_id, "running")]
    put(there, pod_of(run, "worker-1", **runs()))
    assert labs.status(there).state == "up"


def test_the_pods_of_two_runs_are_told_apart(there: ClusterLab) -> None:
    names = {f"{launched(there, **runs()).name}-launcher" for _ in range(2)}
    assert names <= {one.name for one in labs.status(there).nodes}


def test_a_node_that_is_entered_is_one_that_runs(there: ClusterLab) -> None:
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
    launched(there, **waits("ContainerCreating"))
    with pytest.raises(HostError, match="lab demo has no worker that runs"):
        labs.workers(there)


def test_a_command_in_several_nodes_has_their_lines_marked_and_the_largest_code(
    there: ClusterLab, capfd: pytest.CaptureFixture[str]
) -> None:
    launched(there, **runs())
    there.api.programs = lambda pod, _: (  # type: ignore[attr-defined]
        (OUT, f"I am {pod[-1]}\n".encode()),
        failure(4) if pod.endswith("0") else SUCCESS,
    )
    assert labs.execute(there, ("worker-0", "worker-1"), ("make",)) == 4
    assert sorted(capfd.readouterr().out.splitlines()) == ["worker-0: I am 0", "worker-1: I am 1"]
    assert labs.execute(there, ("worker-1",), ("make",)) == 0
    assert capfd.readouterr().out == "I am 1\n"


# --- down, delete --------------------------------------------------------------------------------------------


def claim(name: str = "demo-storage", lab: str = "demo") -> Manifest:
    return {"kind": "PersistentVolumeClaim", **labelled(name, lab)}


def own(there: ClusterLab) -> ClusterRun:
    """A run, in a namespace that was made for the lab."""
    put(there, NAMESPACE)
    return launched(there)


def kinds(there: ClusterLab) -> list[str]:
    return sorted({kind for kind, _ in there.api.objects})  # type: ignore[attr-defined]


NAMESPACE_KEPT = "keep namespace demo: kubectl delete namespace demo"


def test_down_removes_the_lab_and_names_the_namespace_that_was_made_for_it(there: ClusterLab) -> None:
    run = own(there)
    others = (
        {"kind": "Pod", "metadata": {"name": "theirs", "labels": {"labctl.lab": "another"}}},
        {"kind": "Secret", "metadata": {"name": "registry"}},
    )
    put(there, *others)
    plan = labs.plan_down(there)
    assert plan == (f"delete MPIJob {run.name}", f"delete ConfigMap {run.name}", NAMESPACE_KEPT)
    labs.down(there)
    assert kinds(there) == ["Namespace", "Pod", "Secret"]
    assert store.read_result(there.directory, run.run_id)


def test_the_claim_is_kept_and_named(there: ClusterLab, said: list[Event]) -> None:
    own(there)
    put(there, claim())
    kept = ("keep claim demo-storage: kubectl -n demo delete pvc demo-storage", NAMESPACE_KEPT)
    assert labs.plan_down(there)[-2:] == kept
    labs.down(there)
    assert "PersistentVolumeClaim" in kinds(there)
    assert tuple(event.text for event in said[-2:]) == kept


@pytest.mark.parametrize("labels", [{}, {"labctl.lab": "another"}])
def test_a_namespace_that_was_not_made_for_the_lab_is_not_spoken_of(there: ClusterLab, labels: dict[str, str]) -> None:
    own(there)
    put(there, {"kind": "Namespace", "metadata": {"name": "demo", "labels": labels}})
    assert NAMESPACE_KEPT not in labs.plan_down(there)


def test_who_may_not_look_at_namespaces_can_take_the_lab_down(there: ClusterLab) -> None:
    own(there)
    there.api.denied = {"get namespaces"}  # type: ignore[attr-defined]
    labs.down(there)
    assert "MPIJob" not in kinds(there)


def test_a_lab_of_another_person_is_neither_joined_entered_nor_removed(there: ClusterLab) -> None:
    run = launched(there, **runs())
    job = there.api.get("MPIJob", run.name)
    assert job
    job["metadata"]["annotations"] = {"labctl.owner": "bob@elsewhere"}
    put(there, job)
    steps: list[Callable[[], object]] = [
        lambda: launched(there),
        lambda: labs.plan_down(there),
        lambda: labs.execute(there, ("worker-0",), ("ls",)),
    ]
    for step in steps:
        with pytest.raises(HostError, match="lab `demo` in namespace demo belongs to bob@elsewhere: it has MPIJob"):
            step()
    assert "Pod" in kinds(there)


def test_a_run_of_another_cluster_or_namespace_is_unknown_and_not_judged(there: ClusterLab, said: list[Event]) -> None:
    run = launched(there, **runs())
    other = clusters.lab(RunningApi(namespace="elsewhere"), there.directory, LAB_ACCELERATOR="cpu")
    assert [(one.run_id, one.state) for one in labs.listing(other)] == [(run.run_id, "unknown")]
    assert not store.read_result(there.directory, run.run_id)
    steps: list[Callable[[], object]] = [
        lambda: labs.stop(other, run.run_id),
        lambda: labs.attach(other, run.run_id, lambda _: None),
        lambda: labs.print_log(other, run.run_id, lambda _: None, follow=False),
    ]
    for step in steps:
        with pytest.raises(HostError, match=f"run {run.run_id} is in namespace demo of https://cluster:6443") as failed:
            step()
        assert failed.value.hint == "LAB_K8S_CONTEXT and LAB_K8S_NAMESPACE=demo in .env"


def test_down_ends_runs_that_are_under_way_and_judges_them(there: ClusterLab) -> None:
    run = launched(there, **runs())

    def program(_: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        if argv[-1].startswith("stopped by "):
            prints(there, run, f"{MARK}143; {argv[-1]}")
        return (SUCCESS,)

    there.api.programs = program  # type: ignore[attr-defined]
    assert labs.running(there) == [run.run_id]
    labs.down(there)
    result = store.read_result(there.directory, run.run_id)
    assert result
    assert result.message.startswith("stopped by ")
    assert labs.running(there) == []
    assert "Pod" not in kinds(there)


def test_pods_that_do_not_go_are_named(there: ClusterLab, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = {"kind": "Pod", **labelled("stuck")}
    put(there, stuck)
    deleted = there.api.delete
    monkeypatch.setattr(there.api, "delete", lambda kind, name: None if kind == "Pod" else deleted(kind, name))
    monkeypatch.setattr(labs, "GOING", 0.01)
    with pytest.raises(HostError, match=r"pods are still there after 0\.01 s: stuck"):
        labs.down(there)


def test_a_job_that_was_submitted_by_hand_is_deleted_with_what_it_has(there: ClusterLab) -> None:
    name = "demo-hello"
    put(there, *({"kind": kind, **labelled(name)} for kind in ("TrainJob", "ConfigMap", "TrainingRuntime")), claim())
    done = labs.delete(there, "hello", storage=False)
    assert done.objects == (f"TrainJob/{name}", f"ConfigMap/{name}", f"TrainingRuntime/{name}")
    assert kinds(there) == ["PersistentVolumeClaim"]
    assert labs.delete(there, "hello", storage=True).objects == ("PersistentVolumeClaim/demo-storage",)
    with pytest.raises(ConfigError, match="job demo-hello not found in namespace demo"):
        labs.delete(there, "hello", storage=True)


def test_what_was_submitted_by_hand_is_deleted_by_who_may_not_read_it(there: ClusterLab, api: RunningApi) -> None:
    put(there, *({"kind": kind, **labelled("demo-hello")} for kind in ("MPIJob", "ConfigMap", "Secret")))
    api.denied = {"get configmaps", "get secrets"}
    done = labs.delete(there, "hello", storage=False)
    assert done.objects == ("MPIJob/demo-hello", "ConfigMap/demo-hello", "Secret/demo-hello")


def test_a_job_that_is_there_is_not_submitted_again(there: ClusterLab) -> None:
    workload = choose_workload(there.directory, "hello", RunOptions(), there.settings)
    labs.job_of(there, workload, RunOptions())
    put(there, {"kind": "MPIJob", **labelled("demo-hello")})
    with pytest.raises(ConfigError, match="MPIJob demo-hello is already in namespace demo") as refused:
        labs.job_of(there, workload, RunOptions())
    assert refused.value.hint.startswith("labctl k8s delete hello ")


def test_a_claim_of_another_lab_is_not_deleted(there: ClusterLab) -> None:
    put(there, claim("theirs", "another"))
    with pytest.raises(ConfigError, match="not found"):
        labs.delete(there, "hello", storage=True)
    assert kinds(there) == ["PersistentVolumeClaim"]


def test_locks_of_runs_are_gone_with_their_judging(there: ClusterLab) -> None:
    run = launched(there, **runs())
    prints(there, run, f"{MARK}0")
    labs.attach(there, run.run_id, print)
    assert not filelock.is_held(store.lock(there.directory, run.run_id))
