"""Renders a job as Kubernetes objects, and these as YAML.

Sources: kubeflow/mpi-operator, API v2beta1; kubeflow/trainer, API v1alpha1; JobSet, v1alpha2; the Kubernetes API.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends.kubernetes.api import CACHE
from labctl.backends.kubernetes.job import HOME, HOSTNAME, KEYS, PORT, STORAGE, UID, ClusterJob, ClusterPods
from labctl.backends.kubernetes.pods import DEFAULT_CONTAINER
from labctl.backends.kubernetes.target import Target, Toleration
from labctl.errors import HostError
from labctl.jobs.job import limited
from labctl.model import File
from labctl.system import files

Manifest = dict[str, Any]


class Manifests(Struct, frozen=True, kw_only=True):
    """Names of a job's objects, as ``KIND/NAME``, and their YAML."""

    name: str
    namespace: str
    objects: tuple[str, ...]
    yaml: str


OWNER = "labctl.owner"
"""Annotation with the user who submitted a run: ``person@machine``."""
WAITING = 7 * 24 * 3600
"""Seconds that a run with --wait may wait for room on its nodes."""
RESULTS_WAIT = 600
"""Seconds after a run's command for its results to be gathered and fetched."""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LAUNCHER_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
"""Requests of a launcher."""
LOGS_KEPT = 86_400
"""Seconds that an ended job is kept, with its launcher's log."""


def manifests(target: Target, built: ClusterJob) -> list[Manifest]:
    """Return the objects of a job in the order of their creation: what pods need, then MPIJob or TrainJob."""
    return [*_needed(target, built), *(_mpijob(target, built) if target.kind == "mpijob" else _trainjob(target, built))]


RECORD = "rendered/manifests.yaml"


def record(objects: Iterable[Manifest]) -> File:
    """Return the file of a run's record with the job's objects as YAML, without the Secret."""
    kept = [manifest for manifest in objects if manifest["kind"] != "Secret"]
    return File(path=RECORD, content=text(kept))


def recorded(record_of_run: Path, names: Mapping[str, str], images: Mapping[str, str]) -> list[Manifest]:
    """Return the objects in a run's record, with ``names`` and ``images`` replaced. HostError if unreadable.

    ``names`` maps old texts to new ones, ``images`` the name of an image to its name with a digest.
    """
    import yaml

    try:
        content = (record_of_run / RECORD).read_text(encoding="utf-8")
    except OSError as error:
        raise HostError(f"{record_of_run / RECORD}: {error.strerror}", hint="labctl run WORKLOAD") from error
    for before, now in names.items():
        content = content.replace(before, now)
    for image, pinned in images.items():
        content = content.replace(f"image: {image}\n", f"image: {pinned}\n")
    return list(yaml.load_all(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def named_hosts(objects: Iterable[Manifest]) -> tuple[str, ...]:
    """Return the hostnames to which the pods of these objects are bound by affinity; () if to none."""
    names: tuple[str, ...] = ()
    for template in pod_templates(objects):
        affinity = template["spec"].get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {})
        for term in affinity.get("nodeSelectorTerms", ()):
            (match,) = term["matchExpressions"]
            names += tuple(match["values"] if match["operator"] == "In" else ())
    return tuple(dict.fromkeys(names))


def volumes(objects: Iterable[Manifest], kind: str) -> list[Manifest]:
    """Return the sources of the volumes of a kind, such as ``secret``, in the pods of a job."""
    every = chain.from_iterable(template["spec"]["volumes"] for template in pod_templates(objects))
    return [volume[kind] for volume in every if kind in volume]


def pod_templates(objects: Iterable[Manifest]) -> Iterator[Manifest]:
    """Yield the pod templates of the MPIJob or TrainingRuntime among these objects."""
    for manifest in objects:
        if manifest["kind"] == "MPIJob":
            yield from (role["template"] for role in manifest["spec"]["mpiReplicaSpecs"].values())
        elif manifest["kind"] == "TrainingRuntime":
            for part in manifest["spec"]["template"]["spec"]["replicatedJobs"]:
                yield part["template"]["spec"]["template"]


def job_in(objects: Iterable[Manifest]) -> Manifest:
    """Return the MPIJob or TrainJob among a job's objects."""
    return next(manifest for manifest in objects if manifest["kind"] in ("MPIJob", "TrainJob"))


def _needed(target: Target, built: ClusterPods) -> list[Manifest]:
    """Return the objects that pods need: Namespace, Secret if there are secrets, claim if any, ConfigMap."""
    objects = [_object("v1", "Namespace", target.namespace, target, built, namespaced=False)]
    if built.lab.secrets:
        objects.append(secret(target, built))
    if target.storage:
        objects.append(_claim(target, built))
    return [*objects, _config_map(target, built)]


def secret(target: Target, built: ClusterPods) -> Manifest:
    """Return the Secret with the lab's secrets in clear text."""
    values = {name: value.reveal() for name, value in built.lab.secrets}
    return {**_object("v1", "Secret", built.name, target, built), "type": "Opaque", "stringData": values}


def single(target: Target, built: ClusterPods, command: list[str]) -> list[Manifest]:
    """Return the objects of one pod without devices that runs a command; the Pod is the last."""
    pod = _pod(target, built, "program", command, worker=False)
    pod["spec"]["restartPolicy"] = "Never"
    made = _object("v1", "Pod", built.name, target, built)
    made["metadata"]["annotations"] = {**pod["metadata"]["annotations"], **made["metadata"].get("annotations", {})}
    made["metadata"]["labels"]["labctl.role"] = CACHE
    return [*_needed(target, built), {**made, "spec": pod["spec"]}]


class Kustomized(Struct, frozen=True, kw_only=True):
    """Files for kustomize in a directory, and the objects left out."""

    directory: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]


