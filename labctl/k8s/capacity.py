"""What a cluster's nodes have for a lab."""

from __future__ import annotations

from labctl.k8s.lab import ClusterLab
from labctl.lab.devices import DeviceReport


def devices(lab: ClusterLab) -> DeviceReport:
    """The nodes that workers may be placed on. HostError where they may not be listed."""
    lab.api.list("Node")
    return DeviceReport(())
