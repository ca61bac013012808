"""The job as objects, and these as YAML.

Sources: kubeflow/mpi-operator, API v2beta1; kubeflow/trainer, API v1alpha1; JobSet, v1alpha2; the Kubernetes API.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends.kubernetes.api import CACHE
from labctl.backends.kubernetes.job import HOME, KEYS, PORT, STORAGE, UID, ClusterJob, ClusterPods
from labctl.backends.kubernetes.pods import DEFAULT_CONTAINER
from labctl.backends.kubernetes.target import Target, Toleration
from labctl.jobs.job import limited
from labctl.model import File
from labctl.system import files

Manifest = dict[str, Any]


class Manifests(Struct, frozen=True, kw_only=True):
    """A job's objects, by kind and name, and their YAML."""

    name: str
    namespace: str
    objects: tuple[str, ...]
    yaml: str


OWNER = "labctl.owner"
"""The annotation of who submitted a run: ``person@machine``."""
RESULTS_WAIT = 600
"""Seconds for a run's end: its results are gathered, and fetched."""
LAUNCHER_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
"""What a launcher asks its node for."""
LOGS_KEPT = 86_400
"""Seconds that the launcher of a job that has ended is kept, with its log."""


def manifests(target: Target, built: ClusterJob) -> list[Manifest]:
    """Every object of the job, in the order in which they are created."""
    return [*_needed(target, built), *(_mpijob(target, built) if target.kind == "mpijob" else _trainjob(target, built))]


def record(target: Target, built: ClusterJob) -> File:
    """What is sent, less the Secret, for the run's record."""
    objects = [one for one in manifests(target, built) if one["kind"] != "Secret"]
    return File(path="rendered/manifests.yaml", content=text(objects))


def _needed(target: Target, built: ClusterPods) -> list[Manifest]:
    """What pods need beside themselves."""
    objects = [_object("v1", "Namespace", target.namespace, target, built, namespaced=False)]
    if built.lab.secrets:
        values = {name: value.reveal() for name, value in built.lab.secrets}
        objects.append({**_object("v1", "Secret", built.name, target, built), "type": "Opaque", "stringData": values})
    if target.storage:
        objects.append(_claim(target, built))
    return [*objects, _config_map(target, built)]


def single(target: Target, built: ClusterPods, command: list[str]) -> list[Manifest]:
    """A pod with no device that fills the claim with a command, and what it needs."""
    pod = _pod(target, built, "program", command, worker=False)
    pod["spec"]["restartPolicy"] = "Never"
    made = _object("v1", "Pod", built.name, target, built)
    made["metadata"]["annotations"] = {**pod["metadata"]["annotations"], **made["metadata"].get("annotations", {})}
    made["metadata"]["labels"]["labctl.role"] = CACHE
    return [*_needed(target, built), {**made, "spec": pod["spec"]}]


class Kustomized(Struct, frozen=True, kw_only=True):
    """Files for kustomize in a directory, and what is not in them."""

    directory: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]


def rendered(target: Target, built: ClusterJob) -> Manifests:
    """The job as labctl's answer has it."""
    objects = manifests(target, built)
    names = tuple(f"{one['kind']}/{one['metadata']['name']}" for one in objects)
    return Manifests(name=built.name, namespace=target.namespace, objects=names, yaml=text(objects))


def text(objects: list[Manifest]) -> str:
    """The objects as YAML documents; the same for the same objects."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as such."""

    def string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, string)
    Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000, explicit_start=True))


def export(target: Target, built: ClusterJob, directory: Path) -> Kustomized:
    """Write a job into a directory for kustomize, without its Secret."""
    made, left_out = kustomization(manifests(target, built))
    for file in made:
        files.write(directory / file.path, file.content, mode=file.mode)
    return Kustomized(directory=str(directory), files=tuple(file.path for file in made), left_out=left_out)


def kustomization(objects: list[Manifest]) -> tuple[tuple[File, ...], tuple[str, ...]]:
    """The objects as files for kustomize, one each; and what is not written, as such files are kept in git."""
    import yaml

    kept = [one for one in objects if one["kind"] != "Secret"]
    written = [File(path=f"{one['kind'].lower()}.yaml", content=text([one]), mode=0o644) for one in kept]
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    index = yaml.safe_dump({**head, "resources": [file.path for file in written]}, sort_keys=False)
    left_out = tuple(f"Secret {one['metadata']['name']}" for one in objects if one["kind"] == "Secret")
    return (*written, File(path="kustomization.yaml", content=index, mode=0o644)), left_out


def _object(
    version: str, kind: str, name: str, target: Target, built: ClusterPods, *, namespaced: bool = True
) -> Manifest:
    metadata: Manifest = {"name": name}
    if not namespaced:
        # Others may use it too, and whoever applies it from a file owns its labels.
        return {"apiVersion": version, "kind": kind, "metadata": metadata}
    labels = {"labctl.lab": built.lab.name, "labctl.run": label(built.run_id)}
    metadata |= {"namespace": target.namespace, "labels": labels}
    if built.owner:
        metadata["annotations"] = {OWNER: built.owner}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def label(run_id: str) -> str:
    """A run's id as the value of a label, which has at most 63 characters."""
    return run_id[:63].rstrip("-_.")