def rendered(target: Target, built: ClusterJob) -> Manifests:
    """Return the names of a job's objects and their YAML, with the Secret in clear text."""
    objects = manifests(target, built)
    return Manifests(name=built.name, namespace=target.namespace, objects=names_of(objects), yaml=text(objects))


def names_of(objects: Iterable[Manifest]) -> tuple[str, ...]:
    """Return the names of objects, as ``KIND/NAME``."""
    return tuple(f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in objects)


def text(objects: list[Manifest]) -> str:
    """Return objects as YAML documents, multi-line strings as blocks; equal objects give equal text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line strings as blocks."""

    def string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, string)
    Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000, explicit_start=True))


def export(target: Target, built: ClusterJob, directory: Path) -> Kustomized:
    """Write a job's objects, but not its Secret, as files for kustomize; return the files' names."""
    made, left_out = kustomization(manifests(target, built))
    for file in made:
        files.write(directory / file.path, file.content, mode=file.mode)
    return Kustomized(directory=str(directory), files=tuple(file.path for file in made), left_out=left_out)


def kustomization(objects: list[Manifest]) -> tuple[tuple[File, ...], tuple[str, ...]]:
    """Return a file per object and kustomization.yaml; Secrets are left out, and named apart."""
    import yaml

    kept = [manifest for manifest in objects if manifest["kind"] != "Secret"]
    written = [File(path=f"{manifest['kind'].lower()}.yaml", content=text([manifest]), mode=0o644) for manifest in kept]
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    index = yaml.safe_dump({**head, "resources": [file.path for file in written]}, sort_keys=False)
    left_out = tuple(f"Secret {manifest['metadata']['name']}" for manifest in objects if manifest["kind"] == "Secret")
    return (*written, File(path="kustomization.yaml", content=index, mode=0o644)), left_out


def _object(
    version: str, kind: str, name: str, target: Target, built: ClusterPods, *, namespaced: bool = True
) -> Manifest:
    """Return an object without spec; with labels, owner and namespace only if ``namespaced``."""
    metadata: Manifest = {"name": name}
    if not namespaced:
        # Others may use it too, and applying it from a file would overwrite its labels.
        return {"apiVersion": version, "kind": kind, "metadata": metadata}
    labels = {"labctl.lab": built.lab.name, "labctl.run": label(built.run_id)}
    metadata |= {"namespace": target.namespace, "labels": labels}
    if built.owner:
        metadata["annotations"] = {OWNER: built.owner}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def label(run_id: str) -> str:
    """Return a run's id as a label value: longer than 63 characters, its beginning and its random end."""
    return run_id if len(run_id) <= 63 else run_id[:56] + run_id[-7:]


def _claim(target: Target, built: ClusterPods) -> Manifest:
    """Return the lab's ReadWriteMany claim, without a run's label or owner, as all its jobs share it."""
    claim = _object("v1", "PersistentVolumeClaim", f"{built.lab.name}-storage", target, built)
    del claim["metadata"]["labels"]["labctl.run"]
    claim["metadata"].pop("annotations", None)
    claim["spec"] = {
        "accessModes": ["ReadWriteMany"],
        **({"storageClassName": target.storage_class} if target.storage_class else {}),
        "resources": {"requests": {"storage": target.storage}},
    }
    return claim


def _key(path: str) -> str:
    """Return the ConfigMap key of a file's path: ``/`` and ``_`` are replaced, as keys have no folders."""
    return path.replace("_", "__").replace("/", "_.")


