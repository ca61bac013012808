"""What stands against a run in a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from labctl.doctor.examination import Finding
from labctl.k8s.job import ClusterJob
from labctl.k8s.lab import ClusterLab
from labctl.k8s.target import Target


def preflight(lab: ClusterLab, target: Target, built: ClusterJob) -> None:
    pass


def examine(lab: ClusterLab) -> Iterator[Finding]:
    yield from ()
