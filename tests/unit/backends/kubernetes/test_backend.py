"""Runs of a lab in an in-memory cluster: submitted, listed, judged, stopped, and removed by `down`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import clusters, running
from support.api_server import SUCCESS, failure
from support.fake_api import MPIJOBS, TRAINJOBS
from support.fake_backend import FakeBackend
from support.running import (
    MARK,
    Programs,
    RunningApi,
    asked,
    condition,
    ended,
    entry,
    labelled,
    launched,
    pod_of,
    prints,
    put,
    runs,
    serving,
    waits,
    without_results,
)

from labctl import backends
from labctl.backends.docker.lab import cluster as docker_cluster
from labctl.backends.kubernetes import checks, steps, storage
from labctl.backends.kubernetes import lab as labs
from labctl.backends.kubernetes import run as cluster_runs
from labctl.backends.kubernetes.api import Manifest, Refused
from labctl.backends.kubernetes.backend import KubernetesBackend
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import ClusterRun
from labctl.errors import HostError
from labctl.jobs import program
from labctl.jobs.request import RunOptions
from labctl.model import Cause, Event, Result
from labctl.records import store
from labctl.records.lines import Line
from labctl.runs import judge, start
from labctl.runs.labs import status, take_down
from labctl.runs.start import Request
from labctl.system import filelock

NAMESPACE: Manifest = {"kind": "Namespace", "metadata": {"name": "demo", "labels": {"labctl.lab": "demo"}}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between requests, and skip the checks of the cluster."""
    for module in (cluster_runs, steps, judge):
        monkeypatch.setattr(module, "LOOK", 0.002)
    monkeypatch.setattr(checks, "preflight", lambda *_: None)


@pytest.fixture
def api() -> RunningApi:
    """Return a cluster in memory that knows MPIJob and TrainJob."""
    return RunningApi(knows=[MPIJOBS, TRAINJOBS])


@pytest.fixture
def events() -> list[Event]:
    """Return an empty list, to which the lab adds its events."""
    return []


@pytest.fixture
def cluster(api: RunningApi, tmp_path: Path, events: list[Event]) -> ClusterLab:
    """Return a lab with a workload of its own on the cluster in memory, whose events are recorded."""
    made = clusters.lab(api, running.own_workload(tmp_path), LAB_ACCELERATOR="cpu")
    return replace(made, context=replace(made.context, emit=events.append))


@pytest.fixture
def backend(cluster: ClusterLab) -> KubernetesBackend:
    return clusters.backend(cluster)


def result_of(cluster: ClusterLab, run_id: str) -> Result:
    """Return the recorded result of a run; fail if it has none."""
    result = store.read_result(cluster.directory, run_id)
    assert result
    return result


def texts(events: list[Event], kind: str) -> list[str]:
    """Return the texts of the events of this kind."""
    return [event.text for event in events if event.kind == kind]


