"""The input of a cluster's checks, and constructors of their findings."""

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
    """A lab with the size of its runs; objects that several checks need are fetched once."""

    lab: ClusterLab
    target: Target
    workers: int
    slots: int

    @property
    def request(self) -> dict[str, float]:
        """Resources that a worker requests."""
        return request_of(self.target, self.slots)

    @property
    def namespace(self) -> str:
        return self.lab.api.namespace

    @property
    def typed(self) -> str:
        """The start of a kubectl command for this namespace."""
        context = f" --context {self.target.context}" if self.target.context else ""
        return f"kubectl{context} -n {self.namespace}"

    @once
    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the cluster's nodes, without free resources. Refused if they may not be listed."""
        return capacity.nodes(self.lab.api, self.target)

    @once
    def claim(self) -> Manifest | None:
        """Return the lab's claim; None if it does not exist or the lab has no storage."""
        return self.lab.api.get("PersistentVolumeClaim", f"{self.lab.name}-storage") if self.target.storage else None

    @once
    def pods(self) -> list[Manifest]:
        """Return the pods of the lab's runs, the latest run first, without those that are being deleted."""
        pods = self.lab.engine.pods(self.lab.name)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
