"""Pods and jobs as kubelets, schedulers and operators write their states."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.backends.kubernetes import pods
from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.pods import JobState

PULL = (
    'failed to pull and unpack image "docker.io/labctl/cpu:latest": failed to resolve reference '
    '"docker.io/labctl/cpu:latest": pull access denied, repository does not exist or may require authorization'
)
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available"
EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi. "


def pod(phase: str = "Running", *states: dict[str, Any], deleted: bool = False, **status: Any) -> Manifest:
    """Build a worker's pod; ``states`` are those of its container, and of containers that the cluster has added."""
    names = ("worker", "added")
    found = [{"name": name, "state": state} for name, state in zip(names, states, strict=False)]
    metadata = {"name": "demo-m-worker-0", **({"deletionTimestamp": "2026-01-02T03:04:05Z"} if deleted else {})}
    # Kubelets list containers by name.
    statuses = {"containerStatuses": sorted(found, key=lambda one: str(one["name"]))} if found else {}
    spec = {"containers": [{"name": "worker"}, {"name": "added"}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase, **statuses, **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """Return the state of a container that waits."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    """Return the state of a container that has ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": None, "containerID": "containerd://1"}}


RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-02T03:04:05Z"}}
UNPLACED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pod("Pending"), ""),
        (pod("Pending", conditions=UNPLACED), NO_ROOM),
        (pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]),
         "SchedulingGated"),
        (pod("Pending", conditions=[{"type": "PodScheduled", "status": "True"}]), ""),
        (pod("Pending", conditions=None, containerStatuses=None, initContainerStatuses=None), ""),
        (pod("Pending", waiting("ContainerCreating")), ""),
        (pod("Pending", waiting("PodInitializing")), ""),
        (pod("Pending", waiting("ErrImagePull", f"{PULL}\n")), f"ErrImagePull: {PULL}"),
        (pod("Pending", waiting("CreateContainerConfigError", 'secret "demo" not found')),
         'CreateContainerConfigError: secret "demo" not found'),
        (pod("Pending", waiting("CrashLoopBackOff")), "CrashLoopBackOff"),
        (pod("Running", RUNS), ""),
        (pod("Running", RUNS, conditions=[{"type": "Ready", "status": "False", "message": "not yet"}]), ""),
        (pod("Succeeded", ended(0, "Completed")), ""),
        (pod("Failed", ended(3)), "ended with exit code 3 (Error)"),
        (pod("Failed", ended(128, "StartError")), "ended with exit code 128 (StartError)"),
        (pod("Failed", ended(137), reason="Evicted", message=EVICTED), f"Evicted: {EVICTED.strip()}"),
        (pod("Failed", reason="UnexpectedAdmissionError"), "UnexpectedAdmissionError"),
        (pod("Failed"), "Failed"),
        (pod("Pending", waiting("PodInitializing"), initContainerStatuses=[{"name": "init", "state": ended(1)}]),
         "ended with exit code 1 (Error)"),
        (pod("Pending", waiting("PodInitializing"), initContainerStatuses=[{"name": "init", "state": ended(0)}]), ""),
        ({"metadata": {}, "spec": pod()["spec"]}, ""),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run_is_said_as_the_cluster_says_it(found: Manifest, words: str) -> None:
    """trouble() tells why a pod does not run, from its conditions, containers or phase; empty if it may."""
    assert pods.trouble(found) == words


def test_a_long_reason_is_one_short_line() -> None:
    """trouble() of a long message is one line of less than 450 characters that ends with `...`."""
    said = pods.trouble(pod("Pending", waiting("CreateContainerError", "no\n  such " + 200 * "device ")))
    assert said.startswith("CreateContainerError: no such device device")
    assert said.endswith("...")
    assert len(said) < 450


@pytest.mark.parametrize("reason", pods.IMAGE_ERRORS)
def test_an_image_that_the_cluster_does_not_get_is_an_image_error(reason: str) -> None:
    """image_error() of each image reason is reason and message."""
    assert pods.image_error(pod("Pending", waiting(reason, PULL))) == f"{reason}: {PULL}"


