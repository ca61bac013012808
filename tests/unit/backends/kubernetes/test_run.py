"""A run in an in-memory cluster: submitted, followed through failures of pods and server, judged and recorded."""

from __future__ import annotations

import json
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from msgspec.structs import replace
from support import clusters, running
from support.api_server import ERR, SUCCESS, failure
from support.fake_api import MPIJOBS, OLD, TRAINJOBS, FakeApi
from support.harness import wait_until
from support.running import MARK, RunningApi, condition, ended, entry, pod_of, runs, serving, unplaced, waits

from labctl import launchers
from labctl.backends.kubernetes import run as cluster_runs
from labctl.backends.kubernetes import waiting
from labctl.backends.kubernetes.api import OUT, Manifest, Refused
from labctl.backends.kubernetes.backend import NewClusterRun
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import (
    ClusterRun,
    Follower,
    JobStopper,
    definitions,
    kind_of,
    prepare,
    submit,
    supervise,
)
from labctl.errors import HostError
from labctl.model import Event, Result
from labctl.records import store
from labctl.records.active import Ended
from labctl.records.lines import Line
from labctl.records.verdict import RunOutcome
from labctl.runs import judge

LIMIT = 60.0
LOOK = 0.002
"""Seconds between two looks."""
TICK = LOOK / 4
"""Seconds between two readings of a run's clock: a look reads it a few times."""
TOKEN = "hf_canary"  # noqa: S105 - to be found nowhere


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between requests."""
    monkeypatch.setattr(cluster_runs, "LOOK", LOOK)


def lab_with_token(api: FakeApi, directory: Path, timeout: str = "60s", **given: Any) -> ClusterLab:
    """Return a CPU lab with a workload and the secret HF_TOKEN."""
    running.own_workload(directory, timeout)
    return clusters.lab(api, directory, LAB_ACCELERATOR="cpu", HF_TOKEN=TOKEN, **given)


def begun(api: FakeApi, directory: Path, **given: Any) -> NewClusterRun:
    """Build a run on a lab with a token, neither recorded nor submitted."""
    return running.begun(lab_with_token(api, directory, **given))


# --- what the cluster has ------------------------------------------------------------------------------------


def test_the_kind_of_job_is_what_the_cluster_has() -> None:
    """kind_of() prefers MPIJob to TrainJob unless LAB_K8S_JOB is set; without a usable one it raises HostError."""

    def kind(*knows: str, **given: Any) -> str:
        """Return the kind of job on a cluster that knows these APIs, with these settings."""
        return kind_of(FakeApi(knows=knows), clusters.lab(FakeApi(), **given).settings)

    assert kind(MPIJOBS, TRAINJOBS) == "mpijob"
    assert kind(TRAINJOBS) == "trainjob"
    assert kind(MPIJOBS, TRAINJOBS, LAB_K8S_JOB="trainjob") == "trainjob"
    with pytest.raises(HostError, match=r"has no MPIJob and no TrainJob$"):
        kind()
    with pytest.raises(HostError, match=r"has no TrainJob$"):
        kind(MPIJOBS, LAB_K8S_JOB="trainjob")
    with pytest.raises(HostError, match="has no MPIJob and no TrainJob; it has MPIJob v1, of the training operator"):
        kind(OLD)


def test_who_may_not_ask_what_the_cluster_has_is_told_so() -> None:
    """definitions() without the right to read an API raises Refused."""
    with pytest.raises(Refused, match="cannot get"):
        definitions(FakeApi(denied=["get /apis/kubeflow.org/v2beta1"]))


# --- submit --------------------------------------------------------------------------------------------------


class Strict(FakeApi):
    """A server that refuses objects of one kind: at a dry run, or only when they are created."""

    refuses, when = "", "rehearsal"

    def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Apply as the fake API; refuse a TrainJob without its runtime, and the planted kind at its time."""
        if manifest["kind"] == "TrainJob" and ("TrainingRuntime", manifest["metadata"]["name"]) not in self.objects:
            raise Refused(403, "TrainJob was refused: its runtime is not there", "")
        if manifest["kind"] == self.refuses and (dry_run or self.when == "made"):
            raise Refused(422, f"{self.refuses} was refused: too many", "")
        return super().apply(manifest, dry_run=dry_run)


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_a_job_owns_what_it_has_beside_it(tmp_path: Path, kind: str) -> None:
    """submit() makes the job own ConfigMap, Secret and runtime, and labels the namespace as the lab's."""
    api = Strict(knows=[MPIJOBS, TRAINJOBS])
    new = begun(api, tmp_path, LAB_K8S_JOB=kind)
    submit(api, new.lab.name, new.objects)
    made = {one: manifest["metadata"] for (one, _), manifest in api.objects.items()}
    head = new.kind
    beside = {"ConfigMap", "Secret"} | ({"TrainingRuntime"} if kind == "trainjob" else set())
    assert made.keys() == {"Namespace", head} | beside
    for one in beside:
        (owner,) = made[one]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == (head, new.name, f"uid-{head}")
    assert "ownerReferences" not in made[head]
    assert made["Namespace"]["labels"] == {"labctl.lab": "demo"}


@pytest.mark.parametrize("refused", ["ConfigMap", "Secret", "TrainingRuntime", "TrainJob"])
@pytest.mark.parametrize("when", ["rehearsal", "made"])
def test_a_refused_object_leaves_nothing_of_the_job(tmp_path: Path, refused: str, when: str) -> None:
    """If an object is refused, at the dry run or later, submit() raises HostError and only the namespace is left."""
    api = Strict(knows=[TRAINJOBS])
    api.refuses, api.when = refused, when
    new = begun(api, tmp_path)
    with pytest.raises(HostError, match=f"{refused} was refused: too many"):
        submit(api, new.lab.name, new.objects)
    assert {kind for kind, _ in api.objects} == {"Namespace"}


def test_a_runtime_that_trainer_has_not_seen_yet_is_waited_for(tmp_path: Path) -> None:
    """submit() retries a TrainJob that is refused because its runtime is not known yet."""

    class Late(FakeApi):
        looks = 0

        def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            """Refuse the first three TrainJobs for a runtime that is not found; apply others."""
            self.looks += manifest["kind"] == "TrainJob"
            if manifest["kind"] == "TrainJob" and self.looks < 4:
                told = 'TrainingRuntime "m" not found: specified trainingRuntime must be created before the TrainJob is'
                raise Refused(422, told)
            return super().apply(manifest, dry_run=dry_run)

    api = Late(knows=[TRAINJOBS])
    new = begun(api, tmp_path)
    submit(api, new.lab.name, new.objects)
    assert ("TrainJob", new.name) in api.objects


