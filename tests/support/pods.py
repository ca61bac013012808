"""A stand-in for the operators: the pods of an MPIJob or a TrainJob as containers with the same layout.

A service gives each worker a name; the launcher has `/etc/mpi/hostfile`, all pods the job's key pair. Volumes belong to
the pods' group, and nobody is root.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from docker.types import EndpointConfig

from docker import DockerClient
from support.harness import wait_until

Manifest = dict[str, Any]
# Variables that operators add for Open MPI: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go;
# kubeflow/trainer, pkg/runtime/framework/plugins/mpi.
OPERATORS = {
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


@dataclass(frozen=True)
class Layout:
    """Pods and names that an operator makes of a job."""

    name: str
    launcher: Manifest
    worker: Manifest
    """Pod templates."""
    workers: dict[str, str]
    """Names of pods, and their names in the hostfile."""
    slots: int
    keys: str


def mpijob(objects: dict[str, Manifest]) -> Layout:
    """Lay out the pods of an MPIJob: `JOB-worker-N`, in the hostfile `JOB-worker-N.JOB.NAMESPACE.svc`."""
    job = objects["MPIJob"]
    name, namespace = (job["metadata"][key] for key in ("name", "namespace"))
    roles = job["spec"]["mpiReplicaSpecs"]
    workers = [f"{name}-worker-{index}" for index in range(roles["Worker"]["replicas"])]
    return Layout(
        name=name,
        launcher=roles["Launcher"]["template"]["spec"],
        worker=roles["Worker"]["template"]["spec"],
        workers={worker: f"{worker}.{name}.{namespace}.svc" for worker in workers},
        slots=job["spec"]["slotsPerWorker"],
        keys=job["spec"]["sshAuthMountPath"],
    )


def trainjob(objects: dict[str, Manifest]) -> Layout:
    """Lay out the pods of a TrainJob: `JOB-node-0-N`, in the hostfile `JOB-node-0-N.JOB`."""
    name, spec = objects["TrainJob"]["metadata"]["name"], objects["TrainingRuntime"]["spec"]
    mpi = spec["mlPolicy"]["mpi"]
    jobs = {
        replicated["name"]: replicated["template"]["spec"]["template"]
        for replicated in spec["template"]["spec"]["replicatedJobs"]
    }
    workers = [f"{name}-node-0-{index}" for index in range(spec["mlPolicy"]["numNodes"])]
    return Layout(
        name=name,
        launcher=jobs["launcher"]["spec"],
        worker=jobs["node"]["spec"],
        workers={worker: f"{worker}.{name}" for worker in workers},
        slots=mpi["numProcPerNode"],
        keys=mpi["sshAuthMountPath"],
    )


class Pods:
    """Pods of a job, made from its manifests; ``laid_out`` removes them at the end of its block."""

    def __init__(self, engine: DockerClient, manifests: list[Manifest], directory: Path) -> None:
        """Lay out the pods of the MPIJob or TrainJob among the manifests, and create their network."""
        self.engine, self.directory = engine, directory
        self.objects = {manifest["kind"]: manifest for manifest in manifests}
        self.layout = mpijob(self.objects) if "MPIJob" in self.objects else trainjob(self.objects)
        self.name = self.layout.name
        self.containers: list[Container] = []
        self.network = engine.networks.create(f"{self.name}-pods", options={"com.docker.network.driver.mtu": "1400"})

    def run(self, limit: float = 300) -> tuple[int, str]:
        """Start the workers, wait until they are ready, run the launcher; return its exit code and output."""
        self._operator_files()
        for name, endpoint in self.layout.workers.items():
            self._start(self.layout.worker, name, [endpoint])
        for worker in self.containers:
            wait_until(partial(self._is_ready, worker), 60, f"{worker.name} is ready")
        launcher = self._start(self.layout.launcher, f"{self.name}-launcher", [])
        code = launcher.wait(timeout=limit)["StatusCode"]
        return code, launcher.logs().decode()

    def _is_ready(self, worker: Container) -> bool:
        """Return True if the worker's readiness probe succeeds; fail unless its container runs."""
        worker.reload()
        assert worker.status == "running", self.logs()
        port = self.layout.worker["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
        return bool(worker.exec_run(["bash", "-c", f": < /dev/tcp/localhost/{port}"]).exit_code == 0)

    def logs(self) -> str:
        """Return the logs of all containers, each under its name."""
        return "\n".join(f"--- {container.name}\n{container.logs().decode()}" for container in self.containers)

    def remove(self) -> None:
        """Remove the containers and the network."""
        for container in self.containers:
            container.remove(force=True, v=True)
        self.network.remove()

    def _operator_files(self) -> None:
        """Write the ssh keys and the hostfile that the operator makes for the job."""
        keys = self.directory / "keys"
        keys.mkdir(parents=True)
        argv = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(keys / "id_rsa")]
        subprocess.run(argv, check=True, capture_output=True)
        (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
        mpi = self.directory / "mpi"
        mpi.mkdir()
        slots = self.layout.slots
        (mpi / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in self.layout.workers.values()))
        self._chown(keys)
        for key in keys.iterdir():
            key.chmod(0o640)

    def _chown(self, folder: Path) -> None:
        """Give a folder to root and the pods' fsGroup, recursively."""
        group = self.layout.worker["securityContext"]["fsGroup"]
        subprocess.run(["chown", "-R", f"0:{group}", str(folder)], check=True)

    def _start(self, spec: Manifest, name: str, aliases: list[str]) -> Container:
        """Create and start the container of a pod, with its volumes, user, capabilities and network aliases."""
        (container,) = spec["containers"]
        binds, shared = {}, "64m"
        for mount in container["volumeMounts"]:
            volume = next(candidate for candidate in spec["volumes"] if candidate["name"] == mount["name"])
            where = mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                shared = volume["emptyDir"]["sizeLimit"].replace("Gi", "g").replace("Mi", "m")
            elif "emptyDir" in volume:
                empty = self.directory / name / volume["name"]
                empty.mkdir(parents=True)
                self._chown(empty)
                empty.chmod(0o2777)
                binds[str(empty)] = {"bind": where, "mode": "rw"}
            else:
                source = self._projected(volume)
                binds[str(source / mount.get("subPath", ""))] = {"bind": where, "mode": "ro"}
        binds[str(self.directory / "keys")] = {"bind": self.layout.keys, "mode": "ro"}
        if spec is self.layout.launcher:
            binds[str(self.directory / "mpi")] = {"bind": "/etc/mpi", "mode": "ro"}
        context = spec["securityContext"]
        made = self.engine.containers.create(
            container["image"],
            entrypoint=container["command"],
            name=name,
            hostname=name,
            user=f"{context['runAsUser']}:{context['runAsGroup']}",
            group_add=[context["fsGroup"]],
            working_dir=container["workingDir"],
            environment={variable["name"]: variable["value"] for variable in container["env"]}
            | (OPERATORS if spec is self.layout.launcher else {}),
            cap_drop=container["securityContext"]["capabilities"]["drop"],
            security_opt=["no-new-privileges:true"],
            volumes=binds,
            shm_size=shared,
            network=self.network.name,
            networking_config={str(self.network.name): EndpointConfig("1.44", aliases=aliases)},
        )
        self.containers.append(made)
        made.start()
        return made

    def _projected(self, volume: Manifest) -> Path:
        """Write the files of a ConfigMap or a Secret, unless they exist; return their folder."""
        folder = self.directory / str(volume["name"])
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        if "secret" in volume:
            content = self.objects["Secret"]["stringData"]
            items = [{"key": key, "path": key} for key in content]
        else:
            content, items = self.objects["ConfigMap"]["data"], volume["configMap"]["items"]
        for item in items:
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content[item["key"]])
            path.chmod(item.get("mode", 0o644))
        self._chown(folder)
        return folder


@contextlib.contextmanager
def laid_out(engine: DockerClient, manifests: list[Manifest], directory: Path) -> Iterator[Pods]:
    """Yield the pods of a job, not yet started; remove them afterwards."""
    pods = Pods(engine, manifests, directory)
    try:
        yield pods
    finally:
        pods.remove()
