"""Steps of plans in a cluster, each with its text and its action."""

from __future__ import annotations

import time

from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.plan import Step
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import HERE
from labctl.system import human

GOING, LOOK = 120, 1.0
"""Seconds for deleted pods to end, and between two polls."""


class ClusterDeployment:
    """The lab and namespace that steps act on."""

    def __init__(self, lab: ClusterLab) -> None:
        self.lab = lab

    @property
    def context(self) -> Context:
        return self.lab.context

    def host_of(self, error: HostError) -> str:
        """Return the node that an error names, else ``local``."""
        return error.node or HERE


class DeleteObject(Step, frozen=True, kw_only=True):
    """Delete an object of the lab with all that it owns."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"delete {self.kind} {self.name}"

    def do(self, deployment: ClusterDeployment) -> None:
        deployment.lab.api.delete(self.kind, self.name)


class AwaitPodsGone(Step, frozen=True, kw_only=True):
    """Wait until the lab's pods have ended. HostError with their names after GOING seconds."""

    def __str__(self) -> str:
        return f"wait until its pods are gone, at most {GOING} s"

    def do(self, deployment: ClusterDeployment) -> None:
        """Poll for the lab's pods until none is left. HostError with their names after GOING seconds."""
        lab, deadline = deployment.lab, time.monotonic() + GOING
        while left := lab.api.list("Pod", lab.selector):
            if time.monotonic() > deadline:
                names = ", ".join(pod["metadata"]["name"] for pod in left)
                raise HostError(
                    f"pods are still there after {GOING} s: {names}", hint="re-run the command; kubectl get pods"
                )
            time.sleep(LOOK)


class KeepObject(Step, frozen=True, kw_only=True):
    """Leave an object in the cluster; the cause has the command that removes it."""

    text: str

    def __str__(self) -> str:
        return f"keep {self.text}"

    def do(self, deployment: ClusterDeployment) -> None:
        deployment.context.notice(self.cause)


class SendCode(Step, frozen=True, kw_only=True):
    """Send the packed code of a run to the claim, unless an earlier run has. HostError if it cannot be sent."""

    place: str
    packed: bytes

    def __str__(self) -> str:
        return f"send {human.memory(len(self.packed))} of code to {self.place} on the claim, unless it is there"

    def do(self, deployment: ClusterDeployment) -> None:
        from labctl.backends.kubernetes import storage

        storage.send(deployment.lab, self.place, self.packed)