@pytest.mark.parametrize("state", [waiting("ContainerCreating"), waiting("CrashLoopBackOff", "back-off"), RUNS])
def test_other_states_are_no_image_error(state: dict[str, Any]) -> None:
    """image_error() of other states is empty."""
    assert pods.image_error(pod("Pending", state)) == ""


def test_the_image_of_a_container_that_comes_first_counts_too() -> None:
    """image_error() also tells an init container's reason."""
    first = [{"name": "init", "state": waiting("ImagePullBackOff", "Back-off pulling image")}]
    found = pod("Pending", waiting("PodInitializing"), initContainerStatuses=first)
    assert pods.image_error(found) == "ImagePullBackOff: Back-off pulling image"


@pytest.mark.parametrize(
    ("found", "cause", "words"),
    [
        (pod("Failed", ended(137, "OOMKilled")), "out-of-memory", "ran out of memory (OOMKilled); LAB_MEMORY"),
        (pod("Running", ended(137, "OOMKilled"), deleted=True), "out-of-memory", "OOMKilled"),
        (pod("Failed", ended(255)), "node-lost", "container ended with exit code 255"),
        (pod("Succeeded", ended(0, "Completed")), "node-lost", "container ended with exit code 0"),
        (pod("Failed", ended(137), reason="Evicted", message=EVICTED), "node-lost", "Evicted: The node was low"),
        (pod("Failed", ended(137), reason="Terminated", message="Pod was terminated in response to imminent node "
             "shutdown."), "node-lost", "Terminated: Pod was terminated in response to imminent node shutdown."),
        (pod("Running", RUNS, reason="NodeLost", message="Node n1 which was running pod is unresponsive"),
         "node-lost", "NodeLost: Node n1"),
        (pod("Running", RUNS, deleted=True), "node-lost", "its pod was deleted"),
        (pod("Running", ended(143), deleted=True), "node-lost", "its pod was deleted"),
        (pod("Failed"), "node-lost", "its pod has ended"),
        (pod("Succeeded"), "node-lost", "its pod has ended"),
    ],
)  # fmt: skip
def test_a_pod_that_is_lost_says_how(found: Manifest, cause: str, words: str) -> None:
    """loss() gives cause and message of a pod that has ended, was evicted or deleted, or ran out of memory."""
    lost = pods.loss(found)
    assert lost
    assert lost[0] == cause
    assert words in lost[1]


@pytest.mark.parametrize("found", [pod("Pending"), pod("Pending", waiting("ContainerCreating")), pod("Running", RUNS)])
def test_a_pod_that_runs_or_waits_is_not_lost(found: Manifest) -> None:
    """loss() of a pending or running pod is None."""
    assert pods.loss(found) is None


def test_containers_that_a_cluster_adds_are_not_the_pods_own() -> None:
    """Added and init containers count for neither has_started(), loss() nor trouble()."""
    first = [{"name": "init", "state": ended(0, "Completed")}]
    starts = pod("Pending", waiting("PodInitializing"), RUNS, initContainerStatuses=first)
    assert not pods.has_started(starts)
    runs = pod("Running", RUNS, ended(1), initContainerStatuses=first)
    assert pods.has_started(runs)
    assert pods.loss(runs) is None
    assert pods.trouble(runs) == ""
    assert pods.loss(pod("Running", ended(7), RUNS)) == ("node-lost", "container ended with exit code 7")