def test_a_runtime_that_trainer_never_sees_is_refused_after_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submit() of a TrainJob whose runtime stays unknown raises HostError after a while and leaves the namespace."""

    class Blind(FakeApi):
        def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            """Refuse each TrainJob for its runtime; apply others."""
            if manifest["kind"] == "TrainJob":
                raise Refused(422, "specified trainingRuntime must be created before the TrainJob is created")
            return super().apply(manifest, dry_run=dry_run)

    monkeypatch.setattr(cluster_runs, "SEEING", 0.01)
    api = Blind(knows=[TRAINJOBS])
    new = begun(api, tmp_path)
    with pytest.raises(HostError, match="must be created before"):
        submit(api, new.lab.name, new.objects)
    assert {kind for kind, _ in api.objects} == {"Namespace"}


def test_who_stops_labctl_while_it_submits_leaves_nothing_of_the_job(tmp_path: Path) -> None:
    """KeyboardInterrupt while the job is applied is raised by submit(), and only the namespace is left."""

    class Interrupted(FakeApi):
        def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            """Raise KeyboardInterrupt for the MPIJob, unless it is a dry run; apply others."""
            if manifest["kind"] == "MPIJob" and not dry_run:
                raise KeyboardInterrupt
            return super().apply(manifest, dry_run=dry_run)

    api = Interrupted()
    new = begun(api, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        submit(api, new.lab.name, new.objects)
    assert {kind for kind, _ in api.objects} == {"Namespace"}


def test_a_job_that_was_there_before_stays_where_a_change_of_it_is_refused(tmp_path: Path) -> None:
    """submit() of a job that exists and may not be changed raises HostError and keeps it."""
    api = Strict(knows=[TRAINJOBS])
    new = begun(api, tmp_path)
    submit(api, new.lab.name, new.objects)
    api.refuses = "TrainJob"
    with pytest.raises(HostError, match="TrainJob was refused"):
        submit(api, new.lab.name, new.objects)
    assert ("TrainJob", new.name) in api.objects


def test_a_namespace_and_a_claim_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    """prepare() changes neither an existing namespace nor an existing claim, and does not patch the namespace."""
    there: list[Manifest] = [
        {"kind": "Namespace", "metadata": {"name": "demo", "labels": {"team": "ours"}}},
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "demo-storage"}, "spec": {"is": "theirs"}},
    ]
    api = FakeApi(*there)
    new = begun(api, tmp_path, LAB_K8S_STORAGE_SIZE="10g")
    prepare(api, "demo", new.objects[:3:2])
    assert list(api.objects.values()) == there
    assert "patch namespaces" not in api.asked


def test_who_may_work_in_a_namespace_alone_needs_no_rights_to_it(tmp_path: Path) -> None:
    """submit() without rights to namespaces submits the job."""
    api = Strict(denied=["get namespaces", "patch namespaces"])
    new = begun(api, tmp_path)
    submit(api, new.lab.name, new.objects)
    assert ("MPIJob", new.name) in api.objects


# --- follow --------------------------------------------------------------------------------------------------


class World:
    """A submitted run, and its follower."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        """Make a cluster, a lab and its run, neither recorded nor submitted, and put the run's job."""
        knows = [TRAINJOBS] if given.get("LAB_K8S_JOB") == "trainjob" else [MPIJOBS]
        self.api, self.directory, self.monkeypatch = RunningApi(knows=knows), directory, monkeypatch
        self.clock = self.ticks()
        self.lab = lab_with_token(self.api, directory, **given)
        self.new = running.begun(self.lab)
        self.said: list[str] = []
        self.lines: list[str] = []
        self.run: ClusterRun = self.new
        self.job()
        self.stop = JobStopper(self.run, self.api)
        self.launcher = f"{self.run.name}-launcher"

    def job(self, **status: Any) -> None:
        """Put the run's job with this status."""
        self.api.put({"kind": self.run.kind, "metadata": {"name": self.run.name}, **status})

    def pod(self, node: str, **status: Any) -> None:
        """Put the pod of a node of the run with this status."""
        self.api.put(pod_of(self.run, node, **status))

    def pods(self, **status: Any) -> None:
        """Put the pods of launcher and both workers with this status."""
        for node in ("worker-0", "worker-1", "launcher"):
            self.pod(node, **status)

    def gone(self, node: str) -> None:
        """Remove a node's pod from the cluster."""
        del self.api.objects["Pod", f"{self.run.name}-{node}"]

    def prints(self, *lines: str, second: int = 0) -> None:
        """Add lines to the launcher's log, at this second."""
        self.api.prints(self.launcher, *lines, second=second)

    def then(self, *steps: Callable[[], object] | None) -> None:
        """Add a step for each request; None for a step in which nothing happens."""
        self.api.steps += [step or (lambda: None) for step in steps]

    def patience(self, **seconds: float) -> None:
        """Set time limits of the module, by name, for the test."""
        for name, value in seconds.items():
            self.monkeypatch.setattr(cluster_runs, name.upper(), value)

    def ticks(self) -> Callable[[], float]:
        """Let the clock go on by TICK each time that it is read, however busy this machine is; return it."""
        times = count(TICK, TICK)

        def clock() -> float:
            """Return the time of the next reading."""
            return next(times)

        self.monkeypatch.setattr(cluster_runs, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
        return clock

    def follow(self, patience: float = LIMIT) -> Ended:
        """Follow the run to its end; return how it ended; keep lines and notices."""
        run = replace(self.run, patience=patience)
        follower = Follower(self.api, run, self.stop, self.said.append)
        return follower.follow(lambda line: self.lines.append(line.text))

    def supervise(
        self,
        *,
        patience: float = LIMIT,
        ends: bool = False,
        gather: Callable[[str], object] = len,
    ) -> RunOutcome:
        """Supervise the run to its end; return its outcome; keep lines and notices."""

        def keep(lines: Sequence[Line]) -> Sequence[Line]:
            """Collect the lines; return them as they are."""
            self.lines += (line.text for line in lines)
            return lines

        run = replace(self.run, patience=patience)
        return supervise(self.api, run, keep, notice=self.said.append, ends=ends, gather=gather)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a run whose MPIJob is in the cluster, with its stopper."""
    return World(tmp_path, monkeypatch)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a run whose TrainJob is in the cluster, with its stopper."""
    return World(tmp_path, monkeypatch, LAB_K8S_JOB="trainjob")


def test_a_run_is_followed_from_its_first_line_to_its_launchers_last(world: World) -> None:
    """follow() returns the launcher's code and its seconds from the pod's start; the end mark is in no line."""
    world.then(None, lambda: world.pods(**waits("ContainerCreating")), None, lambda: world.pods(**runs()))
    world.prints("one", second=5)
    world.prints("two", f"{MARK}0", second=7)
    done = world.follow()
    assert (done.code, done.lost, world.lines) == (0, False, ["one", "two"])
    # From the start of the launcher.
    assert done.seconds == pytest.approx(7.002)
    assert world.said == []


def test_a_job_whose_definition_is_away_for_a_moment_was_not_deleted(world: World) -> None:
    """A job that is away with its definition for a moment is not taken for deleted, and a notice says so."""
    world.pods(**runs())
    job = world.api.objects["MPIJob", world.run.name]

    def away() -> None:
        """Remove the job and its definition."""
        world.api.knows.clear()
        del world.api.objects["MPIJob", world.run.name]

    def back() -> None:
        """Bring the job and its definition back."""
        world.api.knows.add(MPIJOBS)
        world.api.put(job)

    world.then(None, away, None, back, lambda: world.prints(f"{MARK}0"))
    assert world.follow().code == 0
    assert any("has no MPIJob at present" in one for one in world.said)


def test_what_workers_wait_for_is_noticed_where_the_launcher_runs_already(world: World) -> None:
    """With a running launcher, a worker that is not placed is noticed, one whose container is created is not."""
    world.pod("launcher", **runs())
    world.pod("worker-0", **unplaced("0/1 nodes are available"))
    world.pod("worker-1", **waits("ContainerCreating"))
    world.then(None, None, lambda: world.prints(f"{MARK}0"))
    assert world.follow().code == 0
    assert world.said == ["worker-0: 0/1 nodes are available"]


def test_what_pods_wait_for_is_noticed_once_each(world: World) -> None:
    """Each reason of a pending pod is noticed once per node."""
    world.then(
        lambda: world.pods(**unplaced("0/1 nodes are available")),
        None,
        lambda: world.pod("worker-0", **waits("ErrImagePull", "no such host")),
        None,
        lambda: world.pod("worker-0", **waits("ImagePullBackOff", "Back-off")),
        lambda: world.pods(**runs()),
    )
    world.prints(f"{MARK}0")
    assert world.follow().code == 0
    assert world.said == [
        "launcher: 0/1 nodes are available",
        "worker-0: 0/1 nodes are available",
        "worker-1: 0/1 nodes are available",
        "worker-0: ErrImagePull: no such host",
        "worker-0: ImagePullBackOff: Back-off",
    ]


def test_pods_that_fit_no_node_until_the_limit_do_not_fit(world: World) -> None:
    """Pods that are not placed until the limit end the run as does-not-fit, with nodes and reason."""
    world.pod("worker-0", **unplaced("0/1 nodes are available: 1 Insufficient memory."))
    world.pod("worker-1", **unplaced("0/1 nodes are available: 1 Insufficient memory."))
    assert world.follow(patience=0.05).code == 1
    assert world.stop.cause == "does-not-fit"
    assert world.stop.message == (
        "not started within 0.05 s (LAB_K8S_PATIENCE): worker-0, worker-1: 0/1 nodes are available: 1 Insufficient "
        "memory."
    )


def test_pods_that_do_not_become_ready_are_no_matter_of_room(world: World) -> None:
    """Pods of which one runs, and no more come until the limit, end the run as launcher-failed."""
    world.pod("worker-0", **runs())
    world.follow(patience=0.05)
    assert world.stop.cause == "launcher-failed"
    assert world.stop.message.endswith("(LAB_K8S_PATIENCE): pods did not become ready")


def test_an_image_that_is_not_there_ends_the_run_after_a_while(world: World) -> None:
    """An image that cannot be pulled for a while ends the run as no-image, with node and image."""
    world.monkeypatch.setattr(waiting, "IMAGE_PATIENCE", 0.03)
    world.pod("worker-0", **waits("ImagePullBackOff", "Back-off pulling image"))
    assert world.follow().code == 1
    assert world.stop.cause == "no-image"
    image = world.run.lab.image
    assert world.stop.message == (
        f"worker-0: the cluster cannot pull image {image}: ImagePullBackOff: Back-off pulling image"
    )


def test_an_image_that_is_not_there_at_the_limit_is_the_reason(world: World) -> None:
    """An image that cannot be pulled when the limit is reached is no-image."""
    world.pod("worker-0", **waits("ErrImagePull", "no"))
    world.follow(patience=0.02)
    assert world.stop.cause == "no-image"


@pytest.mark.parametrize(
    ("reason", "cause"), [("DeadlineExceeded", "timeout"), ("BackoffLimitExceeded", "launcher-failed")]
)
def test_a_job_that_fails_before_it_begins_says_why(world: World, reason: str, cause: str) -> None:
    """A job that fails before its pods start is a timeout for DeadlineExceeded, else launcher-failed."""
    world.then(None, lambda: world.job(**condition("Failed", reason, "Job was active longer than specified")))
    assert world.follow().code == 1
    assert world.stop.cause == cause
    assert world.stop.message == "the cluster ended it before it began: Job was active longer than specified"


@pytest.mark.parametrize("kind", ["Succeeded", "Complete"])
def test_a_job_that_has_succeeded_and_whose_launcher_is_gone_is_not_waited_for(world: World, kind: str) -> None:
    """See Succeeded or Complete without a launcher: exit code 1, cause no-metric, and a message where files are."""
    world.job(**condition(kind))
    assert world.follow().code == 1
    assert world.said == []
    assert world.stop.cause == "no-metric"
    assert world.stop.message == (
        "the cluster says that it succeeded, but its launcher and log are gone; if its pods had a claim, its files "
        f"are there, in /storage/runs/{world.run.run_id}"
    )


def test_a_job_that_failed_and_whose_launcher_is_gone_had_begun(world: World) -> None:
    """See Failed, Running before, without a launcher: exit code 1, and a message that the cluster ended it."""
    failed = condition("Failed", "BackoffLimitExceeded", "Job has reached the limit")
    failed["status"]["conditions"].append({"type": "Running", "status": "False"})
    world.job(**failed)
    assert world.follow().code == 1
    assert world.stop.message == ("the cluster ended it, and its launcher and log are gone: Job has reached the limit")


def test_time_in_a_queue_does_not_count(world: World) -> None:
    """Time while the job is suspended does not count to the limit; that it waits is noticed."""
    world.job(**condition("Suspended", "MPIJobSuspended", "waits in queue team"))
    world.then(*[None] * 6, world.job, lambda: world.pods(**runs()))
    world.prints(f"{MARK}0")
    patience = 10 * TICK
    assert world.follow(patience).code == 0
    assert world.clock() > 2 * patience
    assert world.said == ["MPIJob: waits to be admitted: waits in queue team"]


def test_a_job_that_is_suspended_without_a_word_is_said_to_be_so(world: World) -> None:
    """A suspended job without a message is noticed as suspended."""
    world.job(**condition("Suspended"))
    world.then(*[None] * 3, world.job, lambda: world.pods(**runs()))
    world.prints(f"{MARK}0")
    world.follow()
    assert world.said == ["MPIJob: is suspended"]


def event(message: str) -> Manifest:
    """Return a warning event FailedCreate with this message."""
    about = {"type": "Warning", "reason": "FailedCreate", "message": message, "lastTimestamp": "2026-01-02T03:04:05Z"}
    return {"kind": "Event", "metadata": {"name": "e"}, **about}


def test_a_job_without_pods_says_what_the_cluster_has_against_them(world: World) -> None:
    """A job without pods is ended as does-not-fit, with the warning event about it."""
    world.api.put({**event("exceeded quota: team"), "involvedObject": {"name": world.run.name}})
    world.follow(patience=0.1)
    assert world.said == ["MPIJob: FailedCreate: exceeded quota: team"]
    assert world.stop.message.endswith("MPIJob: FailedCreate: exceeded quota: team")
    assert world.stop.cause == "does-not-fit"


@pytest.mark.parametrize(("about", "there"), [("launcher", ["worker-0", "worker-1"]), ("node-0", ["worker-0"])])
def test_pods_that_are_refused_after_others_say_what_the_cluster_has_against_them(
    world: World, about: str, there: list[str]
) -> None:
    """A refusal about launcher or workers' job is noticed, and is in the message at the limit."""
    for node in there:
        world.pod(node, **runs())
    refused = {"name": f"{world.run.name}-{about}", "kind": "Job"}
    world.api.put({**event("violates PodSecurity"), "involvedObject": refused})
    world.follow(patience=0.1)
    assert world.said == ["MPIJob: FailedCreate: violates PodSecurity"]
    assert world.stop.message.endswith("MPIJob: FailedCreate: violates PodSecurity")


def test_what_was_refused_is_no_matter_once_all_pods_are_there(world: World) -> None:
    """A refusal is not noticed if all pods exist."""
    world.pods(**waits("ContainerCreating"))
    world.api.put({**event("violates PodSecurity"), "involvedObject": {"name": world.run.name}})
    world.then(*[None] * 20, lambda: world.pods(**runs()))
    world.prints(f"{MARK}0")
    world.follow()
    assert world.said == []


@pytest.mark.parametrize("denied", [set(), {"list events"}])
def test_a_job_of_which_nothing_comes_may_have_no_operator(world: World, denied: set[str]) -> None:
    """A job without pods and without a warning is noticed to have perhaps no operator."""
    world.api.denied |= denied
    assert world.follow(patience=0.1).code == 1
    assert world.said == ["MPIJob: no pod yet: is its operator running?"]


def test_lines_come_once_each_over_a_log_that_breaks(world: World) -> None:
    """A log whose connection breaks five times gives each line once, and the code."""
    world.pods(**runs())
    world.prints(*map(str, range(20)), f"{MARK}3")
    lost = urllib3.exceptions.ProtocolError("Connection broken")
    quiet = urllib3.exceptions.ReadTimeoutError(None, "", "Read timed out.")  # type: ignore[arg-type]
    world.api.broken = [(5, lost), (5, quiet), (12, OSError("reset")), (0, lost), (13, quiet)]
    assert world.follow().code == 3
    assert world.lines == [str(number) for number in range(20)]


def test_a_last_line_without_an_end_does_not_hide_how_the_run_ended(world: World) -> None:
    """An end mark behind a line without its end gives the code, and the line without the mark."""
    world.pods(**runs())
    world.prints("one", f"100 %{MARK}7")
    assert world.follow().code == 7
    assert world.lines == ["one", "100 %"]


def test_a_line_of_nothing_is_a_line(world: World) -> None:
    """An empty line is handed on."""
    world.pods(**runs())
    world.prints("one", "", "two", f"{MARK}0")
    world.follow()
    assert world.lines == ["one", "", "two"]


def test_who_has_stopped_a_run_is_in_its_launchers_last_line(world: World) -> None:
    """An end mark with `stopped by` gives cause interrupted and that message."""
    world.pods(**runs())
    world.prints(f"{MARK}143; stopped by ann@desk")
    assert world.follow().code == 143
    assert (world.stop.cause, world.stop.message) == ("interrupted", "stopped by ann@desk")


def test_a_launcher_that_ends_without_its_last_line_ends_the_run_after_all_that_it_printed(world: World) -> None:
    """A launcher that ends without its mark gives its exit code, after its last lines, and no cause."""
    world.pods(**runs())
    world.prints("one")

    def end() -> None:
        """Print a line and end the launcher with 1."""
        world.prints("workers were not reached")
        world.pod("launcher", **ended(1))

    world.then(*[None] * 5, end)
    assert world.follow().code == 1
    assert world.lines == ["one", "workers were not reached"]
    assert world.stop.cause is None


@pytest.mark.parametrize(
    ("status", "code", "cause", "words"),
    [
        (ended(137, "OOMKilled"), 137, "out-of-memory", "launcher: container ran out of memory (OOMKilled)"),
        ({**ended(137), "reason": "Evicted", "message": "low on memory"}, 137, "node-lost",
         "launcher: Evicted: low on memory"),
        ({"phase": "Failed"}, 137, "node-lost", "launcher: its pod has ended"),
        ({"phase": "Succeeded"}, 0, None, ""),
        (ended(7), 7, None, ""),
    ],
)  # fmt: skip
def test_what_the_cluster_does_to_a_launcher_is_the_reason(
    world: World, status: dict[str, Any], code: int, cause: str | None, words: str
) -> None:
    """A launcher out of memory, evicted or ended gives code, cause and message by its pod."""
    world.pods(**runs())
    world.then(*[None] * 3, lambda: world.pod("launcher", **status))
    assert world.follow().code == code
    assert world.stop.cause == cause
    assert words in world.stop.message


def test_the_clusters_own_limit_is_a_timeout(world: World) -> None:
    """A job that fails with DeadlineExceeded is a timeout, with the cluster's message."""
    world.pods(**runs())

    def end() -> None:
        """Let the job exceed its deadline and the launcher end with 143."""
        world.job(**condition("Failed", "DeadlineExceeded/Error", "Job was active longer than specified deadline"))
        world.pod("launcher", **ended(143))

    world.then(*[None] * 3, end)
    world.follow()
    assert world.stop.cause == "timeout"
    assert world.stop.message == "the cluster ended it: Job was active longer than specified deadline"


@pytest.mark.parametrize(
    ("lose", "cause", "words"),
    [
        (lambda world: world.pod("worker-1", **ended(137, "OOMKilled")), "out-of-memory", "worker-1: container ran"),
        (lambda world: world.pod("worker-1", **ended(1)), "node-lost", "worker-1: container ended with exit code 1"),
        (lambda world: world.pod("worker-1", deleted=True, **runs()), "node-lost", "worker-1: its pod was deleted"),
        (lambda world: world.gone("worker-1"), "node-lost", "worker-1: its pod is gone"),
        # Another pod of that name is not the one that the run has lost.
        (lambda world: world.pod("worker-1", uid="another", **runs()), "node-lost", "worker-1: its pod is gone"),
    ],
)  # fmt: skip
def test_a_worker_that_is_lost_ends_the_run(
    world: World, lose: Callable[[World], None], cause: str, words: str
) -> None:
    """A worker that has ended, or whose pod is deleted or replaced, stops the launcher; the cause names it."""
    world.pods(**runs())
    world.prints("one")
    told = threading.Event()

    def program(_: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        """At TERM print the end with 143; let each program succeed."""
        if "kill -TERM" in argv[-1]:
            world.prints(f"{MARK}143")
            told.set()
        return (SUCCESS,)

    world.api.programs = program
    world.then(*[None] * 5, lambda: lose(world))
    assert world.follow().code == 143
    assert told.is_set()
    assert world.stop.cause == cause
    assert words in world.stop.message
    assert world.lines == ["one"]


def test_an_evicted_worker_ends_the_run_though_its_operator_has_given_the_job_up(world: World) -> None:
    """An evicted worker is node-lost, though the job has already failed as evicted."""
    world.pods(**runs())

    def end(*_: Any) -> tuple[tuple[int, bytes], ...]:
        """Print the end with 143; succeed."""
        world.prints(f"{MARK}143")
        return (SUCCESS,)

    world.api.programs = end

    def evict() -> None:
        """Let the job fail as evicted and worker-1 be evicted."""
        world.job(**condition("Failed", "MPIJobEvicted", "1/2 workers are evicted"))
        world.pod("worker-1", phase="Failed", reason="Evicted", message="low on memory")

    world.then(*[None] * 5, evict)
    assert world.follow().code == 143
    assert (world.stop.cause, world.stop.message) == ("node-lost", "worker-1: Evicted: low on memory")


def test_workers_that_are_removed_at_the_clusters_own_limit_are_not_lost(world: World) -> None:
    """Workers removed after the job's deadline are a timeout, not lost, and nothing is executed."""
    world.pods(**runs())

    def end() -> None:
        """Let the job exceed its deadline and worker-1 be deleted."""
        world.job(**condition("Failed", "DeadlineExceeded", "too long"))
        world.pod("worker-1", deleted=True, **runs())

    world.then(*[None] * 3, end, None, lambda: world.pod("launcher", **ended(143)))
    assert world.follow().code == 143
    assert (world.stop.cause, world.stop.message) == ("timeout", "the cluster ended it: too long")
    assert world.api.executed == []


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_a_job_that_its_queue_preempts_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A job that is suspended while it runs is interrupted, `suspended or preempted`, and nothing is executed."""
    world = World(tmp_path, monkeypatch, LAB_K8S_JOB=kind.lower())
    world.pods(**runs())

    def preempt() -> None:
        """Set the job to be suspended and let its pods be deleted."""
        # Its operator removes the pods before it says so.
        world.job(spec={"suspend": True} if kind == "TrainJob" else {"runPolicy": {"suspend": True}})
        world.pods(deleted=True, **runs())

    def gone() -> None:
        """Let the job be suspended and its pods be gone."""
        world.job(**condition("Suspended", "Suspended", "it is suspended"))
        for node in ("worker-0", "worker-1", "launcher"):
            world.gone(node)

    world.then(*[None] * 3, preempt, None, gone)
    assert world.follow().code == 137
    assert (world.stop.cause, world.stop.message) == (
        "interrupted",
        f"{kind} {world.run.name} was suspended or preempted",
    )
    assert world.api.executed == []


def test_a_launcher_that_is_told_to_go_and_of_which_nobody_hears_has_lost_its_node(world: World) -> None:
    """A launcher that is being deleted and reports no end is node-lost with 137, and nothing is gathered."""
    world.patience(reporting=0.05)
    world.pods(**runs())
    world.prints("one")
    gathered: list[str] = []
    world.then(*[None] * 5, lambda: world.pod("launcher", deleted=True, **runs()))
    # What its log would say, nobody on the node says either.
    world.patience(ending=0.05)
    outcome = world.supervise(gather=gathered.append)
    assert (outcome.exit_code, outcome.cause) == (137, "node-lost")
    assert outcome.message == "launcher: its node does not answer"
    assert gathered == []


def test_a_launcher_has_the_time_that_its_pod_has_to_end(world: World) -> None:
    """A launcher that is being deleted is waited for as long as its grace period of 30 s."""
    world.patience(reporting=0)
    world.pods(**runs())

    def delete() -> None:
        """Let the launcher be deleted with a grace period of 30 s."""
        world.pod("launcher", deleted=True, **runs())
        world.api.objects["Pod", world.launcher]["metadata"]["deletionGracePeriodSeconds"] = 30

    world.then(None, delete, *[None] * 10, lambda: world.prints(f"{MARK}143"))
    world.monkeypatch.setattr(cluster_runs, "EXPLAINING", 0)
    assert world.follow().code == 143


def test_a_worker_that_was_lost_before_its_ranks_failed_is_the_reason(world: World) -> None:
    """A worker out of memory is the cause, though the launcher's end was seen at the same time."""
    world.pods(**runs())
    world.prints("one")

    def lose() -> None:
        """Let worker-1 have ended out of memory."""
        # All within one look.
        world.pod("worker-1", **ended(137, "OOMKilled"))

    world.prints(f"{MARK}255")
    world.then(None, lose)
    assert world.follow().code == 255
    assert world.stop.cause == "out-of-memory"


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (ended(137, "OOMKilled"), "worker-1: container ran out of memory"),
        ({"deleted": True, **ended(137, "OOMKilled")}, "worker-1: container ran out of memory"),
        (ended(1), "worker-1: container ended with exit code 1"),
    ],
)
def test_the_worker_that_failed_is_named_not_those_that_the_cluster_deleted_for_it(
    train: World, first: dict[str, Any], words: str
) -> None:
    """Of several deleted pods, the worker that has failed itself is named."""
    train.pods(**runs())
    train.patience(ending=0.05)

    def lose() -> None:
        """Delete launcher and worker-0, and let worker-1 fail."""
        train.pod("launcher", deleted=True, **runs())
        train.pod("worker-0", deleted=True, **runs())
        train.pod("worker-1", **first)

    train.then(*[None] * 3, lose)
    train.follow()
    assert train.stop.message.startswith(words)


