"""What the state of a cluster's pod or job means for a run, in words.

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
"""Why the kubelet does not start a container whose image it has not got."""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""The annotation that says which of a pod's containers `kubectl logs` and `kubectl exec` take."""
# Words of waiting containers that say nothing but that time is needed.
USUAL = ("ContainerCreating", "PodInitializing")


def trouble(pod: Manifest) -> str:
    """Why a pod does not run, or no longer does; empty where nothing is known to stand against it."""
    if not_scheduled := unscheduled(pod):
        return not_scheduled
    status = pod.get("status", {})
    if status.get("reason"):
        # Of a pod that was evicted, what its container ended with says nothing.
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
    return f"{status.get('reason') or status.get('phase')}: {_text(status.get('message'))}".rstrip(": ")


def unscheduled(pod: Manifest) -> str:
    """The scheduler's reason for leaving a pod without a node; empty where it has one."""
    for one in pod.get("status", {}).get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return _text(one.get("message")) or str(one.get("reason", "not scheduled"))
    return ""


def image_error(pod: Manifest) -> str:
    """Why the image cannot be had; empty where nothing says so."""
    for state in (*_before(pod), own(pod)):
        if (waiting := state.get("waiting")) and waiting.get("reason") in IMAGE_ERRORS:
            return f"{waiting['reason']}: {_text(waiting.get('message'))}"
    return ""


def loss(pod: Manifest) -> tuple[Cause, str] | None:
    """How a run lost a pod that it needs; None of one that it has."""
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
    """Whether its program runs, or has ended."""
    return "running" in own(pod) or has_ended(pod)


def has_ended(pod: Manifest) -> bool:
    """Whether its program has; a pod runs on with a container that the cluster has added."""
    return "terminated" in own(pod) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def code_of(pod: Manifest) -> int:
    """What a pod's program ended with; 137 where nobody says."""
    if ended := own(pod).get("terminated"):
        return int(ended["exitCode"])
    return 0 if pod.get("status", {}).get("phase") == "Succeeded" else 137


class JobState(Struct, frozen=True):
    """``waiting`` in a queue that has not admitted it, ``active``, ``succeeded`` or ``failed``; reason and message."""

    name: Literal["waiting", "active", "succeeded", "failed"]
    reason: str = ""
    message: str = ""


def state_of(job: Manifest) -> JobState:
    """The state of an MPIJob or a TrainJob, by its conditions and whether it is to be suspended."""
    conditions = {one["type"]: one for one in job.get("status", {}).get("conditions") or () if one["status"] == "True"}
    for kind, name in (
        ("Failed", "failed"),
        ("Succeeded", "succeeded"),
        ("Complete", "succeeded"),
        ("Suspended", "waiting"),
    ):
        if found := conditions.get(kind):
            return JobState(name, str(found.get("reason", "")), _text(found.get("message")))  # type: ignore[arg-type]
    # A queue says so before the operator does, which first removes the pods.
    spec = job.get("spec", {})
    return JobState("waiting" if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend") else "active")


def has_run(job: Manifest) -> bool:
    """Whether an operator remembers that an MPIJob's launcher ran, or how a TrainJob's ended."""
    status = job.get("status", {})
    ran = any(one["type"] == "Running" for one in status.get("conditions") or ())
    return ran or any(one["name"] == LAUNCHER and one.get("failed") for one in status.get("jobsStatus") or ())


def last_refusal(events: Iterable[Manifest], job: str) -> str:
    """The latest warning about a job or what its operator has made for it; pods, once there, tell by themselves."""
    about = [one for one in events if one["involvedObject"].get("kind") != "Pod"]
    names = {str(one["involvedObject"].get("name", "")) for one in about}
    return last_warning(about, [name for name in names if f"{name}-".startswith(f"{job}-")])


def last_warning(events: Iterable[Manifest], names: Iterable[str]) -> str:
    """The latest warning about any of these objects; empty where there is none."""
    wanted = tuple(names)
    found = [one for one in events if one.get("type") == "Warning" and one["involvedObject"].get("name") in wanted]
    if not found:
        return ""
    last = max(found, key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "")
    return f"{last.get('reason', '')}: {_text(last.get('message'))}".strip(": ")


def own_container(pod: Manifest) -> Mapping[str, Any]:
    """The container that a pod was made for, as it was asked for: clusters add others, before it too."""
    there: list[Mapping[str, Any]] = pod["spec"]["containers"]
    name = pod["metadata"].get("annotations", {}).get(DEFAULT_CONTAINER)
    return next((one for one in there if one["name"] == name), there[0])


def own(pod: Manifest) -> Mapping[str, Any]:
    """The state of its own container."""
    name = own_container(pod)["name"]
    found = pod.get("status", {}).get("containerStatuses") or ()
    return next((one.get("state") or {} for one in found if one["name"] == name), {})


def _before(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """The states of the containers that a cluster has it start first."""
    for one in pod.get("status", {}).get("initContainerStatuses") or ():
        yield one.get("state") or {}


def _text(message: object) -> str:
    """A message on one line, less the rest of a long one."""
    words = " ".join(str(message or "").split())
    return words if len(words) <= 400 else f"{words[:400]}..."
