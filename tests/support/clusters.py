"""Small Kubernetes clusters: a lab, nodes and pods, as an API server returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.backend import KubernetesBackend
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.target import Target, read
from labctl.config.context import Context
from support.fake_api import FakeApi

GPU = "nvidia.com/gpu"


def lab(api: FakeApi, directory: Path = Path("/nowhere"), **given: Any) -> ClusterLab:
    """Build the ClusterLab ``demo`` with NVIDIA devices; ``given`` are variables of its environment."""
    environ = {"HOME": "/home/someone", "LAB_NAME": "demo", "LAB_ACCELERATOR": "nvidia", **given}
    context = Context(directory=directory, environ=environ, emit=lambda _: None, flags={})
    return ClusterLab(context=context, settings=context.settings(), api=api)


def backend(of: ClusterLab) -> KubernetesBackend:
    """Build the Kubernetes backend of a lab."""
    return KubernetesBackend(of.context, of.settings, of)


def target(**given: Any) -> Target:
    """Return the Kubernetes target that a lab's settings give, with these variables of the environment."""
    made = lab(FakeApi(), **given)
    return read(made.settings, made.settings.text("LAB_ACCELERATOR"))


def node(name: str = "n0", *, taints: tuple[str, ...] = (), ready: str = "True", **allocatable: Any) -> Manifest:
    """Build a node, by default Ready with 16 cores, 64 GiB and 8 GPUs; taints are ``key=value:effect``."""
    spec: dict[str, Any] = {}
    if taints:
        parts = [one.replace("=", ":").split(":") for one in taints]
        spec["taints"] = [{"key": key, "value": value, "effect": effect} for key, value, effect in parts]
    has = {"cpu": "16", "memory": "64Gi", GPU: "8", "pods": "110", **allocatable}
    status = {
        "allocatable": has,
        "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": ready}],
    }
    labels = {"rack": "7"}
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def pod(name: str, on: str = "n0", namespace: str = "others", **requests: str) -> Manifest:
    """Build another user's pod on a node, with these resource requests."""
    spec = {"nodeName": on, "containers": [{"name": "one", "resources": {"requests": requests}}]}
    return {"kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec, "status": {}}