def test_a_launcher_that_tells_its_end_as_its_job_is_deleted_has_told_it(world: World) -> None:
    """A launcher whose end mark comes as its job is deleted has code 143 and is not lost."""
    world.pods(**runs())
    world.prints("one")

    def delete() -> None:
        """Print the end mark and delete the job."""
        world.prints(f"{MARK}143")
        world.api.delete("MPIJob", world.run.name)

    world.then(*[None] * 3, delete)
    done = world.follow()
    assert (done.code, done.lost) == (143, False)
    assert world.stop.message == f"MPIJob {world.run.name} was deleted"


def test_nobody_reads_on_once_a_run_has_ended(world: World) -> None:
    """After follow() no thread that it started is alive."""
    before = {*threading.enumerate()}
    world.pods(**runs())
    world.prints(f"{MARK}0")
    world.follow()
    for thread in {*threading.enumerate()} - before:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_a_launcher_that_has_ended_before_anyone_looked_took_the_time_of_its_lines(world: World) -> None:
    """The seconds of a launcher that had ended before are those between its lines."""
    world.pods(**ended(1))
    world.prints("one", second=5)
    world.prints("two", second=7)
    assert world.follow().seconds == pytest.approx(2.001)


def test_a_job_that_somebody_deletes_is_said_to_be_deleted(world: World) -> None:
    """A deleted job ends the run with 137, lost, as interrupted."""
    world.pods(**runs())
    world.prints("one")
    world.then(*[None] * 5, lambda: world.api.delete("MPIJob", world.run.name))
    done = world.follow()
    assert (done.code, done.lost) == (137, True)
    assert (world.stop.cause, world.stop.message) == ("interrupted", f"MPIJob {world.run.name} was deleted")


