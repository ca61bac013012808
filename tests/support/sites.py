"""A lab of a launcher and two workers on each backend; a site's methods cover the differences between backends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from labctl import flows
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.lab import cluster
from labctl.backends.kubernetes import lab as cluster_lab
from labctl.backends.kubernetes.api import MARKED, OUT, Manifest
from labctl.backends.kubernetes.lab import STOP
from labctl.backends.kubernetes.render import named_hosts
from labctl.config.context import Context
from labctl.jobs.request import RunOptions
from support import made_up_backend
from support.api_server import SUCCESS, failure
from support.clusters import node
from support.fake_backend import Answer, Failed
from support.harness import wait_until
from support.running import MARK, RunningApi, runs, without_results

NODES = ["launcher", "worker-0", "worker-1"]


class Lasts(Exception):
    """Exception of an answer whose program does not end by itself."""


class Site(Protocol):
    """A lab directory on a backend."""

    context: Context

    def prepare(self) -> None:
        """Set up what a run needs to begin."""

    def begin(self) -> None:
        """Bring all nodes up, whatever their state."""

    def identities(self) -> dict[str, object]:
        """Return the identity of each node, which changes if the node is recreated or restarted."""

    def lose(self) -> None:
        """Remove all nodes and their processes, without labctl."""


class MadeUpSite:
    """The made-up backend."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def prepare(self) -> None:
        flows.up(self.context)

    begin = prepare

    def identities(self) -> dict[str, object]:
        """Return the inode and change time of each node's directory."""
        nodes = self.context.directory / made_up_backend.NODES
        return {path.name: (path.stat().st_ino, path.stat().st_ctime_ns) for path in nodes.iterdir()}

    def lose(self) -> None:
        made_up_backend.lose_nodes(self.context.directory)


class DockerSite:
    """Docker engines: local, over ssh, or in memory."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def prepare(self) -> None:
        flows.up(self.context)

    begin = prepare

    def identities(self) -> dict[str, object]:
        """Return the container's id of each node."""
        with self._engine() as engine:
            return {container.node: container.id for container in engine.observe(self._name).containers}

    def lose(self) -> None:
        """Remove the lab's containers by the engine."""
        with self._engine() as engine:
            for container in engine.observe(self._name).containers:
                engine.remove(container.host, "container", (container.id,))

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        """Connect to the lab's hosts; provide their engine."""
        with cluster.connect(self.context, self.context.settings()) as hosts:
            yield hosts.engine

    @property
    def _name(self) -> str:
        return self.context.settings().text("LAB_NAME")


class ClusterSite:
    """A cluster, in which a run brings its nodes."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def prepare(self) -> None:
        """Do nothing: a run brings its nodes."""

    def begin(self) -> None:
        """Submit the workload `stubborn` and wait until its three pods run."""
        flows.k8s_submit(self.context, "stubborn", RunOptions())
        wait_until(lambda: self._states() == dict.fromkeys(NODES, "running"), 120, "the job's pods run")

    def _states(self) -> dict[str, str]:
        """Return the state of each node, as `labctl status` has it."""
        return {node.name: node.state for node in flows.status(self.context).nodes}

    def identities(self) -> dict[str, object]:
        """Return the pod's id of each node."""
        lab = cluster_lab.open_lab(self.context, self.context.settings())
        return {container.node: container.id for container in lab.engine.observe(lab.name).containers}

    def lose(self) -> None:
        """Delete the lab's jobs."""
        lab = cluster_lab.open_lab(self.context, self.context.settings())
        for job in cluster_lab.jobs(lab):
            lab.api.delete(job["kind"], job["metadata"]["name"])


