"""What a check of a cluster is given and what it yields: a lab, what its runs ask for, and findings."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from labctl.backends.finding import ok, problem
from labctl.backends.kubernetes import capacity
from labctl.backends.kubernetes.api import ENGINE, Manifest
from labctl.backends.kubernetes.capacity import ClusterNode, request_of
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.target import Target
from labctl.system.cached import once

found_ok = partial(ok, node=ENGINE)
warn, error = partial(problem, "warn", node=ENGINE), partial(problem, "error", node=ENGINE)


class View(Struct, frozen=True, kw_only=True, dict=True):
    """A lab, and what its runs ask the cluster for; what several checks need is asked once."""

    lab: ClusterLab
    target: Target
    workers: int
    slots: int

    @property
    def request(self) -> dict[str, float]:
        return request_of(self.target, self.slots)

    @property
    def namespace(self) -> str:
        return self.lab.api.namespace

    @property
    def typed(self) -> str:
        """How a command for this namespace begins."""
        context = f" --context {self.target.context}" if self.target.context else ""
        return f"kubectl{context} -n {self.namespace}"

    @once
    def nodes(self) -> tuple[ClusterNode, ...]:
        return capacity.nodes(self.lab.api, self.target)

    @once
    def claim(self) -> Manifest | None:
        return self.lab.api.get("PersistentVolumeClaim", f"{self.lab.name}-storage") if self.target.storage else None

    @once
    def pods(self) -> list[Manifest]:
        return self.lab.engine.pods(self.lab.name)