def _config_map(target: Target, built: ClusterPods) -> Manifest:
    """Return the ConfigMap with the files that pods start with, and the job's; binary ones apart."""
    texts = built.start
    binary: dict[str, str] = {}
    for path, content, _ in built.files:
        try:
            texts[_key(path)] = content.decode("utf-8")
        except UnicodeDecodeError:
            binary[_key(path)] = base64.b64encode(content).decode()
    made = _object("v1", "ConfigMap", built.name, target, built)
    return {**made, "data": texts, **({"binaryData": binary} if binary else {})}


def _pod(target: Target, built: ClusterPods, name: str, command: list[str], *, worker: bool) -> Manifest:
    """Return a pod template of a worker or launcher, which runs without root and capabilities."""
    first: Manifest = {"name": name, "image": built.lab.image, "command": command, "workingDir": built.lab.project_path}
    first["env"] = [{"name": key, "value": value} for key, value in built.environment]
    first["resources"] = _resources(target, built) if worker else {"requests": dict(LAUNCHER_REQUESTS)}
    first["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if worker:
        first["ports"] = [{"containerPort": PORT, "name": "ssh"}]
        first["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 3}
    first["volumeMounts"] = _mounts(target, built)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            # Otherwise the kubelet changes all files of the claim at the start of each pod.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if target.pull_secret:
        spec["imagePullSecrets"] = [{"name": target.pull_secret}]
    if worker:
        spec |= _placement(target, built)
    if tolerated := target.tolerated if worker else target.tolerations:
        spec["tolerations"] = [_toleration(toleration) for toleration in tolerated]
    spec["containers"] = [first]
    spec["volumes"] = _volumes(target, built)
    labels = {
        "labctl.lab": built.lab.name,
        "labctl.run": label(built.run_id),
        "labctl.role": "worker" if worker else "launcher",
    }
    # Istio's proxy would intercept the ranks' connections and outlive them; other sidecars may be injected.
    annotations = {"sidecar.istio.io/inject": "false", DEFAULT_CONTAINER: name}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _placement(target: Target, built: ClusterPods) -> Manifest:
    """Return a worker's affinity, node selector and host namespaces, as fields of its pod spec."""
    fields: Manifest = _affinity(built)
    if target.host_ipc:
        fields["hostIPC"] = True
    if target.host_network:
        fields |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if target.node_selector:
        fields["nodeSelector"] = dict(target.node_selector)
    return fields


def _affinity(built: ClusterPods) -> Manifest:
    """Return the affinity to named nodes, one worker each, or away from excluded ones; {} without either."""
    placement = built.placement
    if not (placement.hostnames or placement.without):
        return {}
    operator, names = ("In", placement.hostnames) if placement.hostnames else ("NotIn", placement.without)
    term = {"matchExpressions": [{"key": HOSTNAME, "operator": operator, "values": list(names)}]}
    affinity: Manifest = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
    if placement.hostnames:
        workers = {"matchLabels": {"labctl.lab": built.lab.name, "labctl.role": "worker"}}
        affinity["podAntiAffinity"] = {REQUIRED: [{"labelSelector": workers, "topologyKey": HOSTNAME}]}
    return {"affinity": affinity}


def _toleration(toleration: Toleration) -> Manifest:
    """Return a toleration as in a pod's spec; Exists without a value."""
    return {
        "key": toleration.key,
        "operator": "Equal" if toleration.value else "Exists",
        **({"value": toleration.value} if toleration.value else {}),
        **({"effect": toleration.effect} if toleration.effect else {}),
    }


def _resources(target: Target, built: ClusterPods) -> Manifest:
    """Return a worker's limits, and equal requests, of cpu, memory, huge pages and devices; {} if none is set."""
    amounts = asked(target, built.lab.nodes[0].slots)
    return {"limits": amounts, "requests": dict(amounts)} if amounts else {}


def asked(target: Target, slots: int) -> dict[str, str]:
    """Return a worker's requests by resource: cpu, memory, huge pages and, if a device is used, one per slot."""
    settings = {"cpu": target.cpu, "memory": target.memory, "hugepages-2Mi": target.hugepages}
    if target.resource:
        settings[target.resource] = str(slots)
    amounts = {name: amount for name, amount in settings.items() if amount}
    if target.hugepages and not target.memory:
        # The API requires cpu or memory with huge pages.
        amounts = {"cpu": "1", **amounts}
    return amounts


def _mounts(target: Target, built: ClusterPods) -> list[Manifest]:
    """Return the volume mounts of a pod, with storage and secrets if the lab has them."""
    project = built.lab.project_path
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "work", "mountPath": project},
        {"name": "home", "mountPath": HOME},
        {"name": "files", "mountPath": "/etc/labctl/files"},
        {"name": "start", "mountPath": "/etc/labctl/start"},
        {"name": "start", "mountPath": "/etc/passwd", "subPath": "passwd"},
    ]
    if target.storage:
        mounts.append({"name": "storage", "mountPath": STORAGE})
    if built.lab.secrets:
        mounts.append({"name": "secrets", "mountPath": "/run/secrets"})
    return mounts


