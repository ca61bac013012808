"""Reads the state of a run from its job and pods.

Sources: the Kubernetes API (PodStatus, ContainerState, pod conditions), kubernetes/kubelet's reasons for images that
cannot be pulled (pkg/kubelet/images/types.go), kubeflow/mpi-operator (JobCondition), kubeflow/trainer (TrainJobStatus).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from labctl.model import LAUNCHER, Cause

Manifest = Mapping[str, Any]
IMAGE_ERRORS = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable",
)  # fmt: skip
"""The kubelet's reasons for not starting a container for want of its image."""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Annotation that names the container for `kubectl logs` and `kubectl exec`."""
# Reasons of containers that are merely starting.
USUAL = ("ContainerCreating", "PodInitializing")


def trouble(pod: Manifest) -> str:
    """Return why a pod is not running; empty if it runs, has ended with code 0 or is starting."""
    if not_scheduled := unscheduled(pod):
        return not_scheduled
    status = pod.get("status", {})
    if status.get("reason"):
        # The exit code of an evicted pod's container does not explain the eviction.
        return _by_kubelet(status)
    for state in (*_before(pod), own(pod)):
        if waiting := state.get("waiting"):
            reason, message = waiting.get("reason", ""), _text(waiting.get("message"))
            if reason not in USUAL:
                return f"{reason}: {message}" if message else reason
        if (ended := state.get("terminated")) and ended.get("exitCode"):
            return f"ended with exit code {ended['exitCode']} ({ended.get('reason', 'Error')})"
    if status.get("phase") == "Failed":
        return _by_kubelet(status)
    return ""


def _by_kubelet(status: Manifest) -> str:
    """Return the kubelet's reason, or else the phase, and its message, from a pod's status, as text."""
    return f"{status.get('reason') or status.get('phase')}: {_text(status.get('message'))}".rstrip(": ")


def unscheduled(pod: Manifest) -> str:
    """Return why the scheduler has not placed a pod; empty if it has, or has not tried."""
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _text(condition.get("message")) or str(condition.get("reason", "not scheduled"))
    return ""


def image_error(pod: Manifest) -> str:
    """Return why the kubelet cannot get an image of the pod; empty if no container waits for one."""
    for state in (*_before(pod), own(pod)):
        if (waiting := state.get("waiting")) and waiting.get("reason") in IMAGE_ERRORS:
            return f"{waiting['reason']}: {_text(waiting.get('message'))}"
    return ""


def loss(pod: Manifest) -> tuple[Cause, str] | None:
    """Return cause and message of a pod that ended, was evicted or is deleted; None if it goes on."""
    status, ended = pod.get("status", {}), own(pod).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        return "out-of-memory", "container ran out of memory (OOMKilled); LAB_MEMORY is its limit"
    if status.get("reason"):
        return "node-lost", _by_kubelet(status)
    if pod["metadata"].get("deletionTimestamp"):
        return "node-lost", "its pod was deleted"
    if ended:
        return "node-lost", f"container ended with exit code {ended.get('exitCode')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return "node-lost", "its pod has ended"
    return None


def has_started(pod: Manifest) -> bool:
    """Tell if a pod's program runs or has ended."""
    return "running" in own(pod) or has_ended(pod)


def has_ended(pod: Manifest) -> bool:
    """Tell if a pod's program has ended, even if containers that the cluster added to the pod go on."""
    return "terminated" in own(pod) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def code_of(pod: Manifest) -> int:
    """Exit code of a pod's program; if not reported, 0 for a succeeded pod and 137 for any other."""
    if ended := own(pod).get("terminated"):
        return int(ended["exitCode"])
    return 0 if pod.get("status", {}).get("phase") == "Succeeded" else 137


class JobState(Struct, frozen=True):
    """State of a job with reason and message; ``waiting`` until a queue admits it."""

    name: Literal["waiting", "active", "succeeded", "failed"]
    reason: str = ""
    message: str = ""


def state_of(job: Manifest) -> JobState:
    """Return the JobState of an MPIJob or TrainJob by its conditions, else waiting if suspended, else active."""
    reported = job.get("status", {}).get("conditions") or ()
    conditions = {condition["type"]: condition for condition in reported if condition["status"] == "True"}
    for kind, name in (
        ("Failed", "failed"),
        ("Succeeded", "succeeded"),
        ("Complete", "succeeded"),
        ("Suspended", "waiting"),
    ):
        if condition := conditions.get(kind):
            return JobState(name, str(condition.get("reason", "")), _text(condition.get("message")))  # type: ignore[arg-type]
    # A queue sets suspend at once; the operator sets the condition after it has removed the pods.
    spec = job.get("spec", {})
    return JobState("waiting" if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend") else "active")


def has_run(job: Manifest) -> bool:
    """Return True if the status has a condition Running, or says that a TrainJob's launcher failed."""
    status = job.get("status", {})
    if any(condition["type"] == "Running" for condition in status.get("conditions") or ()):
        return True
    return any(part["name"] == LAUNCHER and part.get("failed") for part in status.get("jobsStatus") or ())


def last_refusal(events: Iterable[Manifest], job: str) -> str:
    """Return the latest warning event on a job or what was made for it, without pods; empty if none."""
    about = [event for event in events if event["involvedObject"].get("kind") != "Pod"]
    names = {str(event["involvedObject"].get("name", "")) for event in about}
    return last_warning(about, [name for name in names if f"{name}-".startswith(f"{job}-")])


def last_warning(events: Iterable[Manifest], names: Iterable[str]) -> str:
    """Return reason and message of the latest warning event on any of these objects; empty if none."""
    objects = tuple(names)
    about = [event for event in events if event["involvedObject"].get("name") in objects]
    warnings = [event for event in about if event.get("type") == "Warning"]
    if not warnings:
        return ""
    last = max(warnings, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return f"{last.get('reason', '')}: {_text(last.get('message'))}".strip(": ")


def own_container(pod: Manifest) -> Mapping[str, Any]:
    """Return the container that labctl asked for, by the pod's annotation; the first if there is none."""
    containers: list[Mapping[str, Any]] = pod["spec"]["containers"]
    name = pod["metadata"].get("annotations", {}).get(DEFAULT_CONTAINER)
    return next((container for container in containers if container["name"] == name), containers[0])


def own(pod: Manifest) -> Mapping[str, Any]:
    """Return the state of a pod's own container; empty if not reported."""
    return _status(pod).get("state") or {}


def image_id(pod: Manifest) -> str:
    """Return the id of the image of a pod's own container, as the node reports it; empty if not reported."""
    return str(_status(pod).get("imageID", ""))


def _status(pod: Manifest) -> Mapping[str, Any]:
    """Return the status of a pod's own container; empty if not reported."""
    name = own_container(pod)["name"]
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})


def _before(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """Yield the states of a pod's init containers."""
    for status in pod.get("status", {}).get("initContainerStatuses") or ():
        yield status.get("state") or {}


def _text(message: object) -> str:
    """Return a message on one line, cut to 400 characters and "..."; empty for None."""
    text = " ".join(str(message or "").split())
    return text if len(text) <= 400 else f"{text[:400]}..."