def test_a_pods_own_container_is_the_one_that_its_annotation_names() -> None:
    """own_container() is the first one, or that of the default-container annotation."""
    pod = {"metadata": {}, "spec": {"containers": [{"name": "proxy"}, {"name": "worker"}]}}
    assert pods.own_container(pod)["name"] == "proxy"
    named = {"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "worker"}}, "spec": pod["spec"]}
    assert pods.own_container(named)["name"] == "worker"


def test_a_pod_has_started_once_its_program_runs_or_has_ended() -> None:
    """has_started() is True for a running or ended pod, also one that failed without a container."""
    assert pods.has_started(pod("Running", RUNS))
    assert pods.has_started(pod("Failed", ended(1)))
    # Kubelets refuse some, and forget of others what their containers did.
    assert pods.has_started(pod("Failed", reason="UnexpectedAdmissionError"))
    assert not pods.has_started(pod("Pending", waiting("ContainerCreating")))
    assert not pods.has_started(pod("Pending"))


def test_a_pod_has_ended_with_its_own_container_whatever_else_runs_in_it() -> None:
    """has_ended() goes by the pod's own container."""
    assert pods.has_ended(pod("Running", ended(137, "OOMKilled"), RUNS))
    assert not pods.has_ended(pod("Running", RUNS, ended(0)))


@pytest.mark.parametrize(
    ("found", "code"),
    [(pod("Running", ended(7), RUNS), 7), (pod("Succeeded"), 0), (pod("Failed"), 137), (pod("Failed", ended(3)), 3)],
)
def test_the_exit_code_of_a_pod_is_its_own_containers(found: Manifest, code: int) -> None:
    """code_of() is the own container's exit code, else 0 or 137 by the phase."""
    assert pods.code_of(found) == code


def test_a_pod_has_ended_by_its_phase() -> None:
    """has_ended() without container states is True for Succeeded and Failed."""
    assert [pods.has_ended(pod(phase)) for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown")] == [
        False, False, True, True, False,
    ]  # fmt: skip


def job(*conditions: tuple[str, str, str, str]) -> Manifest:
    """Return a job with these conditions, each of type, status, reason and message."""
    keys = ("type", "status", "reason", "message")
    return {"status": {"conditions": [dict(zip(keys, one, strict=True)) for one in conditions]}}


CREATED = ("Created", "True", "MPIJobCreated", "MPIJob demo/demo-m is created.")


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ({}, JobState("active")),
        ({"status": {"conditions": None}}, JobState("active")),
        (job(CREATED), JobState("active")),
        (job(CREATED, ("Running", "True", "MPIJobRunning", "runs"), ("Suspended", "False", "MPIJobResumed", "")),
         JobState("active")),
        (job(CREATED, ("Suspended", "True", "MPIJobSuspended", "MPIJob suspended")),
         JobState("waiting", "MPIJobSuspended", "MPIJob suspended")),
        (job(CREATED, ("Running", "False", "", ""), ("Succeeded", "True", "MPIJobSucceeded", "done")),
         JobState("succeeded", "MPIJobSucceeded", "done")),
        (job(CREATED, ("Failed", "True", "BackoffLimitExceeded/Error", "Job has reached the\nlimit")),
         JobState("failed", "BackoffLimitExceeded/Error", "Job has reached the limit")),
        (job(("Suspended", "True", "Suspended", "TrainJob is suspended")),
         JobState("waiting", "Suspended", "TrainJob is suspended")),
        (job(("Suspended", "False", "Resumed", ""), ("Complete", "True", "AllJobsCompleted", "jobset completed")),
         JobState("succeeded", "AllJobsCompleted", "jobset completed")),
        (job(("Suspended", "False", "Resumed", ""), ("Failed", "True", "DeadlineExceeded", "too long")),
         JobState("failed", "DeadlineExceeded", "too long")),
        # A job that is ended is suspended too, where a queue takes its place away.
        (job(("Suspended", "True", "Suspended", ""), ("Failed", "True", "FailedJobs", "jobset failed")),
         JobState("failed", "FailedJobs", "jobset failed")),
    ],
)  # fmt: skip
def test_the_state_of_a_job_is_that_of_its_conditions(found: Manifest, state: JobState) -> None:
    """state_of() is active, waiting, succeeded or failed by the conditions, with reason and message."""
    assert pods.state_of(found) == state


