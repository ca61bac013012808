"""A stand-in for the mpi-operator in a real cluster: creates an MPIJob's objects and reports its status.

Source: kubeflow/mpi-operator v0.8, pkg/controller/mpi_job_controller.go. It writes no events, and suspends no job.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from support import mpijob
from support.harness import wait_until
from support.mpijob import Manifest
from support.podnames import PodNames

MADE = ("Service", "ConfigMap", "Secret", "Pod", "Job")
KEPT = {"None": ("Pending", "Running", "Succeeded", "Failed"), "Running": ("Succeeded", "Failed"), "All": ()}
"""Phases of workers that are kept at the end of the job, by cleanPodPolicy."""


class RefusedError(Exception):
    """An object of this name belongs to another owner."""


class Operator:
    """A controller that reconciles the jobs of a namespace twice a second."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        """Connect to the cluster and make the ssh keys of all jobs; ``run`` starts the work."""
        self.api = DynamicClient(config.new_client_from_config(config_file=str(kubeconfig)))
        self.namespace = namespace
        self.keys = _keys()
        self.refusals: list[str] = []
        """Errors of the API, and objects in the way of a job; each is retried."""
        self.objects_by_name: dict[tuple[str, str], Manifest] = {}

    def kind(self, kind: str) -> Any:
        """Return the API's resource of a kind, in the version that mpijob.py uses."""
        return self.api.resources.get(api_version=mpijob.VERSIONS.get(kind, "v1"), kind=kind)

    def objects(self, kind: str) -> dict[str, Manifest]:
        """Return the namespace's objects of a kind, by name."""
        items = self.kind(kind).get(namespace=self.namespace).to_dict()["items"]
        return {item["metadata"]["name"]: item for item in items}

    def run(self, names: PodNames, stop: threading.Event) -> None:
        """Reconcile all MPIJobs twice a second until ``stop`` is set; keep the errors in ``refusals``."""
        while not stop.wait(0.5):
            jobs = self.objects("MPIJob")
            self.objects_by_name = {(kind, name): item for kind in MADE for name, item in self.objects(kind).items()}
            names.addresses = dict(self._addresses())
            for job in jobs.values():
                try:
                    if "deletionTimestamp" not in job["metadata"]:
                        self._sync(job)
                except (ApiException, RefusedError) as error:
                    self.refusals.append(str(error))

    def _addresses(self) -> Iterator[tuple[str, str]]:
        """Yield DNS name and address of the ready pods behind headless Services."""
        for service, endpoints in self.objects("Endpoints").items():
            for address in [at for subset in endpoints.get("subsets", ()) for at in subset.get("addresses", ())]:
                yield f"{address.get('hostname')}.{service}.{self.namespace}.svc.cluster.local", address["ip"]

    def _sync(self, job: Manifest) -> None:
        """Create the missing objects of a job and update its status; clean up after one that has ended."""
        name, status = job["metadata"]["name"], copy.deepcopy(job.get("status", {}))
        if _is(job, "Succeeded", "Failed"):
            self._clean(job)
            return
        if not status:
            _add(status, "Created", "MPIJobCreated", f"MPIJob {self.namespace}/{name} is created.")
        status.setdefault("startTime", _now())
        launcher = self.objects_by_name.get(("Job", f"{name}-launcher"))
        workers = []
        if not (launcher and _is(launcher, "Complete", "Failed")):
            for made in (mpijob.service(job), mpijob.config_map(job), mpijob.secret(job, *self.keys)):
                self._ensure(job, made)
            workers = [self._ensure(job, mpijob.worker(job, index)) for index in range(len(mpijob.workers(job)))]
            ready = all(_is(pod, "Ready") for pod in workers)
            if ready or job["spec"].get("launcherCreationPolicy") != "WaitForWorkersReady":
                launcher = self._ensure(job, mpijob.launcher(job))
        self._report(name, status, launcher, workers)
        if status != job.get("status"):
            self.kind("MPIJob").status.replace(body={**job, "status": status}, namespace=self.namespace)

    def _ensure(self, job: Manifest, made: Manifest) -> Manifest:
        """Return the job's existing object, or create it; RefusedError if the existing one is not the job's."""
        kind, name = made["kind"], made["metadata"]["name"]
        if existing := self.objects_by_name.get((kind, name)):
            if not _owns(job, existing):
                raise RefusedError(f"Resource {name!r} of Kind {kind!r} already exists and is not managed by MPIJob")
            return existing
        return dict(self.kind(kind).create(body=made, namespace=self.namespace).to_dict())

    def _report(self, name: str, status: Manifest, launcher: Manifest | None, workers: list[Manifest]) -> None:
        """Write the job's state into ``status``: replicas, time of completion and conditions."""
        replicas = status["replicaStatuses"] = {"Worker": _counts(workers)}
        if not launcher:
            return
        pods = [pod for (kind, _), pod in self.objects_by_name.items() if kind == "Pod" and _owns(launcher, pod)]
        replicas["Launcher"] = _counts(pods)
        whole = f"MPIJob {self.namespace}/{name}"
        if _is(launcher, "Complete"):
            status["completionTime"] = launcher["status"]["completionTime"]
            _add(status, "Succeeded", "MPIJobSucceeded", f"{whole} successfully completed.")
        elif _is(launcher, "Failed"):
            status["completionTime"] = _now()
            failed = next(condition for condition in launcher["status"]["conditions"] if condition["type"] == "Failed")
            reason, message = failed["reason"], failed["message"]
            if reason == "BackoffLimitExceeded" and replicas["Launcher"].get("failed"):
                last = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))["status"]
                reason, message = f"{reason}/{last.get('reason', '')}", f"{message}: {last.get('message', '')}"
            _add(status, "Failed", reason, message)
        elif replicas["Launcher"].get("active") and replicas["Worker"].get("active") == len(workers):
            _add(status, "Running", "MPIJobRunning", f"{whole} is running.")

    def _clean(self, job: Manifest) -> None:
        """Delete the ended job's worker pods, except those that cleanPodPolicy keeps."""
        kept = KEPT[job["spec"]["runPolicy"].get("cleanPodPolicy", "None")]
        for name in mpijob.workers(job):
            pod = self.objects_by_name.get(("Pod", name))
            if pod and pod["status"]["phase"] not in kept and "deletionTimestamp" not in pod["metadata"]:
                self.kind("Pod").delete(name=name, namespace=self.namespace)