@pytest.mark.parametrize(
    ("happens", "cause", "words"),
    [
        (lambda world: world.api.delete("MPIJob", world.run.name), "interrupted", "was deleted"),
        (lambda world: world.job(**condition("Failed", "DeadlineExceeded", "too long")), "timeout", "too long"),
        (lambda world: world.pod("launcher", deleted=True, **ended(137, "OOMKilled")), "out-of-memory", "OOMKilled"),
        (lambda _: None, "node-lost", "launcher: its pod was deleted"),
    ],
)
def test_why_the_cluster_ended_a_launcher_is_waited_for(
    world: World, happens: Callable[[World], None], cause: str, words: str
) -> None:
    """After the launcher's code 143 the cluster's own reason is waited for, and becomes cause and message.

    The launcher's last output comes before the cluster reports the reason.
    """
    world.patience(explaining=100 * TICK)
    # All of its pods are told to go.
    world.pods(deleted=True, **runs())
    world.prints(f"{MARK}143")

    def explain() -> None:
        """Let the planted reason happen; if it is out of memory, fail the job too."""
        happens(world)
        if cause == "out-of-memory":
            world.job(**condition("Failed", "BackoffLimitExceeded"))

    world.then(lambda: world.pod("launcher", deleted=True, **runs()), None, explain)
    follower = Follower(world.api, world.run, world.stop, world.said.append)
    follower.launcher = world.launcher
    follower._explain(143)
    assert world.stop.cause == cause
    assert words in world.stop.message