@pytest.mark.parametrize("spec", [{"suspend": True}, {"runPolicy": {"suspend": True}}])
def test_a_job_is_suspended_as_soon_as_it_is_to_be(spec: dict[str, Any]) -> None:
    """state_of() of a job that is to be suspended is waiting, of a failed one failed."""
    assert pods.state_of({**job(CREATED), "spec": spec}) == JobState("waiting")
    ended = job(CREATED, ("Failed", "True", "FailedJobs", "jobset failed"))
    assert pods.state_of({**ended, "spec": spec}).name == "failed"


@pytest.mark.parametrize(
    ("found", "has_run"),
    [
        (job(CREATED), False),
        ({}, False),
        (job(CREATED, ("Running", "False", "MPIJobRunning", "")), True),
        ({"status": {"jobsStatus": [{"name": "launcher", "failed": 1}, {"name": "node", "failed": 0}]}}, True),
        ({"status": {"jobsStatus": [{"name": "launcher", "failed": 0}, {"name": "node", "failed": 1}]}}, False),
    ],
)
def test_operators_remember_what_has_run(found: Manifest, has_run: bool) -> None:
    """has_run() is True if a Running condition exists, or a launcher's job has failed."""
    assert pods.has_run(found) == has_run


def warning(about: str, message: str, when: str, **given: Any) -> Manifest:
    """Return a warning event about an object, last seen at this time."""
    event = {"type": "Warning", "reason": "FailedCreate", "message": message, "lastTimestamp": when}
    return {**event, "involvedObject": {"name": about}, **given}


def test_the_last_warning_is_the_latest_about_these_objects() -> None:
    """last_warning() is the latest warning about the named objects, empty without one."""
    events = [
        warning("demo-m", "exceeded quota: team", "2026-01-02T03:00:00Z"),
        warning("demo-m-launcher", "pods is\nforbidden", "2026-01-02T03:05:00Z"),
        warning("other", "not ours", "2026-01-02T03:09:00Z"),
        warning("demo-m", "all is well", "2026-01-02T03:08:00Z", type="Normal"),
    ]
    assert pods.last_warning(events, ["demo-m", "demo-m-launcher"]) == "FailedCreate: pods is forbidden"
    assert pods.last_warning(reversed(events), ["demo-m"]) == "FailedCreate: exceeded quota: team"
    assert pods.last_warning(events, ["demo"]) == ""
    assert pods.last_warning([], ["demo-m"]) == ""


def test_a_refusal_is_about_a_job_or_what_was_made_for_it_but_for_pods_that_are_there() -> None:
    """last_refusal() is about the job or an object named after it, not about a pod or another job."""

    def said(about: str, kind: str) -> str:
        """Return last_refusal() for a warning about this object."""
        event = warning(about, "pods is forbidden", "2026-01-02T03:05:00Z")
        event["involvedObject"]["kind"] = kind
        return pods.last_refusal([event], "demo-m")

    assert said("demo-m", "MPIJob") == "FailedCreate: pods is forbidden"
    assert said("demo-m-launcher", "Job") == "FailedCreate: pods is forbidden"
    assert said("demo-m-node-0", "Job") == "FailedCreate: pods is forbidden"
    assert said("demo-m-worker-0", "Pod") == ""
    assert said("demo-mn", "MPIJob") == ""
    assert pods.last_refusal([], "demo-m") == ""


def test_an_event_of_a_newer_kind_has_its_time_elsewhere() -> None:
    """last_warning() sorts by eventTime if lastTimestamp is null."""
    first = warning("demo-m", "first", "", lastTimestamp=None, eventTime="2026-01-02T03:00:00.000001Z")
    last = warning("demo-m", "last", "", lastTimestamp=None, eventTime="2026-01-02T03:00:01.000001Z")
    never = warning("demo-m", "never", "", lastTimestamp=None)
    assert pods.last_warning([never, last, first], ["demo-m"]) == "FailedCreate: last"
