"""A run that has not begun: reasons for the wait, and when to give up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labctl.backends.kubernetes import pods
from labctl.backends.kubernetes.api import Manifest, node_of
from labctl.model import Cause

# Seconds to tolerate image errors, as registries fail at times.
IMAGE_PATIENCE = 60


class Waiting:
    """The wait of a run for its pods: duration and reasons. Times are seconds of the caller's clock."""

    def __init__(self, kind: str, image: str, patience: float, began: float, *, waits: bool = False) -> None:
        """Begin the wait at ``began``; its pods have ``patience`` seconds to start, once the job is admitted.

        ``kind`` is the job's. ``waits``: seconds in which nodes have no room for a pod do not count.
        """
        self._waits = waits
        self._kind, self._image, self._patience = kind, image, patience
        self._began, self._refused = began, 0.0
        self.reasons: Mapping[str, str] = {}
        """Reasons by node; a reason of the job itself by its kind."""

    def lasts(self, now: float) -> float:
        """Return the seconds of the wait at ``now``, without time in a queue or, if it waits, without room."""
        return now - self._began

    def look(self, job: Manifest, run_pods: Iterable[Manifest], missing: str, now: float) -> tuple[Cause, str] | None:
        """Update ``reasons`` by job and pods; return cause and message if the wait is over in vain, else None.

        ``missing``: the reason why pods are missing, if any.
        """
        state = pods.state_of(job)
        if state.name == "waiting":
            # Time in a queue does not count.
            self._began = now
            reason = f"waits to be admitted: {state.message}" if state.message else "is suspended"
            self.reasons = {self._kind: reason}
            return None
        run_pods = list(run_pods)
        if self._waits and any(map(pods.unscheduled, run_pods)):
            self._began = now
        of_nodes = {node_of(pod): why for pod in run_pods if (why := pods.trouble(pod))}
        self.reasons = of_nodes | ({self._kind: missing} if missing else {})
        bad = {node_of(pod): why for pod in run_pods if (why := pods.image_error(pod))}
        self._refused = (self._refused or now) if bad else 0.0
        over = self.lasts(now) > self._patience
        if bad and (over or now > self._refused + IMAGE_PATIENCE):
            node, why = next(iter(bad.items()))
            return "no-image", f"{node}: the cluster cannot pull image {self._image}: {why}"
        if over:
            reason = "; ".join(_grouped(self.reasons)) or "pods did not become ready"
            # Pods that run without becoming ready point to the image or the workload, others to the cluster.
            run = run_pods and not missing and all(map(pods.has_started, run_pods))
            cause: Cause = "launcher-failed" if run else "does-not-fit"
            return cause, f"not started within {self._patience:g} s (LAB_K8S_PATIENCE): {reason}"
        return None


def _grouped(reasons: Mapping[str, str]) -> list[str]:
    """Return a text per distinct reason, after the names of its nodes."""
    who: dict[str, list[str]] = {}
    for node, why in reasons.items():
        who.setdefault(why, []).append(node)
    return [f"{', '.join(names)}: {why}" for why, names in who.items()]