@pytest.mark.parametrize("code", [0, 143])
def test_what_has_ended_well_or_for_a_known_reason_needs_no_explanation(world: World, code: int) -> None:
    """_explain() of code 0, or of a run with a cause, makes no request."""
    world.patience(explaining=1000)
    if code:
        world.stop.note("timeout", "known")
    world.pods(deleted=True, **runs())
    world.api.delete("MPIJob", world.run.name)
    looks = len(world.api.asked)
    Follower(world.api, world.run, world.stop, world.said.append)._explain(code)
    assert world.stop.cause == ("timeout" if code else None)
    assert len(world.api.asked) == looks


def test_a_launcher_that_failed_by_itself_needs_no_explanation(world: World) -> None:
    """A launcher that ends with 1 while its pods run has no cause, and no reason is waited for."""
    world.pods(**runs())
    world.prints(f"{MARK}1")
    world.patience(explaining=1000)
    assert world.follow().code == 1
    assert world.stop.cause is None


# --- the API server comes and goes ---------------------------------------------------------------------------


def test_a_server_that_is_silent_for_a_while_is_waited_for(world: World) -> None:
    """A server that is silent for a while gives one notice; then all lines and the code come."""
    world.pods(**runs())
    world.prints("one")
    looks = iter(range(10))

    def silent() -> None:
        """Make the server silent, and let each later request call back()."""
        world.api.fails = 0
        world.monkeypatch.setattr(world.api, "_take_step", back)

    def back() -> None:
        """Once called more than ten times, let the server answer, print the end and restore the requests."""
        if next(looks, None) is None:
            world.api.fails = None
            world.prints("two", f"{MARK}0")
            world.monkeypatch.delattr(world.api, "_take_step")

    world.then(None, silent)
    assert world.follow().code == 0
    assert world.lines == ["one", "two"]
    assert len(world.said) == 1
    assert "does not answer: refused; the run goes on, and labctl asks again for 10 min" in world.said[0]


def test_a_server_that_is_silent_for_too_long_leaves_the_run_to_itself(world: World) -> None:
    """A server that is silent too long raises HostError that the run goes on, with `labctl attach` as hint."""
    world.patience(silent_for=0.02)
    world.pods(**runs())
    world.then(None, lambda: setattr(world.api, "fails", 0))
    with pytest.raises(
        HostError, match=f"does not answer: refused; run {world.run.run_id} goes on without labctl"
    ) as left:
        world.follow()
    assert left.value.hint == f"labctl attach {world.run.run_id}"


def test_a_second_ctrl_c_does_not_wait_for_a_silent_server(world: World) -> None:
    """With a silent server, a second SIGINT raises HostError that the run goes on."""
    world.pods(**runs())

    def silent() -> None:
        """Make the server silent, and end the run without a grace."""
        world.api.fails = 0
        world.stop.end(0)

    world.then(None, silent)
    with pytest.raises(HostError, match="goes on without labctl"):
        world.follow()


def test_silences_do_not_add_up(world: World) -> None:
    """Silences with answers between them do not count together, and the run is followed to its end."""
    # Shorter than all silences together, and longer than any.
    world.patience(silent_for=200 * TICK)
    world.pods(**waits("ContainerCreating"))
    numbers = iter(range(200))

    def step() -> None:
        """Answer at each twentieth request; at the last one start the pods."""
        number = next(numbers, 200)
        world.api.fails = 0 if number % 20 else None
        if number == 200:
            world.api.fails = None
            world.pods(**runs())

    world.monkeypatch.setattr(world.api, "_take_step", step)
    world.prints(f"{MARK}0")
    assert world.follow().code == 0


def test_what_the_server_refuses_ends_the_following_at_once(world: World) -> None:
    """Status 401 while following raises HostError to log in again and attach."""
    world.pods(**runs())
    world.then(None, lambda: setattr(world.api, "fails", 401))
    with pytest.raises(HostError, match="does not accept the credentials") as refused:
        world.follow()
    assert refused.value.message.endswith(f"; run {world.run.run_id} goes on without labctl")
    assert refused.value.hint.startswith("log in to the cluster again: ")
    assert refused.value.hint.endswith(f"; then labctl attach {world.run.run_id}")


