"""Objects that the mpi-operator makes for an MPIJob, as pure functions of the job.

Source: kubeflow/mpi-operator v0.8, pkg/controller/mpi_job_controller.go. Jobs of Open MPI alone, and without what is
for elastic jobs and gangs.
"""

from __future__ import annotations

import copy
from typing import Any

Manifest = dict[str, Any]
VERSIONS = {"MPIJob": "kubeflow.org/v2beta1", "Job": "batch/v1"}
OPEN_MPI = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}


def workers(job: Manifest) -> list[str]:
    """List the names of the worker pods."""
    count = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    return [f"{job['metadata']['name']}-worker-{index}" for index in range(count)]


def service(job: Manifest) -> Manifest:
    """Build the headless Service of the job's pods."""
    return _object(job, "Service", "", {"spec": {"clusterIP": "None", "selector": _labels(job)}})


def config_map(job: Manifest) -> Manifest:
    """Build the ConfigMap with the hostfile of the job's workers."""
    name, namespace, slots = _named(job)
    hosts = "".join(f"{worker}.{name}.{namespace}.svc slots={slots}\n" for worker in workers(job))
    return _object(job, "ConfigMap", "-config", {"data": {"hostfile": hosts}})


def secret(job: Manifest, private: str, public: str) -> Manifest:
    """Build the Secret with the job's ssh keys."""
    keys = {"ssh-privatekey": private, "ssh-publickey": public}
    return _object(job, "Secret", "-ssh", {"type": "kubernetes.io/ssh-auth", "stringData": keys})


def worker(job: Manifest, index: int) -> Manifest:
    """Build the pod of worker ``index``."""
    name, namespace, _ = _named(job)
    pod = _pod(job, "Worker", f"-worker-{index}", {})
    pod["metadata"]["labels"] |= {"training.kubeflow.org/replica-index": str(index)}
    pod["spec"]["dnsConfig"] = {"searches": [f"{name}.{namespace}.svc.cluster.local"]}
    return _object(job, "Pod", f"-worker-{index}", pod)


def launcher(job: Manifest) -> Manifest:
    """Build the launcher's Job, with the run policy's time limit and retries."""
    name, _, slots = _named(job)
    pod = _pod(job, "Launcher", "-launcher", {**OPEN_MPI, "OMPI_MCA_orte_set_default_slots": str(slots), **NO_DEVICES})
    _mount(pod, "mpi-job-config", "/etc/mpi", {"configMap": {"name": f"{name}-config"}})
    kept = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
    policy = {key: value for key, value in job["spec"]["runPolicy"].items() if key in kept}
    return _object(job, "Job", "-launcher", {"spec": {**policy, "template": pod}})


def _named(job: Manifest) -> tuple[str, str, int]:
    """Return the job's name, namespace and slots per worker (1 by default)."""
    return job["metadata"]["name"], job["metadata"]["namespace"], job["spec"].get("slotsPerWorker", 1)


def _labels(job: Manifest, **more: str) -> dict[str, str]:
    """Return the labels of the job's pods, with ``more``, under the training operator's prefix."""
    labels = {"operator-name": "mpi-operator", "job-name": job["metadata"]["name"], **more}
    return {f"training.kubeflow.org/{key}": value for key, value in labels.items()}


def _object(job: Manifest, kind: str, suffix: str, body: Manifest) -> Manifest:
    """Build an object with the job as its owner and controller."""
    name, namespace, _ = _named(job)
    owner = {"apiVersion": VERSIONS["MPIJob"], "kind": "MPIJob", "name": name, "uid": job["metadata"]["uid"]}
    metadata = {
        "labels": {"app": name},
        **body.get("metadata", {}),
        "name": f"{name}{suffix}",
        "namespace": namespace,
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }
    return {**body, "apiVersion": VERSIONS.get(kind, "v1"), "kind": kind, "metadata": metadata}


def _pod(job: Manifest, role: str, suffix: str, environment: dict[str, str]) -> Manifest:
    """Build a role's pod template: hostname, labels, ``environment`` in the first container, and the job's keys."""
    name, replicas = job["metadata"]["name"], job["spec"]["mpiReplicaSpecs"][role]
    pod: Manifest = copy.deepcopy(replicas["template"])
    metadata = pod.setdefault("metadata", {})
    metadata["labels"] = metadata.get("labels", {}) | _labels(job, **{"job-role": role.lower()})
    pod["spec"] |= {
        "hostname": f"{name}{suffix}",
        "subdomain": name,
        "restartPolicy": replicas.get("restartPolicy", "Never"),
    }
    first = pod["spec"]["containers"][0]
    environment = {"K_MPI_JOB_ROLE": role.lower(), **environment}
    first["env"] = [*first.get("env", ()), *({"name": key, "value": value} for key, value in environment.items())]
    files = {"id_rsa": "ssh-privatekey", "id_rsa.pub": "ssh-publickey", "authorized_keys": "ssh-publickey"}
    items = [{"key": key, "path": path} for path, key in files.items()]
    _mount(pod, "ssh-auth", job["spec"]["sshAuthMountPath"], {"secret": {"secretName": f"{name}-ssh", "items": items}})
    return pod


def _mount(pod: Manifest, name: str, path: str, source: Manifest) -> None:
    """Mount a volume at a path of the pod's first container."""
    first = pod["spec"]["containers"][0]
    first["volumeMounts"] = [*first.get("volumeMounts", ()), {"name": name, "mountPath": path}]
    pod["spec"]["volumes"] = [*pod["spec"].get("volumes", ()), {"name": name, **source}]