def stoppable(cluster: ClusterLab, run: ClusterRun) -> Programs:
    """Return programs of a launcher whose command ends with 143 and the stop's message when a stop is requested."""

    def program(pod: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        """Print the end of the command if a stop is requested; answer as a pod without results."""
        if "~/.stopped" in " ".join(argv):
            prints(cluster, run, f"{MARK}143; {argv[-1]}")
        return without_results(pod, argv)

    return program


# --- begin ---------------------------------------------------------------------------------------------------


def test_a_run_may_have_every_option() -> None:
    """Settings of a cluster accept detach, timeout, include, wait and retries."""
    settings = clusters.lab(RunningApi(), LAB_ENGINE="kubernetes").settings
    backends.require_options(settings, RunOptions(detach=True, timeout=5, include="n0", wait=True, retries=2))


@pytest.mark.parametrize("detach", [True, False])
def test_a_run_that_the_cluster_does_not_take_is_recorded_as_ended(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, *, detach: bool
) -> None:
    """A run whose job the cluster refuses raises Refused and is recorded as ERROR, interrupted, unlocked."""
    api.denied = {"patch mpijobs.kubeflow.org"}
    begin = start.launch if detach else start.run
    with pytest.raises(Refused, match=r"MPIJob demo-hello-.* was refused: cannot patch mpijobs"):
        begin(backend, asked(cluster, detach=detach))
    (run_id,) = store.ids(cluster.directory)
    result = result_of(cluster, run_id)
    assert (result.verdict, result.cause) == ("ERROR", "interrupted")
    assert not filelock.is_held(store.lock(cluster.directory, run_id))


def test_a_run_is_followed_judged_and_removed_by_the_labctl_that_submits_it(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """run() follows the job to its end, reads the metric, marks the pod as fetched and deletes the job."""

    def begin() -> None:
        """Start the pods and print a run with answer 42 and code 0."""
        run = cluster.run(store.ids(cluster.directory)[0])
        for node in ("launcher", "worker-0", "worker-1"):
            put(cluster, pod_of(run, node, **runs()))
        prints(cluster, run, "\x010!\x02labctl: rank 0 of 1 on worker-0", "answer: 42", f"{MARK}0")

    # The first look is that of its submission.
    api.steps += [lambda: None, lambda: None, begin]
    result = start.run(backend, asked(cluster))
    assert result.metrics["answer"]["value"] == 42
    assert ("sh", "-c", "touch ~/.fetched") in api.executed
    assert labs.jobs(cluster) == []
    steps_shown = texts(events, "step")
    assert [text.split()[0] for text in steps_shown] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert steps_shown[1].startswith("[2/4] apply Namespace/demo, ConfigMap/demo-hello-")
    assert any(text.startswith("MPIJob demo-hello-") for text in texts(events, "notice"))


def ending_on_ctrl_c(cluster: ClusterLab, api: RunningApi) -> Callable[[], None]:
    """Let the launcher's command end with 130 on TERM; return a function that sends SIGINT to this process."""

    def program(pod: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        """Print the end with 130 if TERM is sent; answer with a result file."""
        if "kill -TERM" in argv[-1]:
            prints(cluster, cluster.run(store.ids(cluster.directory)[0]), f"{MARK}130")
        return serving((entry("./model.bin"), b"weights"))(pod, argv)

    api.programs = program
    return lambda: signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_the_run_that_labctl_submitted_and_its_results_are_fetched(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """SIGINT during run() ends it as interrupted, fetches its files and deletes the job."""

    def begin() -> None:
        """Start the pods of the run."""
        run = cluster.run(store.ids(cluster.directory)[0])
        for node in ("launcher", "worker-0", "worker-1"):
            put(cluster, pod_of(run, node, **runs()))

    interrupt = ending_on_ctrl_c(cluster, api)
    api.steps += [lambda: None, lambda: None, begin, lambda: None, interrupt]
    result = start.run(backend, asked(cluster))
    assert (result.cause, result.message) == ("interrupted", "stopped by SIGINT")
    assert (store.directory(cluster.directory, result.run_id) / "model.bin").read_bytes() == b"weights"
    assert labs.jobs(cluster) == []


def test_ctrl_c_leaves_a_run_that_is_attached_to(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """SIGINT during attach() raises KeyboardInterrupt and leaves the run running."""
    run = launched(cluster, **runs())
    api.steps += [lambda: None, ending_on_ctrl_c(cluster, api)]
    with pytest.raises(KeyboardInterrupt):
        judge.attach(backend, run.run_id)
    assert api.executed == []
    assert [summary.state for summary in judge.listing(backend)] == ["running"]


def test_a_run_that_goes_on_without_labctl_has_its_results_from_whoever_attaches(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run() of a silent server raises HostError with `labctl attach`; attach() fetches the files later."""
    monkeypatch.setattr(cluster_runs, "SILENT_FOR", 0.01)

    def silent() -> None:
        """Start the pods, then make the server silent."""
        run = cluster.run(store.ids(cluster.directory)[0])
        for node in ("launcher", "worker-0", "worker-1"):
            put(cluster, pod_of(run, node, **runs()))
        api.fails = 0

    api.steps += [lambda: None, lambda: None, silent]
    with pytest.raises(HostError, match=r"does not answer: refused; run .* goes on without labctl") as left:
        start.run(backend, asked(cluster))
    api.fails = None
    (run_id,) = store.ids(cluster.directory)
    assert left.value.hint == f"labctl attach {run_id}"
    assert not store.read_result(cluster.directory, run_id)
    prints(cluster, cluster.run(run_id), "answer: 42", f"{MARK}0")
    api.programs = serving((entry("./model.bin"), b"weights"))
    judge.attach(clusters.backend(cluster), run_id)
    assert (store.directory(cluster.directory, run_id) / "model.bin").read_bytes() == b"weights"


def test_a_run_whose_results_are_not_fetched_keeps_its_job(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """If a run's files cannot be fetched, attach() warns and keeps the job."""
    run = launched(cluster, **runs())
    prints(cluster, run, f"{MARK}0")
    api.programs = serving((entry("./model.bin"), b"weights"), end=failure(2))
    judge.attach(backend, run.run_id)
    assert "the run's files were not fetched" in texts(events, "warning")[0]
    assert [job["metadata"]["name"] for job in labs.jobs(cluster)] == [run.name]


def test_a_lab_on_docker_hosts_leaves_a_run_of_a_cluster_alone(
    cluster: ClusterLab, api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LAB_ENGINE=docker a run of the cluster is listed as orphaned, gets no result and is not entered."""
    run = launched(cluster, **runs())
    monkeypatch.setattr(docker_cluster, "backend_here", lambda _: FakeBackend())
    settings = clusters.lab(api, cluster.directory, LAB_ACCELERATOR="cpu", LAB_ENGINE="docker").settings
    with backends.connect(cluster.context, settings) as hosts:
        assert [summary.state for summary in judge.listing(hosts)] == ["orphaned"]
        assert judge.unfinished(hosts, hosts.active(), [run.run_id]) == {}
    assert not store.read_result(cluster.directory, run.run_id)
    assert api.executed == []


def test_a_dry_run_names_what_is_applied_and_where(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """preview_run() names the applied objects, namespace and server, and makes no record and no job."""
    plan = start.preview_run(backend, asked(cluster)).plan
    applied = next(line for line in plan if " apply " in line)
    assert "MPIJob/demo-hello-" in applied
    assert " in namespace demo of https://cluster:6443 " in applied
    assert store.ids(cluster.directory) == []
    assert labs.jobs(cluster) == []


def with_claim(api: RunningApi, directory: Path) -> ClusterLab:
    """Return a lab with a storage claim of 1 GiB."""
    return clusters.lab(api, running.own_workload(directory), LAB_ACCELERATOR="cpu", LAB_K8S_STORAGE_SIZE="1g")


def of_project(cluster: ClusterLab, size: int = 0) -> Request:
    """Write a repository with a change, an ignored file, and one of ``size``; return the request of its script."""
    root = cluster.directory / "mine"
    root.mkdir()
    (root / "train.py").write_text("print('hello')\n")
    (root / "data.bin").write_bytes(os.urandom(size))
    (root / ".gitignore").write_text("weights.pt\n")
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "--all"), ("commit", "-qm", "x")):
        subprocess.run([*git, *words], check=True)
    (root / "train.py").write_text("print('changed')\n")
    (root / "weights.pt").write_text("")
    options = RunOptions(script=root / "train.py", here=root, detach=True)
    return Request(workload=program.of(options), options=options)


def test_the_record_has_the_commit_of_a_project_and_what_differs_from_it(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """The record has project.diff and the commit, marked dirty; an ignored file is warned of."""
    record = store.directory(cluster.directory, start.launch(backend, of_project(cluster)).run_id)
    assert "+print('changed')" in (record / "project.diff").read_text()
    (code,) = json.loads((record / "versions.json").read_text())["code"]
    assert (code["path"], code["dirty"], len(code["commit"])) == (str(cluster.directory / "mine"), True, 40)
    assert texts(events, "warning") == ["not copied into the run: weights.pt (ignored by git)"]
    (config,) = (manifest for (kind, _), manifest in api.objects.items() if kind == "ConfigMap")
    assert "changed" not in json.dumps(config["data"]), "ranks have the files themselves"


def test_a_project_for_the_claim_is_sent_before_its_job(
    api: RunningApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large project is sent to the claim under its hash before the job is applied, which names it twice."""
    cluster, sent = with_claim(api, tmp_path), []

    def send(_: ClusterLab, place: str, content: bytes) -> None:
        """Record place, content and the jobs applied so far."""
        sent.append((place, content, [kind for kind, _ in api.objects if kind == "MPIJob"]))

    monkeypatch.setattr(storage, "send", send)
    start.launch(clusters.backend(cluster), of_project(cluster, 1 << 20))
    ((place, content, jobs_before),) = sent
    assert place == f"/storage/code/{hashlib.sha256(content).hexdigest()}.tar.gz"
    assert jobs_before == []
    (job,) = (manifest for (kind, _), manifest in api.objects.items() if kind == "MPIJob")
    assert json.dumps(job).count(place) == 2


def test_a_run_whose_code_is_not_sent_is_recorded_as_ended(api: RunningApi, tmp_path: Path) -> None:
    """If a project cannot be sent, Refused is raised, the run is recorded as ERROR and no job is applied."""
    cluster = with_claim(api, tmp_path)
    api.denied = {"patch pods"}
    with pytest.raises(Refused, match="cannot patch pods"):
        start.launch(clusters.backend(cluster), of_project(cluster, 1 << 20))
    (run_id,) = store.ids(cluster.directory)
    assert result_of(cluster, run_id).verdict == "ERROR"
    assert labs.jobs(cluster) == []


@pytest.mark.parametrize("cause", ["node-lost", "stalled"])
def test_a_run_ends_nothing_of_an_earlier_one_that_lost_a_node(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, cause: Cause
) -> None:
    """A new run does not delete the job of an earlier one that lost a node or stalled.

    The cluster removes the pods, while the launcher may still have the results.
    """
    earlier = launched(cluster)
    store.abandon(earlier.lab, earlier.run_id, cause, "lost")
    assert not [line for line in start.preview_run(backend, asked(cluster)).plan if earlier.run_id in line]
    launched(cluster)
    assert api.get("MPIJob", earlier.name)


# --- list ----------------------------------------------------------------------------------------------------


def test_a_run_whose_pods_have_not_started_waits(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """A run whose pods are pending is listed as waiting."""
    run = launched(cluster, **waits("ContainerCreating"))
    assert backend.active()[run.run_id].waits
    (summary,) = judge.listing(backend)
    assert (summary.state, summary.step) == ("waiting", "")


@pytest.mark.parametrize("over", ["line", "job"])
def test_a_run_that_has_ended_since_is_judged_when_runs_are_listed(
    cluster: ClusterLab, backend: KubernetesBackend, over: str
) -> None:
    """Listing runs judges one whose command or job has failed as launcher-failed, and deletes its job."""
    run = launched(cluster, **runs())
    prints(cluster, run, "one", f"{MARK}3")
    if over == "job":
        put(cluster, {"kind": "MPIJob", **labelled(run.name), **condition("Failed", "BackoffLimitExceeded")})
        put(cluster, pod_of(run, "launcher", **ended(3)))
    assert backend.active()[run.run_id].state == "ended"
    (summary,) = judge.listing(backend)
    assert (summary.state, summary.verdict, summary.cause) == ("done", "ERROR", "launcher-failed")
    assert labs.jobs(cluster) == []


def test_a_run_whose_job_somebody_deleted_is_judged_interrupted(
    cluster: ClusterLab, backend: KubernetesBackend
) -> None:
    """Listing runs judges one whose job was deleted as interrupted, with that in its message."""
    run = launched(cluster)
    cluster.api.delete("MPIJob", run.name)
    (summary,) = judge.listing(backend)
    assert (summary.state, summary.verdict, summary.cause) == ("done", "ERROR", "interrupted")
    assert f"MPIJob {run.name} was deleted" in result_of(cluster, run.run_id).message


def test_a_run_that_goes_on_is_not_judged(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """Listing runs leaves a running one as running."""
    run = launched(cluster, **runs())
    (summary,) = judge.listing(backend)
    assert (summary.run_id, summary.state) == (run.run_id, "running")


def test_status_shows_runs_and_judges_none(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """status() shows a running and an ended run as such and judges neither."""
    run = launched(cluster, **runs())
    assert [(one.run_id, one.state) for one in status(backend).runs] == [(run.run_id, "running")]
    prints(cluster, run, f"{MARK}0")
    assert [(one.run_id, one.state) for one in status(backend).runs] == [(run.run_id, "ended")]


def test_runs_are_unknown_to_a_silent_server_but_for_one_that_is_followed_here(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """With a silent server a run is unknown, or running if this process records it."""
    here, elsewhere = launched(cluster), launched(cluster)
    api.fails = 0
    with store.recording(cluster.directory, here.run_id):
        states = {run_id: run.state for run_id, run in backend.active().items()}
        assert states == {elsewhere.run_id: "unknown"}
        assert {run.run_id: run.state for run in judge.listing(backend)} == {
            here.run_id: "running",
            elsewhere.run_id: "unknown",
        }


def test_where_no_run_is_under_way_no_cluster_is_connected(
    cluster: ClusterLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all runs are done, listing and attaching connect to no cluster."""
    run = launched(cluster)
    store.abandon(run.lab, run.run_id)
    monkeypatch.setattr(labs, "Api", lambda *_: pytest.fail("a cluster was asked for"))
    with backends.connect(cluster.context, _in_cluster(cluster)) as backend:
        assert [run.state for run in judge.listing(backend)] == ["done"]
        assert judge.attach(backend, run.run_id).cause == "interrupted"


def _in_cluster(cluster: ClusterLab) -> Any:
    """Return the settings of a lab with LAB_ENGINE=kubernetes in this directory."""
    return clusters.lab(RunningApi(), cluster.directory, LAB_ACCELERATOR="cpu", LAB_ENGINE="kubernetes").settings


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace judging and closing; return the ids of the runs for which either is called."""
    run_ids: list[str] = []
    monkeypatch.setattr(judge, "judge", lambda _, run_id, *__: run_ids.append(run_id))
    monkeypatch.setattr(judge, "close", lambda _, run_id: run_ids.append(run_id))
    return run_ids


def test_a_run_that_begins_while_runs_are_listed_is_not_taken_for_a_lost_one(
    cluster: ClusterLab, backend: KubernetesBackend, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run submitted after the jobs were listed is neither judged nor closed."""
    launched(cluster, **runs())
    list_jobs, new = labs.jobs, []

    def then_begins(of: ClusterLab) -> list[Manifest]:
        """List the jobs, then submit a run."""
        jobs = list_jobs(of)
        monkeypatch.setattr(labs, "jobs", list_jobs)
        new.append(launched(of, **runs()))
        return jobs

    monkeypatch.setattr(labs, "jobs", then_begins)
    judge.listing(backend)
    assert new
    assert closed == []


def test_a_run_that_is_being_submitted_while_runs_are_listed_is_not_taken_for_a_lost_one(
    cluster: ClusterLab, backend: KubernetesBackend, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose lock is held until its job exists is neither judged nor closed by a listing meanwhile."""
    run = launched(cluster)
    (job,) = labs.jobs(cluster)
    cluster.api.delete("MPIJob", run.name)
    list_jobs = labs.jobs
    holding = store.recording(cluster.directory, run.run_id)
    holding.__enter__()

    def then_submitted(of: ClusterLab) -> list[Manifest]:
        """List the jobs, then put the job and release the lock."""
        jobs = list_jobs(of)
        put(cluster, job)
        holding.__exit__(None, None, None)
        return jobs

    monkeypatch.setattr(labs, "jobs", then_submitted)
    judge.listing(backend)
    assert closed == []


def test_a_run_that_is_being_submitted_runs(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """A run without a job whose record is locked is listed as running."""
    run = launched(cluster)
    cluster.api.delete("MPIJob", run.name)
    with store.recording(cluster.directory, run.run_id):
        assert [summary.state for summary in judge.listing(backend)] == ["running"]


# --- attach, logs, stop --------------------------------------------------------------------------------------


def test_what_a_run_has_printed_is_shown_without_marks_tokens_and_the_launchers_last_line(tmp_path: Path) -> None:
    """logs() has the lines without marks and the end mark, secrets redacted; with rank=1 only that rank's."""
    api = RunningApi()
    cluster = clusters.lab(api, running.own_workload(tmp_path), LAB_ACCELERATOR="cpu", HF_TOKEN="hf_canary")  # noqa: S106
    backend = clusters.backend(cluster)
    run = launched(cluster, **runs())
    prints(cluster, run, "\x011\x02with hf_canary", f"no end{MARK}0")
    lines: list[str] = []
    judge.logs(backend, run.run_id, lines.append, follow=False)
    assert lines == ["with [REDACTED]", "no end"]
    prints(cluster, run, "\x010\x02of the other")
    judge.logs(backend, run.run_id, lines.append, follow=False, rank=1)
    assert lines[2:] == ["with [REDACTED]"]


def test_a_run_that_has_not_begun_has_no_log_yet(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """logs() of a pending run raises HostError that it has not begun."""
    run = launched(cluster, **waits("ContainerCreating"))
    with pytest.raises(HostError, match=f"run {run.run_id} has not begun"):
        judge.logs(backend, run.run_id, print, follow=False)


def test_a_run_is_followed_from_before_it_begins(
    cluster: ClusterLab, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """output() hands on empty batches while the pod waits, then all lines."""
    monkeypatch.setattr("labctl.backends.kubernetes.lab.LOOK", 0.01)
    run = launched(cluster, **waits("ContainerCreating"))
    batches: list[Sequence[Line]] = []

    def hear(lines: Sequence[Line]) -> None:
        """Record the batch; at the second one start the launcher and print two lines."""
        batches.append(lines)
        if len(batches) == 2:
            prints(cluster, run, "one", "two", f"{MARK}0")
            put(cluster, pod_of(run, "launcher", **runs()))

    backend.output(run, hear)
    assert [line.text for batch in batches for line in batch] == ["one", "two"]
    assert batches[:2] == [(), ()]


def test_a_run_whose_job_is_gone_is_not_waited_for(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """output() of a run without job and pods raises HostError."""
    run = launched(cluster)
    cluster.api.delete(run.kind, run.name)
    with pytest.raises(HostError, match=f"run {run.run_id} has not begun, and has no MPIJob"):
        backend.output(run, print)


def test_who_has_enough_follows_no_longer(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """output() of a waiting run returns once its stop function is True."""
    run = launched(cluster, **waits("ContainerCreating"))
    backend.output(run, print, lambda: True)


def test_a_run_that_was_judged_is_shown_from_its_record(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """A second attach() returns the recorded result and prints the recorded lines, without the server."""
    run = launched(cluster, **runs())
    prints(cluster, run, "one", f"{MARK}0")
    result = judge.attach(backend, run.run_id)
    api.fails = 0
    assert judge.attach(backend, run.run_id) == result
    assert texts(events, "line") == ["one", "one"]


def test_who_attaches_to_a_run_that_another_records_gets_its_result(
    cluster: ClusterLab, backend: KubernetesBackend, events: list[Event]
) -> None:
    """attach() to a run that another process records prints its lines and returns that process's result."""
    run = launched(cluster, **runs())
    prints(cluster, run, "one", f"{MARK}0")
    holding = store.recording(cluster.directory, run.run_id)
    holding.__enter__()

    def emit(event: Event) -> None:
        """Record the event; at a line let the other process end without a result."""
        events.append(event)
        if event.kind == "line":
            store.abandon(run.lab, run.run_id)
            holding.__exit__(None, None, None)

    backend = backend.with_context(replace(cluster.context, emit=emit))
    assert judge.attach(backend, run.run_id).cause == "interrupted"
    assert texts(events, "line") == ["one"]


def test_a_run_that_another_leaves_without_a_result_can_be_attached_to_again(
    cluster: ClusterLab, backend: KubernetesBackend
) -> None:
    """judged() of a run without a result raises HostError with `labctl attach` as hint."""
    run = launched(cluster)
    with pytest.raises(HostError, match=f"run {run.run_id} has no result yet") as none:
        judge.judged(backend, run.run_id)
    assert none.value.hint == f"labctl attach {run.run_id}"


def test_locks_of_runs_are_gone_with_their_judging(cluster: ClusterLab, backend: KubernetesBackend) -> None:
    """After attach() the run's lock is not held."""
    run = launched(cluster, **runs())
    prints(cluster, run, f"{MARK}0")
    judge.attach(backend, run.run_id)
    assert not filelock.is_held(store.lock(cluster.directory, run.run_id))


def test_a_run_that_is_stopped_is_told_by_whom_and_judged(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """stop() judges the run as interrupted, by its owner; a second stop raises HostError."""
    run = launched(cluster, **runs())
    api.programs = stoppable(cluster, run)
    result = judge.stop(backend, run.run_id, 5)
    assert result.cause == "interrupted"
    assert result.message == f"stopped by {run.lab.owner}"
    with pytest.raises(HostError, match=f"run {run.run_id} has ended: ERROR"):
        judge.stop(backend, run.run_id, 5)


def test_a_run_whose_pods_have_not_started_is_stopped_with_its_job(
    cluster: ClusterLab, backend: KubernetesBackend
) -> None:
    """stop() of a pending run judges it as interrupted and deletes the job."""
    run = launched(cluster, **waits("ContainerCreating"))
    assert judge.stop(backend, run.run_id, 5).cause == "interrupted"
    assert labs.jobs(cluster) == []


def test_a_run_whose_launcher_looks_for_the_workers_yet_is_stopped_with_its_job(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """stop() of a run whose launcher has no command yet judges it as interrupted and deletes the job."""
    run = launched(cluster, **runs())
    # It has no command that could be told.
    api.programs = lambda *_: (failure(labs.NO_COMMAND),)
    assert judge.stop(backend, run.run_id, 5).cause == "interrupted"
    assert labs.jobs(cluster) == []


def test_a_run_whose_command_has_just_ended_keeps_its_results(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """stop() of a run whose command has already ended judges it by its end instead."""
    run = launched(cluster, **runs())
    prints(cluster, run, "one", f"{MARK}0")
    # There is no such process any more.
    api.programs = lambda _, argv: (failure(1),) if "kill" in argv[2] else (SUCCESS,)
    assert judge.stop(backend, run.run_id, 5).cause == "launcher-failed"


def test_a_run_of_another_cluster_or_namespace_is_unknown_and_not_judged(cluster: ClusterLab) -> None:
    """A run of another namespace is listed as unknown and not judged; stop, attach and logs raise HostError."""
    run = launched(cluster, **runs())
    other = clusters.backend(clusters.lab(RunningApi(namespace="elsewhere"), cluster.directory, LAB_ACCELERATOR="cpu"))
    assert [(one.run_id, one.state) for one in judge.listing(other)] == [(run.run_id, "unknown")]
    assert not store.read_result(cluster.directory, run.run_id)
    commands: list[Callable[[], object]] = [
        lambda: judge.stop(other, run.run_id, 5),
        lambda: judge.attach(other, run.run_id),
        lambda: judge.logs(other, run.run_id, print, follow=False),
    ]
    for command in commands:
        with pytest.raises(HostError, match=f"run {run.run_id} is in namespace demo of https://cluster:6443") as failed:
            command()
        assert failed.value.hint == "LAB_K8S_CONTEXT and LAB_K8S_NAMESPACE=demo in .env"


# --- down ----------------------------------------------------------------------------------------------------


def claim(name: str = "demo-storage", lab: str = "demo") -> Manifest:
    """Return a storage claim of the lab."""
    return {"kind": "PersistentVolumeClaim", **labelled(name, lab)}


def launched_in_own_namespace(cluster: ClusterLab) -> ClusterRun:
    """Submit a run after creating the lab's own namespace."""
    put(cluster, NAMESPACE)
    return launched(cluster)


def kinds(api: RunningApi) -> list[str]:
    """Return the kinds of the objects in the cluster, sorted."""
    return sorted({kind for kind, _ in api.objects})


NAMESPACE_KEPT = "keep namespace demo  [removed by: kubectl delete namespace demo]"


def down_plan(backend: KubernetesBackend) -> list[str]:
    """List the steps of `down` without their numbers."""
    return [line.partition(" ")[2] for line in str(backend.plan_down()).splitlines()]


def test_down_removes_the_lab_and_names_the_namespace_that_was_made_for_it(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """`down` deletes job and ConfigMap, waits for the pods, keeps others' objects, and names the namespace."""
    run = launched_in_own_namespace(cluster)
    others = (
        {"kind": "Pod", "metadata": {"name": "theirs", "labels": {"labctl.lab": "another"}}},
        {"kind": "Secret", "metadata": {"name": "registry"}},
    )
    put(cluster, *others)
    assert down_plan(backend) == [
        f"delete MPIJob {run.name}  [labctl down]",
        f"delete ConfigMap {run.name}  [labctl down]",
        "wait until its pods are gone, at most 120 s  [labctl down]",
        NAMESPACE_KEPT,
    ]
    assert take_down(backend, "labctl down").plan[0] == f"#1 delete MPIJob {run.name}  [labctl down]"
    assert kinds(api) == ["Namespace", "Pod", "Secret"]
    assert store.read_result(cluster.directory, run.run_id)


def test_the_claim_is_kept_and_named(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """`down` keeps the claim, and tells the command that deletes it."""
    launched_in_own_namespace(cluster)
    put(cluster, claim())
    command = "removed by: kubectl -n demo delete pvc demo-storage"
    assert down_plan(backend)[-2:] == [f"keep claim demo-storage  [{command}]", NAMESPACE_KEPT]
    take_down(backend, "labctl down")
    assert "PersistentVolumeClaim" in kinds(api)
    assert [event.text.partition("] ")[2] or event.text for event in events[-4:]] == [
        "keep claim demo-storage",
        command,
        "keep namespace demo",
        "removed by: kubectl delete namespace demo",
    ]


@pytest.mark.parametrize("labels", [{}, {"labctl.lab": "another"}])
def test_a_namespace_that_was_not_made_for_the_lab_is_not_spoken_of(
    cluster: ClusterLab, backend: KubernetesBackend, labels: dict[str, str]
) -> None:
    """`down` names the namespace only if its label is this lab's."""
    launched_in_own_namespace(cluster)
    assert NAMESPACE_KEPT in down_plan(backend)
    put(cluster, {"kind": "Namespace", "metadata": {"name": "demo", "labels": labels}})
    assert NAMESPACE_KEPT not in down_plan(backend)


def test_who_may_not_look_at_namespaces_can_take_the_lab_down(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """`down` without the right to get namespaces deletes the job."""
    launched_in_own_namespace(cluster)
    api.denied = {"get namespaces"}
    take_down(backend, "labctl down")
    assert "MPIJob" not in kinds(api)


def test_a_lab_of_another_person_is_neither_joined_entered_nor_removed(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """With a job of another owner a run, `down` and `exec` raise HostError that names the owner."""
    run = launched(cluster, **runs())
    job = cluster.api.get("MPIJob", run.name)
    assert job
    job["metadata"]["annotations"] = {"labctl.owner": "bob@elsewhere"}
    put(cluster, job)
    commands: list[Callable[[], object]] = [
        lambda: launched(cluster),
        lambda: take_down(backend, "labctl down"),
        lambda: labs.execute(cluster, ("worker-0",), ("ls",)),
    ]
    for command in commands:
        with pytest.raises(HostError, match="lab `demo` in namespace demo belongs to bob@elsewhere: it has MPIJob"):
            command()
    assert "Pod" in kinds(api)


def test_down_ends_runs_that_are_under_way_and_judges_them(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend, events: list[Event]
) -> None:
    """`down` asks, stops the active run, judges it as ended by its owner, and deletes its pods."""
    run = launched(cluster, **runs())
    api.programs = stoppable(cluster, run)
    assert labs.running(cluster) == [run.run_id]
    questions: list[str] = []

    def ask(question: str) -> bool:
        """Record the question; agree."""
        questions.append(question)
        return True

    take_down(backend, "labctl down", ask=ask)
    assert questions == ["end it?"]
    assert f"this ends run {run.run_id}" in texts(events, "warning")
    assert result_of(cluster, run.run_id).message == f"{run.lab.owner} took the lab down"
    assert labs.running(cluster) == []
    assert "Pod" not in kinds(api)


def test_down_that_is_not_confirmed_leaves_the_run(
    cluster: ClusterLab, api: RunningApi, backend: KubernetesBackend
) -> None:
    """`down` that is declined raises HostError; the job stays and no pod is entered."""
    launched(cluster, **runs())
    with pytest.raises(HostError, match="aborted: the lab stays as it is"):
        take_down(backend, "labctl down", ask=lambda _: False)
    assert api.executed == []
    assert {"MPIJob", "Pod"} <= {*kinds(api)}


def test_pods_that_do_not_go_are_named(
    cluster: ClusterLab, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` raises HostError that names pods which are still there after its time."""
    put(cluster, {"kind": "Pod", **labelled("stuck")})
    deleted = cluster.api.delete
    monkeypatch.setattr(cluster.api, "delete", lambda kind, name: kind != "Pod" and deleted(kind, name))
    monkeypatch.setattr(steps, "GOING", 0.01)
    with pytest.raises(HostError, match=r"pods are still there after 0\.01 s: stuck"):
        take_down(backend, "labctl down")
