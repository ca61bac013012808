"""Types of the parts of an MPIJob that labctl reads; other fields are ignored.

Source: kubeflow.org/v2beta1 of the mpi-operator and the pod specification of Kubernetes. null means an absent field, as
for the API server.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from labctl.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# Source: resource.Quantity of k8s.io/apimachinery; requests and limits are not negative.
_QUANTITY = r"^\+?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
Amount = (
    Annotated[str, Meta(pattern=_QUANTITY)]
    | Annotated[int, Meta(ge=0, le=2**63 - 1)]
    | Annotated[float, Meta(ge=0, le=1e30)]
)
"""A quantity."""
Scalar = str | float | int
"""Text, or a number whose quotes were forgotten."""


class Metadata(Struct, frozen=True):
    """Metadata of an object."""

    name: str | None = None
    namespace: str | None = None
    labels: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None


class Document(Struct, frozen=True):
    """An arbitrary Kubernetes object."""

    kind: str | None = None
    apiVersion: str | None = None  # noqa: N815 - the field's own name, here and below
    metadata: Metadata | None = None


class Variable(Struct, frozen=True):
    """Environment variable of a container."""

    name: str
    value: Scalar | None = None
    valueFrom: dict[str, Any] | None = None  # noqa: N815


class Resources(Struct, frozen=True):
    """Limits and requests of a container."""

    limits: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None


class Container(Struct, frozen=True):
    """Container of a pod."""

    name: str | None = None
    image: str | None = None
    command: list[Scalar] | None = None
    args: list[Scalar] | None = None
    env: list[Variable] | None = None
    resources: Resources | None = None


class Toleration(Struct, frozen=True):
    """Toleration of a taint."""

    key: str | None = None
    value: str | None = None
    effect: str | None = None


class PullSecret(Struct, frozen=True):
    """Reference to a secret for an image registry."""

    name: str


class PodSpec(Struct, frozen=True):
    """Specification of a pod."""

    containers: Annotated[list[Container], Meta(min_length=1)]
    hostIPC: bool | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    nodeSelector: dict[str, Any] | None = None  # noqa: N815
    tolerations: list[Toleration] | None = None
    imagePullSecrets: list[PullSecret] | None = None  # noqa: N815


class Template(Struct, frozen=True):
    """Template of pods."""

    spec: PodSpec


class Replica(Struct, frozen=True):
    """Pods of one role."""

    template: Template
    replicas: Count | None = None


class RunPolicy(Struct, frozen=True):
    """Policy for the run of a job."""

    activeDeadlineSeconds: Count | None = None  # noqa: N815


class ReplicaSpecs(Struct, frozen=True):
    """Pods of a job by role."""

    Launcher: Replica | None = None
    Worker: Replica | None = None


class Spec(Struct, frozen=True):
    """Specification of an MPIJob."""

    slotsPerWorker: Count | None = None  # noqa: N815
    runPolicy: RunPolicy | None = None  # noqa: N815
    mpiReplicaSpecs: ReplicaSpecs | None = None  # noqa: N815


class MPIJob(Document, frozen=True):
    """MPIJob of kubeflow.org/v2beta1."""

    spec: Spec | None = None


def check(job: Any) -> None:
    """Check an MPIJob. ConfigError with the path of the invalid value, such as ``spec.slotsPerWorker: ...``."""
    read = convert(job, MPIJob)
    if read.metadata:
        _check_values(read.metadata.labels, str, "metadata.labels")
    replicas = (read.spec and read.spec.mpiReplicaSpecs) or ReplicaSpecs()
    for role, replica in (("Launcher", replicas.Launcher), ("Worker", replicas.Worker)):
        if replica:
            _check_pod(replica.template.spec, f"spec.mpiReplicaSpecs.{role}.template.spec")


def _check_pod(spec: PodSpec, place: str) -> None:
    """Check types in node selector and resources of a pod. ConfigError with the path of the invalid value."""
    _check_values(spec.nodeSelector, str, f"{place}.nodeSelector")
    for number, container in enumerate(spec.containers):
        resources = container.resources or Resources()
        for name, amounts in (("limits", resources.limits), ("requests", resources.requests)):
            _check_values(amounts, Amount, f"{place}.containers[{number}].resources.{name}")


def _check_values(mapping: dict[str, Any] | None, expected: Any, place: str) -> None:
    """Check each value of a mapping by itself, as msgspec does not name the key. ConfigError with its path."""
    for key, value in (mapping or {}).items():
        convert(value, expected, f"{place}.{key}")


def convert(value: Any, expected: Any, place: str = "") -> Any:
    """Convert a value to a type. ConfigError, ``PATH: REASON``, if it does not match."""
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        reason, _, below = str(error).partition(" - at `$")
        at = f"{place}{below.removesuffix('`')}".removeprefix(".")
        plain = f"{value} is not a quantity, such as 500m or 8Gi" if expected == Amount else _plain(reason)
        raise ConfigError(f"{at or 'the object'}: {plain}") from error


_WORDS = {"object": "mapping", "array": "list", "str": "text", "int": "whole number", "float": "number"}


def _plain(reason: str) -> str:
    """Return a reason of msgspec in the terms of YAML, with a small first letter and no backticks."""
    text = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), reason).replace("`", "").replace(" | ", " or ")
    return text[0].lower() + text[1:]