def test_a_store_that_chooses_a_leader_does_not_end_the_following(world: World) -> None:
    """Status 500 for one request does not end the following."""
    world.pods(**runs())
    # Its log is not to be had either.
    world.api.broken = [(0, OSError("reset"))] * 5

    def fails() -> None:
        """Answer the next request with 500."""
        world.api.fails = 500
        world.monkeypatch.setattr(world.api, "_take_step", lambda: setattr(world.api, "fails", None))

    world.prints(f"{MARK}0")
    world.then(None, fails)
    assert world.follow().code == 0


# --- stop ----------------------------------------------------------------------------------------------------


def test_a_run_is_told_to_end_in_its_launcher_alone(world: World) -> None:
    """JobStopper.because() sends TERM to the launcher's command; a later reason does not replace the first."""
    world.pods(**runs())
    world.stop.because("interrupted", "stopped by SIGINT")
    wait_until(lambda: bool(world.api.executed), LIMIT, "its command is ended")
    assert world.api.executed == [("sh", "-c", 'kill -TERM "$(cat ~/.command)"')]
    assert world.stop.told
    world.stop.because("node-lost", "later")
    assert world.stop.message == "stopped by SIGINT"


def test_a_run_that_has_not_begun_ends_at_once(world: World) -> None:
    """A run stopped before its pods start ends with 137, and nothing is executed."""
    world.pods(**waits("ContainerCreating"))
    world.then(None, None, lambda: world.stop.because("interrupted", "stopped by SIGINT"))
    assert world.follow().code == 137
    assert world.api.executed == []


def test_a_run_that_does_not_end_when_it_is_told_is_given_up_after_a_while(world: World) -> None:
    """A run that does not end after TERM is given up with 137 after a while."""
    world.patience(ending=0.03)
    world.pods(**runs())
    world.prints("one")

    def stop_once_read() -> None:
        """Stop the run at the first look after its line was read."""
        if world.lines:
            world.stop.because("interrupted", "stopped by SIGINT")
        else:
            world.then(stop_once_read)

    world.then(stop_once_read)
    assert world.follow().code == 137
    assert world.lines == ["one"]


def test_a_second_ctrl_c_waits_for_nothing(world: World) -> None:
    """A second SIGINT ends the run with 137, and nothing is gathered."""
    world.pods(**runs())
    gathered: list[str] = []

    def twice() -> None:
        """Send SIGINT twice."""
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    world.then(*[None] * 3, twice)
    outcome = world.supervise(ends=True, gather=gathered.append)
    assert (outcome.exit_code, outcome.cause, outcome.message) == (137, "interrupted", "stopped by SIGINT")
    assert gathered == []


def test_ctrl_c_tells_the_run_to_end_and_its_results_are_fetched(world: World) -> None:
    """SIGINT sends TERM, the run ends with 130 as interrupted, and its results are gathered."""
    world.pods(**runs())

    def end(*_: Any) -> tuple[tuple[int, bytes], ...]:
        """Print the end with 130; succeed."""
        world.prints(f"{MARK}130")
        return (SUCCESS,)

    world.api.programs = end
    gathered: list[str] = []
    world.then(*[None] * 3, lambda: signal.raise_signal(signal.SIGINT))
    outcome = world.supervise(ends=True, gather=gathered.append)
    assert (outcome.exit_code, outcome.cause) == (130, "interrupted")
    assert gathered == [world.launcher]


# --- outcomes ------------------------------------------------------------------------------------------------


def test_ctrl_c_while_results_are_fetched_changes_nothing(world: World) -> None:
    """SIGINT while results are gathered changes neither code nor cause."""
    world.pods(**runs())
    world.prints("one", f"{MARK}0")
    gathered: list[str] = []

    def gather(launcher: str) -> None:
        """Send SIGINT twice, then record the launcher."""
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        gathered.append(launcher)

    outcome = world.supervise(ends=True, gather=gather)
    assert (outcome.exit_code, outcome.cause) == (0, None)
    assert gathered == [world.launcher]


def test_a_run_that_ends_well_has_no_cause_and_its_files_are_gathered(world: World) -> None:
    """A run with code 0 has no cause, its seconds by the log, and its results are gathered."""
    world.pods(**runs())
    world.prints("one", f"{MARK}0", second=9)
    gathered: list[str] = []
    outcome = world.supervise(gather=gathered.append)
    assert (outcome.exit_code, outcome.cause, outcome.message) == (0, None, "")
    assert outcome.seconds == pytest.approx(9.001)
    assert gathered == [world.launcher]


def test_nothing_is_gathered_of_a_run_that_never_began_or_whose_job_is_gone(world: World) -> None:
    """Nothing is gathered of a run that does not fit, nor of one whose job is deleted."""
    gathered: list[str] = []
    world.pod("worker-0", **unplaced("no room"))
    assert world.supervise(patience=0.01, gather=gathered.append).cause == "does-not-fit"
    world.pods(**runs())
    world.then(None, None, lambda: world.api.delete("MPIJob", world.run.name))
    assert world.supervise(gather=gathered.append).cause == "interrupted"
    assert gathered == []


def test_a_run_that_prints_its_first_line_late_still_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 124 at 10 s after the pod's start is a timeout, though the first line came later."""
    world = World(tmp_path, monkeypatch, timeout="10s")
    world.pods(**runs("2026-01-02T03:04:00Z"))
    # Python takes its time to start, and the run's clock goes.
    rank = world.run.job.nodes[0].name
    world.prints(f"\x010!\x02labctl: rank 0 of 2 on {rank}", second=4)
    world.prints(f"{MARK}124", second=10)
    outcome = world.supervise()
    assert (outcome.exit_code, outcome.cause) == (124, "timeout")
    assert outcome.message.startswith("timed out after 10 s; ")


def test_a_program_that_ends_with_124_before_its_time_has_not_timed_out(world: World) -> None:
    """Code 124 before the limit is no timeout."""
    world.pods(**runs())
    world.prints("one", f"{MARK}124", second=3)
    outcome = world.supervise()
    assert (outcome.exit_code, outcome.cause) == (124, None)


def test_no_rank_is_blamed_for_its_silence_at_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, ranks that have printed are not named as silent."""
    world = World(tmp_path, monkeypatch, timeout="50s")
    world.pods(**runs())
    world.prints("\x010\x02step 1", "\x011\x02step 1", second=5)
    world.prints(f"{MARK}124", second=51)
    outcome = world.supervise()
    assert outcome.message == "timed out after 50 s"
    assert not outcome.silent


def test_a_run_in_which_no_rank_speaks_is_said_to_be_silent(world: World) -> None:
    """A run in which no rank printed is silent."""
    world.pods(**runs())
    world.prints(f"{MARK}0")
    assert world.supervise().silent


def test_a_rank_that_fails_is_named_by_its_short_node(world: World) -> None:
    """A crashed rank is named with the lab's name of its node."""
    world.pods(**runs())
    node = world.run.job.nodes[1].name
    world.prints(f"\x011!\x02labctl: rank 1 on {node} exited with code 9", f"{MARK}9")
    outcome = world.supervise()
    assert outcome.cause == "rank-crashed"
    assert outcome.message == "rank 1 on worker-1 exited with code 9"


def elastic(world: World) -> None:
    """Make the run's launcher elastic, so that it restarts failed ranks."""
    workload = replace(world.run.job.workload, launcher="torchrun:elastic")
    world.run = replace(world.run, job=replace(world.run.job, workload=workload))
    assert launchers.is_elastic("torchrun:elastic")


@pytest.mark.parametrize(("code", "cause"), [(0, None), (124, "timeout"), (9, "rank-crashed")])
def test_a_rank_that_is_started_again_is_forgiven_unless_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, cause: str | None
) -> None:
    """With an elastic launcher a crashed rank is the cause only if the run fails."""
    world = World(tmp_path, monkeypatch, timeout="10s")
    elastic(world)
    world.pods(**runs())
    world.prints(f"\x011!\x02labctl: rank 1 on {world.run.job.nodes[1].name} exited with code 9", second=1)
    world.prints(f"{MARK}{code}", second=11)
    assert world.supervise().cause == cause


