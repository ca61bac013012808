"""A run that has not begun: what it waits for, in words, and when it is given up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labctl.backends.kubernetes import pods
from labctl.backends.kubernetes.api import Manifest, node_of
from labctl.model import Cause

# Seconds that an image may be refused, as registries have bad minutes.
IMAGE_PATIENCE = 60


class Waiting:
    """How long a run has waited to begin, and for what. Times are in seconds, all by the caller's clock."""

    def __init__(self, kind: str, image: str, patience: float, began: float) -> None:
        """``kind``: of its job. ``patience``: for its pods to start, once the job is admitted."""
        self._kind, self._image, self._patience = kind, image, patience
        self._began, self._refused = began, 0.0
        self.reasons: Mapping[str, str] = {}
        """What is waited for, by node; what stands against the job itself, by its kind."""

    def lasts(self, now: float) -> float:
        """Since when the job has been admitted."""
        return now - self._began

    def look(self, job: Manifest, found: Iterable[Manifest], against: str, now: float) -> tuple[Cause, str] | None:
        """Why the run is given up; None while it is waited for. ``against``: what stands against pods to come."""
        state = pods.state_of(job)
        if state.name == "waiting":
            # Time in a queue does not count.
            self._began = now
            said = f"waits to be admitted: {state.message}" if state.message else "is suspended"
            self.reasons = {self._kind: said}
            return None
        found = list(found)
        of_nodes = {node_of(pod): why for pod in found if (why := pods.trouble(pod))}
        self.reasons = of_nodes | ({self._kind: against} if against else {})
        bad = {node_of(pod): why for pod in found if (why := pods.image_error(pod))}
        self._refused = (self._refused or now) if bad else 0.0
        over = self.lasts(now) > self._patience
        if bad and (over or now > self._refused + IMAGE_PATIENCE):
            node, why = next(iter(bad.items()))
            return "no-image", f"{node}: the cluster does not get image {self._image}: {why}"
        if over:
            said = "; ".join(_grouped(self.reasons)) or "pods did not become ready"
            # Pods that run and do not become ready are the image's or the workload's matter, others the cluster's.
            run = found and not against and all(map(pods.has_started, found))
            cause: Cause = "launcher-failed" if run else "does-not-fit"
            return cause, f"not started within {self._patience:g} s (LAB_K8S_PATIENCE): {said}"
        return None


def _grouped(reasons: Mapping[str, str]) -> list[str]:
    """Each reason, with all who have it."""
    who: dict[str, list[str]] = {}
    for one, why in reasons.items():
        who.setdefault(why, []).append(one)
    return [f"{', '.join(names)}: {why}" for why, names in who.items()]
