"""The same lab of a launcher and two workers on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import yaml

from labctl import flows, naming
from labctl.backends.docker.engine import Backend
from labctl.backends.docker.lab import cluster
from labctl.backends.kubernetes import lab as cluster_lab
from labctl.backends.kubernetes.api import ENGINE, MARKED, OUT, KubernetesEngine, Manifest
from labctl.backends.state import Container
from labctl.config.context import Context
from labctl.jobs.request import RunOptions
from labctl.model import HERE
from support.api_server import SUCCESS, failure
from support.clusters import node
from support.fake_backend import Answer, Failed
from support.harness import wait_until
from support.running import RunningApi, runs

NODES = ["launcher", "worker-0", "worker-1"]


class Site(Protocol):
    """Where the lab of a directory is."""

    context: Context

    @property
    def engine(self) -> Backend: ...

    @property
    def described(self) -> tuple[str, str, tuple[Path, ...]]:
        """Host, project and files, as ``Backend.apply`` takes them."""

    def begin(self) -> None:
        """Have all nodes run, whatever there is of them."""


def name_of(site: Site) -> str:
    return site.context.settings().text("LAB_NAME")


def nodes_of(site: Site) -> list[Container]:
    """The lab's nodes that run, by name."""
    found = site.engine.observe(name_of(site)).containers
    return sorted((one for one in found if one.state == "running"), key=lambda one: one.node)


def node_of(site: Site, name: str) -> Container:
    """A node that runs, with its user."""
    found = site.engine.observe(name_of(site), node=name).container(name)
    assert found
    return found


class DockerSite:
    """On an engine of Docker's, the one in memory too."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    def engine(self) -> Backend:
        return cluster.backend_here(20)

    @property
    def described(self) -> tuple[str, str, tuple[Path, ...]]:
        # The launcher is in the first worker's file.
        files = tuple(self.context.directory / naming.compose_path(one) for one in NODES[1:])
        return HERE, naming.project_name(name_of(self)), files

    def begin(self) -> None:
        flows.up(self.context)


class ClusterSite:
    """In a cluster, as a job that nobody follows."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    def engine(self) -> KubernetesEngine:
        return cluster_lab.open_lab(self.context, self.context.settings()).engine

    @property
    def described(self) -> tuple[str, str, tuple[Path, ...]]:
        path = self.context.directory / "job.yaml"
        rendered = yaml.safe_load_all(flows.k8s_render(self.context, "stubborn", RunOptions()).yaml)
        # The namespace is the tests'.
        path.write_text(yaml.safe_dump_all([one for one in rendered if one["kind"] != "Namespace"]))
        return ENGINE, "", (path,)

    def begin(self) -> None:
        self.engine.apply(*self.described)
        wait_until(lambda: [one.node for one in nodes_of(self)] == NODES, 120, "the job's pods run")


class ClusterInMemory(RunningApi):
    """Its operator has an MPIJob's pods run as soon as it is there, and makes one that is removed again."""

    def __init__(self, answer: Answer) -> None:
        namespace: Manifest = {"kind": "Namespace", "metadata": {"name": "demo"}}
        system: Manifest = {"kind": "Namespace", "metadata": {"name": "kube-system", "uid": "of-the-cluster"}}
        super().__init__(namespace, system, node())
        self._answers = answer
        self.programs = self._run
        self._made = 0

    def _answer(self, method: str, path: str, body: Manifest | None, **options: Any) -> Manifest | None:
        answer = super()._answer(method, path, body, **options)
        for job in [one for (kind, _), one in self.objects.items() if kind == "MPIJob"]:
            self._operate(job)
        return answer

    def _operate(self, job: Manifest) -> None:
        name = job["metadata"]["name"]
        for role, of in job["spec"]["mpiReplicaSpecs"].items():
            one = role.lower()
            names = [f"{one}-{index}" for index in range(of["replicas"])] if one == "worker" else [one]
            for pod in [f"{name}-{end}" for end in names if ("Pod", f"{name}-{end}") not in self.objects]:
                self._made += 1
                labels = of["template"]["metadata"]["labels"]
                made = {"creationTimestamp": "2026-01-02T03:04:00Z", "uid": f"pod-{self._made}"}
                spec = {**of["template"]["spec"], "nodeName": "n0"}
                metadata = {"name": pod, "labels": labels, **made}
                self.put({"kind": "Pod", "metadata": metadata, "spec": spec, "status": runs()})
                self.printed[pod] = []
                self.prints(pod, "\x017\x02it listens")

    def _run(self, pod: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        try:
            lines = [*self._answers(pod, argv[5:] if argv[:3] == ("sh", "-c", MARKED) else argv)]
        except Failed as failed:
            return (failure(failed.code),)
        return (*((OUT, f"{line}\n".encode()) for line in lines), SUCCESS)