STALL = "no step and no line for 600 s; steps took 2 s; the last was step 5/9"


@pytest.mark.parametrize(
    ("end", "code", "cause", "message"),
    [
        (f"137 after 612.3 s; stalled: {STALL}", 137, "stalled", STALL),
        ("124 after 10.1 s; timeout: timed out after 10 s", 124, "timeout",
         "timed out after 10 s; no rank wrote a line"),
        ("137 after 20 s; node-lost: {node}: its sshd is gone", 137, "node-lost", "worker-1: its sshd is gone"),
        ("143 after 3 s; rank-crashed: rank 1 on {node} exited with code 7", 143, "rank-crashed",
         "rank 1 on worker-1 exited with code 7"),
        ("0 after 10.1 s", 0, None, ""),
        # Its program said so before its time was over: by the agent's clock, not by that of the pod's start.
        ("124 after 8 s", 124, None, ""),
        ("143 after 3 s; stopped by ann@desk", 143, "interrupted", "stopped by ann@desk"),
    ],
)  # fmt: skip
def test_the_agent_in_the_launcher_says_why_it_has_ended_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int, cause: str | None, message: str
) -> None:
    """The cause after the end mark is the run's cause, with short node names; its seconds are the run's."""
    world = World(tmp_path, monkeypatch, timeout="10s")
    world.pods(**runs())
    world.prints(MARK + end.format(node=world.run.job.nodes[1].name), second=11)
    outcome = world.supervise()
    assert (outcome.exit_code, outcome.cause, outcome.message) == (code, cause, message)
    assert outcome.seconds == float(end.split()[2])


def test_the_rank_that_the_agent_has_heard_of_is_explained_by_what_it_wrote(world: World) -> None:
    """A crashed rank in the agent's end mark is quoted with the rank's last line."""
    world.pods(**runs())
    node = world.run.job.nodes[1].name
    world.prints("\x011\x02ValueError: 7", f"\x011!\x02labctl: rank 1 on {node} exited with code 7")
    world.prints(f"{MARK}0 after 3 s; rank-crashed: rank 1 on {node} exited with code 7")
    outcome = world.supervise()
    assert (outcome.cause, outcome.message) == ("rank-crashed", "rank 1 on worker-1 exited with code 7: ValueError: 7")


def test_a_rank_that_crashed_does_not_end_the_run_from_here(world: World) -> None:
    """A crashed rank ends the run only by the agent in the launcher: nothing is executed."""
    world.pods(**runs())
    node = world.run.job.nodes[1].name
    world.prints(f"\x011!\x02labctl: rank 1 on {node} exited with code 7")
    world.then(*[None] * 50, lambda: world.prints(f"{MARK}7 after 3 s"))
    assert world.supervise().cause == "rank-crashed"
    assert world.api.executed == []


@pytest.mark.parametrize("rank", ["", "\x010\x02"])
def test_a_program_that_prints_the_words_of_a_last_line_goes_on(world: World, rank: str) -> None:
    """A program that prints the words of the end mark does not end the run."""
    world.pods(**runs())
    forged = rank + MARK.rpartition("\x02")[2] + "0"
    world.prints(forged, "two", f"{MARK}3 after 1 s")
    assert world.follow().code == 3
    assert len(world.lines) == 2


def test_an_image_without_an_agent_is_said_once_to_have_none(world: World) -> None:
    """The line that the image has no agent is a notice, and not among the lines."""
    world.pods(**runs())
    world.prints(cluster_runs.NO_AGENT, "one", f"{MARK}0")
    world.follow()
    assert (world.said, world.lines) == ([cluster_runs.NO_AGENT], ["one"])


def test_a_token_is_in_no_message(world: World) -> None:
    """A token in the cluster's message is redacted."""
    world.pod("worker-0", **unplaced(f"no room for {TOKEN}"))
    assert world.supervise(patience=0.01).message.endswith("worker-0: no room for [REDACTED]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name}-worker-3.{name}.demo.svc: no", "worker-3: no"),
        ("{name}-worker-12.{name}: no", "worker-12: no"),
        ("lost {name}-worker-0", "lost worker-0"),
        ("pod {name}-launcher-x7k2p has ended", "pod launcher has ended"),
        ("{name}-launcher", "launcher"),
        ("{name}-node-0-3.{name} and {name}-node-0-11.{name}", "worker-3 and worker-11"),
        ("{name}-launcher-0-0-x7k2p.", "launcher."),
        ("other-worker-1 stays", "other-worker-1 stays"),
    ],
)
def test_names_of_pods_are_said_as_a_lab_calls_its_nodes(world: World, text: str, said: str) -> None:
    """short() replaces pods' and services' names by worker-N and launcher, and keeps other names."""
    assert world.run.short(text.format(name=world.run.name)) == said


# --- judge and record ----------------------------------------------------------------------------------------


def judged(world: World) -> tuple[Result, Path]:
    """Record the run and judge it; return the result, and the record's directory."""
    running.recorded(world.lab, world.new)
    result = judge.judge(clusters.backend(world.lab), world.run.run_id, world.lines.extend)
    return result, store.directory(world.directory, world.run.run_id)


def reported(world: World) -> list[str]:
    """Return the lines in which both ranks report their start."""
    nodes = [node.name for node in world.run.job.nodes]
    return [f"\x01{rank}!\x02labctl: rank {rank} of 2 on {node}" for rank, node in enumerate(nodes)]


def test_a_run_is_judged_recorded_and_removed_from_the_cluster(world: World) -> None:
    """judge() records a PASS with ranks, metric and files, redacts the token, and deletes the job's objects."""
    world.pods(**runs())
    world.prints(*reported(world), f"\x010\x02answer: 42 {TOKEN}", f"{MARK}0", second=8)
    world.api.programs = serving((entry("./model.bin"), b"weights"), (entry("./ranks/0.log"), f"a {TOKEN}\n".encode()))
    submit_beside(world)
    result, path = judged(world)
    assert (result.verdict, result.exit_code, result.world_size) == ("PASS", 0, 2)
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(0, "worker-0"), (1, "worker-1")]
    assert result.metrics["answer"]["value"] == 42
    assert result.seconds == pytest.approx(8.003)
    assert (path / "model.bin").read_bytes() == b"weights"
    assert "answer: 42 [REDACTED]\n" in (path / "output.log").read_text()
    assert (path / "ranks/0.log").read_text() == "a [REDACTED]\n"
    for kept in path.rglob("*"):
        assert kept.is_dir() or TOKEN not in kept.read_text(errors="replace"), kept
    assert not any(TOKEN in line for line in world.lines)
    assert json.loads((path / "result.json").read_text())["verdict"] == "PASS"
    # The launcher is told that it may go, and ends by itself.
    assert ("sh", "-c", "touch ~/.fetched") in world.api.executed
    assert [one for one in world.api.objects if one[0] != "Namespace"] == [("Pod", world.launcher)]


def submit_beside(world: World) -> None:
    """Put ConfigMap and Secret of the run."""
    for kind in ("ConfigMap", "Secret"):
        world.api.put({"kind": kind, "metadata": {"name": world.run.name}})


def test_what_was_sent_is_recorded_without_the_secret(world: World) -> None:
    """rendered/manifests.yaml has the job and not the Secret."""
    running.recorded(world.lab, world.new)
    sent = (store.directory(world.directory, world.run.run_id) / "rendered/manifests.yaml").read_text()
    assert "kind: MPIJob" in sent
    assert TOKEN not in sent
    assert "kind: Secret" not in sent


def test_a_run_that_does_not_fit_is_recorded_as_such(world: World) -> None:
    """An image that cannot be pulled is judged ERROR, no-image, exit code 3, with the token redacted."""
    world.monkeypatch.setattr(waiting, "IMAGE_PATIENCE", 0)
    world.pod("worker-0", **waits("ErrImagePull", f"denied for {TOKEN}"))
    result, _ = judged(world)
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "no-image", 3)
    assert "denied for [REDACTED]" in result.message