class ClusterInMemory(RunningApi):
    """A cluster whose operator starts the pods of an MPIJob at once; the launcher prints all of its output at once."""

    def __init__(self, answer: Answer, nodes: Iterable[str] = ("n0",)) -> None:
        """Hold these nodes; programs in pods answer by ``answer``."""
        namespace: Manifest = {"kind": "Namespace", "metadata": {"name": "demo"}}
        super().__init__(namespace, *map(node, nodes))
        self._answers = answer
        self.programs = self._run
        self._made = 0

    def _answer(self, method: str, path: str, body: Manifest | None, **options: Any) -> Manifest | None:
        """Answer a request, then create missing pods of MPIJobs and remove those of deleted jobs."""
        answer = super()._answer(method, path, body, **options)
        jobs = [manifest for (kind, _), manifest in self.objects.items() if kind == "MPIJob"]
        for job in jobs:
            self._operate(job)
        self._collect_garbage({job["metadata"]["name"] for job in jobs})
        return answer

    def _collect_garbage(self, jobs: Iterable[str]) -> None:
        """Remove the pods of deleted jobs."""
        owners = {key: pod["metadata"].get("owner") for key, pod in self.objects.items() if key[0] == "Pod"}
        for key, owner in owners.items():
            if owner and owner not in jobs:
                del self.objects[key]

    def _operate(self, job: Manifest) -> None:
        """Create the missing pods of an MPIJob, on the hosts that it names."""
        name = job["metadata"]["name"]
        for replica, spec in job["spec"]["mpiReplicaSpecs"].items():
            role = replica.lower()
            names = [f"{role}-{index}" for index in range(spec["replicas"])] if role == "worker" else [role]
            hosts = named_hosts([job]) if role == "worker" else ()
            for end, host in zip(names, hosts or ["n0"] * len(names), strict=True):
                if ("Pod", f"{name}-{end}") not in self.objects:
                    self._make(f"{name}-{end}", name, role, spec["template"], host)

    def nodes_of(self, run: str) -> tuple[str, ...]:
        """Return the nodes that a run's workers are required on."""
        jobs = [manifest for (kind, _), manifest in self.objects.items() if kind == "MPIJob"]
        return named_hosts(job for job in jobs if job["metadata"]["labels"].get("labctl.run") == run)

    def _respond(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Any:
        """Answer a request; one that follows a log streams it until the launch ends or the pod is gone."""
        if path.endswith("/log") and options.get("follow"):
            super()._respond(method, path, body, **options)
            return SimpleNamespace(stream=lambda _: self._follow(path.split("/")[-2]), close=lambda: None)
        return super()._respond(method, path, body, **options)

    def _follow(self, pod: str) -> Iterator[bytes]:
        """Yield the lines of a pod until its launch command has ended, or it is gone."""
        read, ended = 0, False
        while not ended:
            ended = ("Pod", pod) not in self.objects
            for line in self.printed[pod][read:]:
                read += 1
                ended |= MARK in line
                yield f"{line}\n".encode()
            time.sleep(0.01)

    def _make(self, pod: str, job: str, role: str, template: Manifest, host: str) -> None:
        """Create a running pod; a launcher's pod also launches its run."""
        self._made += 1
        labels = template["metadata"]["labels"]
        made = {"creationTimestamp": "2026-01-02T03:04:00Z", "uid": f"pod-{self._made}", "owner": job}
        spec = {**template["spec"], "nodeName": host}
        self.put({
            "kind": "Pod",
            "metadata": {"name": pod, "labels": labels, **made},
            "spec": spec,
            "status": runs(),
        })  # fmt: skip
        self.printed[pod] = []
        self.prints(pod, "\x017\x02it listens")
        if role == "launcher":
            self._launch(pod, labels.get("labctl.run", job))

    def _launch(self, pod: str, run: str) -> None:
        """Append the output of a run's launch command to the pod's log, then its exit code unless it never ends."""
        code = 0
        try:
            for line in self._answers(pod, ("mpirun", run)):
                # Ranks print the name of their pod.
                self.prints(pod, line.replace(" on worker-", f" on {pod.removesuffix('launcher')}worker-"))
        except Failed as failed:
            code = failed.code
        except Lasts:
            return
        self.prints(pod, f"{MARK}{code}")

    def _run(self, pod: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        """Return the output frames of a program in a pod; STOP ends its run, and there are no results to fetch."""
        if STOP in argv:
            self.prints(pod, f"{MARK}143; {argv[-1]}")
            return (SUCCESS,)
        if "tar -C" in " ".join(argv):
            return without_results(pod, argv)
        try:
            lines = [*self._answers(pod, argv[5:] if argv[:3] == ("sh", "-c", MARKED) else argv)]
        except Failed as failed:
            return (failure(failed.code),)
        return (*((OUT, f"{line}\n".encode()) for line in lines), SUCCESS)