def _claim(target: Target, built: ClusterPods) -> Manifest:
    """The lab's storage, which all its jobs share: every node writes to it."""
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
    """The key of a file in the ConfigMap, which has no folders."""
    return path.replace("_", "__").replace("/", "_.")


def _config_map(target: Target, built: ClusterPods) -> Manifest:
    """The files of the job; a pod has them in their folders. And the names of its users."""
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
    """The template of a pod: nothing of root's, and no more than the job needs."""
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
            # Else the kubelet goes through all files of the claim at the start of each pod.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if target.pull_secret:
        spec["imagePullSecrets"] = [{"name": target.pull_secret}]
    if worker:
        spec |= _placement(target)
    if tolerated := target.tolerated if worker else target.tolerations:
        spec["tolerations"] = [_toleration(one) for one in tolerated]
    spec["containers"] = [first]
    spec["volumes"] = _volumes(target, built)
    labels = {
        "labctl.lab": built.lab.name,
        "labctl.run": label(built.run_id),
        "labctl.role": "worker" if worker else "launcher",
    }
    # Istio's proxy would keep the ranks' own connections, and the pod after its end; other meshes may be there too.
    annotations = {"sidecar.istio.io/inject": "false", DEFAULT_CONTAINER: name}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _placement(target: Target) -> Manifest:
    """Where workers may run, and what they share with their node."""
    found: Manifest = {}
    if target.host_ipc:
        found["hostIPC"] = True
    if target.host_network:
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if target.node_selector:
        found["nodeSelector"] = dict(target.node_selector)
    return found


def _toleration(one: Toleration) -> Manifest:
    return {
        "key": one.key,
        "operator": "Equal" if one.value else "Exists",
        **({"value": one.value} if one.value else {}),
        **({"effect": one.effect} if one.effect else {}),
    }


def _resources(target: Target, built: ClusterPods) -> Manifest:
    """Requests equal limits: devices and huge pages are never shared, and memory is there when it is needed."""
    found = asked(target, built.lab.nodes[0].slots)
    return {"limits": found, "requests": dict(found)} if found else {}


def asked(target: Target, slots: int) -> dict[str, str]:
    """What a worker asks its node for, by resource."""
    wanted = {"cpu": target.cpu, "memory": target.memory, "hugepages-2Mi": target.hugepages}
    if target.resource:
        wanted[target.resource] = str(slots)
    found = {name: amount for name, amount in wanted.items() if amount}
    if target.hugepages and not target.memory:
        # The API asks for one of them beside huge pages.
        found = {"cpu": "1", **found}
    return found


def _mounts(target: Target, built: ClusterPods) -> list[Manifest]:
    project = built.lab.project_path
    found = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "work", "mountPath": project},
        {"name": "home", "mountPath": HOME},
        {"name": "files", "mountPath": "/etc/labctl/files"},
        {"name": "start", "mountPath": "/etc/labctl/start"},
        {"name": "start", "mountPath": "/etc/passwd", "subPath": "passwd"},
    ]
    if target.storage:
        found.append({"name": "storage", "mountPath": STORAGE})
    if built.lab.secrets:
        found.append({"name": "secrets", "mountPath": "/run/secrets"})
    return found


def _volumes(target: Target, built: ClusterPods) -> list[Manifest]:
    items = [
        {"key": _key(path), "path": path, **({"mode": 0o555} if program else {})} for path, _, program in built.files
    ]
    start = [{"key": name, "path": name} for name in built.start]
    found: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": target.shared_memory}},
        {"name": "work", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "files", "configMap": {"name": built.name, "items": items}},
        {"name": "start", "configMap": {"name": built.name, "items": start}},
    ]
    if target.storage:
        claim = {"claimName": f"{built.lab.name}-storage"}
        found.append({"name": "storage", "persistentVolumeClaim": claim})
    if built.lab.secrets:
        found.append({"name": "secrets", "secret": {"secretName": built.name, "defaultMode": 0o440}})
    return found


_START = ["bash", "/etc/labctl/start/pod.sh"]


def _deadline(target: Target, built: ClusterJob) -> int:
    """Seconds for pods to start, the run and its end: the launch command itself has the run's time."""
    return target.patience + int(built.job.timeout) + RESULTS_WAIT


def _queue(target: Target) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": target.queue} if target.queue else {}


def _mpijob(target: Target, built: ClusterJob) -> list[Manifest]:
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
        # The launcher is made once they are ready: a gang with it would wait for itself.
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
    """A runtime of the job's own, and the job that refers to it."""
    version = "trainer.kubeflow.org/v1alpha1"
    runtime = _object(version, "TrainingRuntime", built.name, target, built)
    # The runtime's container in both kinds of pods is called node.
    launcher = _pod(target, built, "node", [*_START, "launcher", *limited(built.job)], worker=False)
    worker = _pod(target, built, "node", [*_START, "worker"], worker=True)
    for pod in (launcher, worker):
        pod["spec"]["restartPolicy"] = "Never"
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # A gang is of all pods, the launcher too: it waits for the workers by itself.
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
    return (
        {"volcano": {}} if target.gang == "volcano" else {"coscheduling": {"scheduleTimeoutSeconds": target.patience}}
    )