def test_a_metric_without_a_line_is_a_warning(world: World) -> None:
    """A metric that no line matches is warned of."""
    events: list[Event] = []
    world.lab = _emitting(world.lab, events)
    world.pods(**runs())
    world.prints(*reported(world), f"{MARK}0")
    judged(world)
    assert "metric `answer`: no line of the output matches" in _warnings(events)[-1]


def _emitting(of: ClusterLab, events: list[Event]) -> ClusterLab:
    """Return the lab with its events added to the list."""
    return replace(of, context=replace(of.context, emit=events.append))


def _warnings(events: list[Event]) -> list[str]:
    """Return the texts of the warnings."""
    return [event.text for event in events if event.kind == "warning"]


# --- fetch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fetched(world: World) -> Callable[..., tuple[Path, list[str]]]:
    """Return a function that records the run and fetches planted files; returns their folder and the warnings."""

    def fetch(*members: tuple[tarfile.TarInfo, bytes], end: tuple[int, bytes] = SUCCESS) -> tuple[Path, list[str]]:
        """Fetch what tar prints, assert that success alone makes ~/.fetched; return results' folder and warnings."""
        said: list[str] = []
        running.recorded(world.lab, world.new)
        world.api.programs = serving(*members, end=end)
        done = cluster_runs.fetch(world.api, world.run, world.launcher, said.append)
        assert done == (world.api.executed[-1] == ("sh", "-c", "touch ~/.fetched"))
        return store.outputs(world.directory, world.run.run_id), said

    return fetch


def test_links_and_names_that_lead_out_are_left_out_and_the_rest_is_fetched(
    fetched: Callable[..., tuple[Path, list[str]]], tmp_path: Path
) -> None:
    """Members with `..`, links that lead out, pipes and devices are not fetched, with one warning; the rest is."""
    here, said = fetched(
        (entry("./first.txt"), b"1"),
        (entry("./models", tarfile.SYMTYPE, "/storage/models"), b""),
        (entry("./models/inside.txt"), b"within the lab now"),
        (entry("./up", tarfile.SYMTYPE, "../../../.."), b""),
        (entry("../../escaped.txt"), b"no"),
        (entry("./hard", tarfile.LNKTYPE, "../../.env"), b""),
        (entry("./pipe", tarfile.FIFOTYPE), b""),
        (entry("./disk", tarfile.BLKTYPE), b""),
        (entry("./near", tarfile.SYMTYPE, "first.txt"), b""),
        (entry("./last.txt"), b"2"),
    )
    assert (here / "first.txt").read_bytes() == b"1"
    assert (here / "last.txt").read_bytes() == b"2"
    assert (here / "near").read_bytes() == b"1"
    assert not (here / "models").is_symlink()
    assert not any((here / name).exists() or (here / name).is_symlink() for name in ("up", "hard", "pipe", "disk"))
    assert not list(tmp_path.rglob("escaped.txt"))
    (warning,) = said
    assert warning == (
        "not fetched, as they are not regular files or point outside the run's directory: models, up, "
        "../../escaped.txt, hard and 2 more"
    )


def test_an_absolute_name_leads_out(fetched: Callable[..., tuple[Path, list[str]]]) -> None:
    """A member with an absolute name is not fetched, with a warning."""
    here, said = fetched((entry("/labctl-absolute-name.txt"), b"x"))
    assert not Path("/labctl-absolute-name.txt").exists()
    assert not list(here.rglob("*absolute*"))
    (warning,) = said
    assert warning.endswith(": /labctl-absolute-name.txt")


def test_files_that_change_while_they_are_read_are_fetched(fetched: Callable[..., tuple[Path, list[str]]]) -> None:
    """tar's exit code 1 is no warning, and the file is fetched."""
    here, said = fetched((entry("./log.txt"), b"so far"), end=failure(1))
    assert (here / "log.txt").read_bytes() == b"so far"
    assert said == []


def test_what_cannot_be_fetched_stays_in_the_launcher_for_a_while(
    fetched: Callable[..., tuple[Path, list[str]]], world: World
) -> None:
    """tar's exit code 2 is a warning with `kubectl cp`, and the launcher is not told to go."""
    _, (said,) = fetched((entry("./log.txt"), b"x"), end=failure(2))
    copy = f"kubectl cp demo/{world.launcher}:{world.run.job.directory} runs/{world.run.run_id}"
    assert said == (
        "the run's files were not fetched: tar ended with exit code 2; launcher has them for 10 min: " + copy
    )
    assert ("sh", "-c", "touch ~/.fetched") not in world.api.executed


def test_a_fetch_whose_connection_is_lost_is_made_again(
    fetched: Callable[..., tuple[Path, list[str]]], world: World
) -> None:
    """A fetch whose connection breaks is made again, without a warning."""
    real, ends = serving, iter([(ERR, b"cut off"), (ERR, b"again")])
    member = (entry("./log.txt"), b"whole")

    def flaky(*members: Any, end: Any) -> Any:
        """Break the first two connections of tar; serve the files at the third."""
        return lambda *asked: real(*members, end=next(ends, end) if "tar -C" in asked[1][2] else SUCCESS)(*asked)

    world.monkeypatch.setitem(globals(), "serving", flaky)
    here, said = fetched(member)
    assert (here / "log.txt").read_bytes() == b"whole"
    assert said == []


def test_a_stream_that_is_no_archive_is_a_warning(world: World) -> None:
    """Output that is no archive is a warning, and fetch() returns False."""
    said: list[str] = []
    running.recorded(world.lab, world.new)
    world.api.programs = lambda *_: ((OUT, b"tar: not found" * 100), SUCCESS)
    assert not cluster_runs.fetch(world.api, world.run, world.launcher, said.append)
    assert said[0].startswith("the run's files were not fetched: ")


# --- clear ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_removed_is_a_warning_with_what_removes_it(world: World) -> None:
    """clear() without the right to delete the job warns, with `labctl down`."""
    said: list[str] = []
    world.api.denied = {"delete mpijobs.kubeflow.org"}
    cluster_runs.clear(world.api, world.run, said.append)
    (warning,) = said
    assert warning.startswith(f"MPIJob {world.run.name} is not removed: cannot delete mpijobs.kubeflow.org")
    assert warning.endswith("; `labctl down` removes it")


def test_a_trainjobs_runtime_goes_with_it(train: World) -> None:
    """clear() deletes the TrainJob and its runtime."""
    train.api.put({"kind": "TrainingRuntime", "metadata": {"name": train.run.name}})
    cluster_runs.clear(train.api, train.run, print)
    assert not [kind for kind, _ in train.api.objects if kind in ("TrainJob", "TrainingRuntime")]


def test_times_of_logs_are_read_to_the_microsecond() -> None:
    """seconds_of() reads a log's time to the microsecond, 0 if it is none."""
    assert cluster_runs.seconds_of("1970-01-01T00:00:01.500000999Z") == 1.5
    assert cluster_runs.seconds_of("1970-01-01T00:00:02Z") == 2
    assert cluster_runs.seconds_of("None") == 0


# --- the pods in its record ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image_id", "pinned"),
    [
        ("registry.example/lab@sha256:abc", "registry.example/lab@sha256:abc"),
        ("docker-pullable://registry.example/lab@sha256:abc", "registry.example/lab@sha256:abc"),
        ("docker://sha256:abc", None),
        ("", None),
    ],
)
def test_the_images_of_a_run_are_recorded_by_their_digests(world: World, image_id: str, pinned: str | None) -> None:
    """pinned_images() maps the lab's image to its digest in the record, and is empty without a digest."""
    world.pods(**runs())
    for (kind, _), pod in world.api.objects.items():
        if kind == "Pod":
            for status in pod["status"]["containerStatuses"]:
                status["imageID"] = image_id
    world.run.directory.mkdir(parents=True, exist_ok=True)
    cluster_runs.keep_pods(world.run, cluster_runs.run_pods(world.api, world.run))
    expected = {world.run.lab.image: pinned} if pinned else {}
    assert cluster_runs.pinned_images(world.run.directory) == expected
