"""Target of a job in a cluster: the namespace, and the requests of its pods, from the settings LAB_K8S_*."""

from __future__ import annotations

import re
from typing import Literal, cast

from msgspec import Struct

from labctl import accelerators
from labctl.config.settings import Settings
from labctl.errors import ConfigError, did_you_mean
from labctl.model import Pairs

Kind = Literal["mpijob", "trainjob"]
Gang = Literal["none", "coscheduling", "volcano"]
USUAL_KIND: Kind = "mpijob"
"""Kind of jobs if the cluster was not asked for its kinds."""
USUAL_SLOTS = 8
"""Devices of a node if LAB_SLOTS is not set, as most servers with accelerators have."""


class Toleration(Struct, frozen=True, kw_only=True):
    """A taint that pods tolerate; an empty value means any value, an empty effect all effects."""

    key: str
    value: str = ""
    effect: str = ""


class Target(Struct, frozen=True, kw_only=True):
    """A namespace, and the requests of each worker pod. Quantities are in Kubernetes' notation: ``500m``, ``8Gi``."""

    context: str
    """Context of the kubeconfig; empty for the current one."""
    namespace: str
    kind: Kind
    patience: int
    """Seconds that pods may take to be scheduled and started."""
    resource: str
    """Name of the device resource, such as ``example.com/gpu``; empty for none."""
    cpu: str
    memory: str
    shared_memory: str
    hugepages: str
    pull_secret: str
    storage_class: str
    storage: str
    """Size of the claim; empty for none."""
    node_selector: Pairs
    tolerations: tuple[Toleration, ...]
    """Tolerations of all pods."""
    host_ipc: bool
    host_network: bool
    interface: str
    queue: str
    gang: Gang

    @property
    def tolerated(self) -> tuple[Toleration, ...]:
        """Tolerations of workers: the settings', and one of taints with the resource's name."""
        devices = (Toleration(key=self.resource),) if self.resource else ()
        return tuple(dict.fromkeys((*devices, *self.tolerations)))


def read(settings: Settings, accelerator: str, kind: Kind = USUAL_KIND) -> Target:
    """Return the Target of the settings; ``kind`` is used if LAB_K8S_JOB is auto. ConfigError if one is wrong."""
    if accelerator == "auto":
        reason = "must name the accelerator of the cluster's nodes"
        raise _error(settings, "LAB_ACCELERATOR", reason, "LAB_ACCELERATOR=cpu, or the accelerator's name")
    resources = accelerators.get(accelerator).resources
    resource = settings.text("LAB_K8S_RESOURCE") or next(iter(resources), "")
    if resource and not resources:
        raise _error(settings, "LAB_K8S_RESOURCE", f"names a device, and a {accelerator} lab has none")
    job_kind = settings.text("LAB_K8S_JOB")
    return Target(
        context=settings.text("LAB_K8S_CONTEXT"),
        namespace=settings.text("LAB_K8S_NAMESPACE") or settings.text("LAB_NAME"),
        kind=kind if job_kind == "auto" else cast("Kind", job_kind),
        patience=settings.number("LAB_K8S_PATIENCE"),
        resource=resource,
        cpu=settings.text("LAB_K8S_CPU"),
        memory=quantity(settings.number("LAB_MEMORY")),
        shared_memory=quantity(settings.number("LAB_SHM_SIZE")),
        hugepages=quantity(settings.number("LAB_K8S_HUGEPAGES")),
        pull_secret=settings.text("LAB_K8S_PULL_SECRET"),
        storage_class=settings.text("LAB_K8S_STORAGE_CLASS"),
        storage=quantity(settings.number("LAB_K8S_STORAGE_SIZE")),
        node_selector=tuple(_selector(settings)),
        tolerations=tuple(_toleration(settings, word) for word in settings.text("LAB_K8S_TOLERATIONS").split()),
        host_ipc=settings.text("LAB_K8S_HOST_IPC") == "true",
        host_network=settings.text("LAB_K8S_HOST_NETWORK") == "true",
        interface=settings.text("LAB_K8S_INTERFACE"),
        queue=settings.text("LAB_K8S_QUEUE"),
        gang=cast("Gang", settings.text("LAB_K8S_GANG")),
    )


def quantity(size: int) -> str:
    """Return bytes as a Kubernetes quantity in the largest whole unit, such as ``8Gi``; empty for 0."""
    if not size:
        return ""
    for unit, bytes_of in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size % bytes_of == 0:
            return f"{size // bytes_of}{unit}"
    return str(size)


_NAME = r"(?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def _selector(settings: Settings) -> list[tuple[str, str]]:
    """Return name and value of each label in LAB_K8S_NODE_SELECTOR. ConfigError for an invalid word."""
    pairs = []
    for word in settings.text("LAB_K8S_NODE_SELECTOR").split():
        pair = re.fullmatch(rf"({_NAME})=({_VALUE})", word)
        if not pair:
            raise _error(settings, "LAB_K8S_NODE_SELECTOR", f"`{word}` is not label=value")
        pairs.append((pair[1], pair[2]))
    return pairs


def _toleration(settings: Settings, word: str) -> Toleration:
    """Return the Toleration of a word of LAB_K8S_TOLERATIONS. ConfigError if it or its effect is invalid."""
    parts = re.fullmatch(rf"({_NAME})(?:=({_VALUE}))?(?::(\w+))?", word)
    if not parts:
        raise _error(settings, "LAB_K8S_TOLERATIONS", f"`{word}` is not key, key=value or key=value:effect")
    effect = parts[3] or ""
    if effect and effect not in EFFECTS:
        raise _error(settings, "LAB_K8S_TOLERATIONS", f"unknown effect `{effect}`", did_you_mean(effect, EFFECTS))
    return Toleration(key=parts[1], value=parts[2] or "", effect=effect)


def _error(settings: Settings, key: str, reason: str, hint: str = "") -> ConfigError:
    return settings.values[key].error(reason, hint)
