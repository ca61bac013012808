"""Facts of a lab in a cluster for `labctl freeze`, and those that a replay misses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from labctl import __version__, accelerators
from labctl.backends import facts, spec
from labctl.backends.kubernetes import render
from labctl.backends.kubernetes.api import COLLECTIONS, Manifest
from labctl.backends.kubernetes.capacity import hostname_of
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import definitions, serves
from labctl.backends.kubernetes.target import read
from labctl.jobs.replay import ReplayedRun

SCHEMA = 1
VERSIONS = ("architecture", "containerRuntimeVersion", "kernelVersion", "kubeletVersion", "osImage")
"""Facts of a node's ``nodeInfo``. Source: the Kubernetes API, NodeSystemInfo."""


def of(lab: ClusterLab) -> dict[str, Any]:
    """Return the facts of a lab: image, settings, files, cluster, nodes. Refused if nodes may not be listed."""
    accelerator = lab.settings.text("LAB_ACCELERATOR")
    target = read(lab.settings, accelerator)
    return {
        "schema": SCHEMA,
        "labctl": __version__,
        "image": {"name": spec.image_of(lab.settings, accelerator)},
        "cluster": {"namespace": target.namespace, "jobs": definitions(lab.api), **lab.engine.versions()},
        "settings": facts.settings_given(lab.settings),
        "files": facts.workload_files(lab.directory),
        "hosts": {node["metadata"]["name"]: _node(node) for node in lab.api.list("Node")},
    }


def _node(node: Manifest) -> dict[str, str]:
    """Return a node's versions, allocatable resources, and the labels that device vendors set, by name."""
    info, labels = node["status"].get("nodeInfo", {}), node["metadata"].get("labels", {})
    resources = {f"allocatable {name}": amount for name, amount in node["status"].get("allocatable", {}).items()}
    devices = {name: value for name, value in labels.items() if name.startswith(_vendors())}
    return {**{name: info[name] for name in VERSIONS if name in info}, **resources, **devices}


def _vendors() -> tuple[str, ...]:
    """Return the domain of each accelerator resource with ``/``, as ``example.com/``: prefixes of node labels."""
    resources = chain.from_iterable(module.resources for module in accelerators.modules().values())
    return tuple(f"{resource.partition('/')[0]}/" for resource in resources)


def missing(lab: ClusterLab, recorded: ReplayedRun) -> Iterator[str]:
    """Yield a text per cluster, kind of job, secret or node that a recorded run needs and that is not there."""
    place = lab.place_of(recorded.job.run_id)
    if not lab.is_here(recorded.job.run_id):
        yield f"it was in namespace {place.namespace} of {place.server}" if place.server else "it was on Docker hosts"
        return
    if not serves(lab.api, *COLLECTIONS[place.kind]):
        yield f"the cluster no longer has the kind {place.kind}"
    objects = render.recorded(recorded.path, {}, {})
    if render.volumes(objects, "secret") and not spec.secrets(lab.settings):
        yield "its secrets are not in .env"
    if named := render.named_hosts(objects):
        present = set(map(hostname_of, lab.api.list("Node")))
        yield from (f"the cluster has no node {name}" for name in named if name not in present)