def _keys() -> tuple[str, str]:
    """Make an ECDSA key pair with ssh-keygen; return the private and the public key."""
    with TemporaryDirectory() as directory:
        path = Path(directory, "key")
        argv = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(path)]
        subprocess.run(argv, check=True, capture_output=True)
        return path.read_text(), path.with_suffix(".pub").read_text()


def _now() -> str:
    """Return the time now in UTC, in the API's format."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _owns(owner: Manifest, owned: Manifest) -> bool:
    """Return True if ``owner`` is among the object's owners."""
    return owner["metadata"]["uid"] in [at["uid"] for at in owned["metadata"].get("ownerReferences", ())]


def _is(manifest: Manifest, *kinds: str) -> bool:
    """Return True if one of these conditions of an object is True."""
    conditions = manifest.get("status", {}).get("conditions", ())
    return any(at["type"] in kinds and at["status"] == "True" for at in conditions)


def _add(status: Manifest, kind: str, reason: str, message: str) -> None:
    """Add a condition to a status unless it is there; set a condition Running to False."""
    conditions = status.setdefault("conditions", [])
    if kind in [condition["type"] for condition in conditions]:
        return
    for running in [condition for condition in conditions if condition["type"] == "Running"]:
        running["status"] = "False"
    times = dict.fromkeys(("lastUpdateTime", "lastTransitionTime"), _now())
    conditions.append({"type": kind, "status": "True", "reason": reason, "message": message, **times})


def _counts(pods: list[Manifest]) -> dict[str, int]:
    """Return the numbers of active, succeeded and failed pods, without those that are 0."""
    phases = [pod["status"].get("phase") for pod in pods]
    names = {"active": "Running", "succeeded": "Succeeded", "failed": "Failed"}
    return {name: phases.count(phase) for name, phase in names.items() if phase in phases}


@contextlib.contextmanager
def operating(kubeconfig: Path, namespace: str) -> Iterator[Operator]:
    """Run the operator and a DNS server for its pods in the block; yield the operator."""
    operator, stop = Operator(kubeconfig, namespace), threading.Event()
    with PodNames() as names, ThreadPoolExecutor(2) as threads:
        threads.submit(names.serve_forever)
        running = threads.submit(operator.run, names, stop)
        try:
            yield operator
        finally:
            stop.set()
            names.shutdown()
    running.result()


@contextlib.contextmanager
def fresh_namespace(kubeconfig: Path) -> Iterator[str]:
    """Create a namespace and yield its name; after the block, delete it and wait until it is gone."""
    api = DynamicClient(config.new_client_from_config(config_file=str(kubeconfig)))
    namespaces, name = api.resources.get(api_version="v1", kind="Namespace"), f"op-{secrets.token_hex(4)}"
    namespaces.create(body={"metadata": {"name": name}})
    try:
        yield name
    finally:
        namespaces.delete(name=name)
        selector = f"metadata.name={name}"
        wait_until(lambda: not namespaces.get(field_selector=selector).to_dict()["items"], 300, f"{name} is gone")