def _volumes(target: Target, built: ClusterPods) -> list[Manifest]:
    """Return the volumes of a pod, with the claim and the Secret if the lab has them."""
    items = [
        {"key": _key(path), "path": path, **({"mode": 0o555} if program else {})} for path, _, program in built.files
    ]
    start = [{"key": name, "path": name} for name in built.start]
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": target.shared_memory}},
        {"name": "work", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "files", "configMap": {"name": built.name, "items": items}},
        {"name": "start", "configMap": {"name": built.name, "items": start}},
    ]
    if target.storage:
        claim = {"claimName": f"{built.lab.name}-storage"}
        volumes.append({"name": "storage", "persistentVolumeClaim": claim})
    if built.lab.secrets:
        volumes.append({"name": "secrets", "secret": {"secretName": built.name, "defaultMode": 0o440}})
    return volumes


_START = ["bash", "/etc/labctl/start/pod.sh"]


def _deadline(target: Target, built: ClusterJob) -> int:
    """Return seconds for pods to start, the run, its results and, if it waits, for room."""
    return target.patience + int(built.job.timeout) + RESULTS_WAIT + (WAITING if built.waits else 0)


def _queue(target: Target) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": target.queue} if target.queue else {}


def _mpijob(target: Target, built: ClusterJob) -> list[Manifest]:
    """Return a list with the MPIJob of a job, whose launcher is created once the workers are ready."""
    made = _object("kubeflow.org/v2beta1", "MPIJob", built.name, target, built)
    made["metadata"]["labels"] |= _queue(target)
    workers = len(built.lab.nodes)
    policy: Manifest = {
        "activeDeadlineSeconds": _deadline(target, built),
        "backoffLimit": 0,
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": LOGS_KEPT,
    }
    if target.gang != "none":
        # The launcher is created once the workers are ready: a gang that includes it would deadlock.
        policy["schedulingPolicy"] = {"minAvailable": workers}
    launcher = _pod(target, built, "launcher", [*_START, "launcher", *limited(built.job)], worker=False)
    worker = _pod(target, built, "worker", [*_START, "worker"], worker=True)
    made["spec"] = {
        "slotsPerWorker": built.lab.nodes[0].slots,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "sshAuthMountPath": KEYS,
        "mpiImplementation": "OpenMPI",
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            "Worker": {"replicas": workers, "restartPolicy": "Never", "template": worker},
        },
    }
    return [made]


def _trainjob(target: Target, built: ClusterJob) -> list[Manifest]:
    """Return the TrainingRuntime of a job, and the TrainJob that refers to it."""
    version = "trainer.kubeflow.org/v1alpha1"
    runtime = _object(version, "TrainingRuntime", built.name, target, built)
    # Trainer expects the container of both roles to be named node.
    launcher = _pod(target, built, "node", [*_START, "launcher", *limited(built.job)], worker=False)
    worker = _pod(target, built, "node", [*_START, "worker"], worker=True)
    for pod in (launcher, worker):
        pod["spec"]["restartPolicy"] = "Never"
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # A gang includes the launcher, which waits for the workers by itself.
    first = {} if target.gang != "none" else {"dependsOn": [{"name": "node", "status": "Ready"}]}
    runtime["spec"] = {
        "mlPolicy": {
            "numNodes": len(built.lab.nodes),
            "mpi": {
                "numProcPerNode": built.lab.nodes[0].slots,
                "mpiImplementation": "OpenMPI",
                "sshAuthMountPath": KEYS,
                "runLauncherAsNode": False,
            },
        },
        **({"podGroupPolicy": _gang(target)} if target.gang != "none" else {}),
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": "node", "template": {"spec": {"backoffLimit": 0, "template": worker}}},
                    {
                        "name": "launcher",
                        **first,
                        "template": {
                            "metadata": {"labels": trainer},
                            "spec": {"backoffLimit": 0, "template": launcher},
                        },
                    },
                ],
            }
        },
    }
    made = _object(version, "TrainJob", built.name, target, built)
    made["metadata"]["labels"] |= _queue(target)
    made["spec"] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": built.name},
        "activeDeadlineSeconds": _deadline(target, built),
    }
    return [runtime, made]


def _gang(target: Target) -> Manifest:
    """Return the TrainingRuntime's pod group policy: Volcano, or coscheduling with the patience."""
    return (
        {"volcano": {}} if target.gang == "volcano" else {"coscheduling": {"scheduleTimeoutSeconds": target.patience}}
    )
