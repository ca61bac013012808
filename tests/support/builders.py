"""Small labs, hosts, workloads, jobs and containers; each field has a default that a test can replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl import model, naming
from labctl.backends.docker.backend import DockerBackend
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import plan
from labctl.backends.docker.deploy.steps import LabDeployment, WriteFiles
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import Container, ObservedState
from labctl.config.context import Context
from labctl.jobs import job as jobs
from labctl.model import (
    Copy,
    Device,
    DeviceMapping,
    Event,
    File,
    Host,
    Job,
    Lab,
    Limits,
    Metric,
    Mount,
    Node,
    Workload,
)  # fmt: skip
from labctl.records.lines import Line, line_of
from labctl.records.metrics import Sampler
from labctl.system import hostdump
from support.fake_backend import FakeBackend

DIRECTORY = Path("/srv/lab")
IMAGE_ID = "sha256:1111"


def host(**changes: Any) -> Host:
    """Build the host ``local`` with four cores and 8 GiB; ``changes`` replace fields."""
    return replace(Host(name="local", cpus=(0, 1, 2, 3), memory=8 << 30, mtu=1500, uid=1000, gid=1000), **changes)


def facts(**changes: Any) -> hostdump.HostFacts:
    """Build facts of a remote host with user ann, 1 TiB free and no port in use; ``changes`` replace fields."""
    plain = hostdump.HostFacts(
        user="ann",
        uid=1000,
        home="/home/ann",
        skew=0.0,
        home_free=1 << 40,
        ports={},
        listening={},
    )
    return replace(plain, **changes)


def devices(*names: str) -> tuple[Device, ...]:
    """Build a device per name: a path is its own id, an id ``0`` has the path ``/dev/x0``."""
    return tuple(Device(id=name, path=name if name.startswith("/") else f"/dev/x{name}") for name in names)


def node(index: int = 0, **changes: Any) -> Node:
    """Build node worker-INDEX on host ``local`` with one slot; ``changes`` replace fields."""
    mapping = DeviceMapping(environment=(("DS_ACCELERATOR", "cpu"),))
    return replace(Node(name=f"worker-{index}", host="local", slots=1, devices=mapping), **changes)


def lab(nodes: int | tuple[Node, ...] = 2, **changes: Any) -> Lab:
    """Build the CPU lab ``demo`` on one host, with this number of default nodes or with these nodes."""
    base = Lab(
        name="demo",
        directory=DIRECTORY,
        accelerator="cpu",
        image="labctl/cpu",
        nodes=tuple(node(index) for index in range(nodes)) if isinstance(nodes, int) else nodes,
        hosts=(host(),),
        ssh_port=12345,
        master_port=29500,
        shm_size="8g",
        limits=Limits(),
        memory=None,
        project_path="/workspace",
        mounts=(Mount(source="/srv/lab/runs", target="/workspace/runs", read_only=True),),
        environment=(("PROJECT_PATH", "/workspace"),),
    )
    return replace(base, **changes)


def workload(**changes: Any) -> Workload:
    """Build a workload `hello` with these changes."""
    base = Workload(
        name="hello",
        description="says hello",
        declared="workloads/hello/workload.yml:1",
        directory=DIRECTORY / "workloads/hello",
        launcher="deepspeed",
        script="hello.py",
        arguments=(),
        environment=(),
        timeout=60.0,
        metrics=(),
        criteria=(),
    )
    return replace(base, **changes)


def job(
    of: Lab | None = None,
    *,
    entries: tuple[tuple[str, int], ...] = (),
    run_id: str = "20260102-150405-hello-3fa2",
    timeout: float = 60.0,
    code: tuple[Copy, ...] = (),
    **changes: Any,
) -> Job:
    """Build a job of the default workload with ``changes``, on ``entries`` or all nodes of a lab, by default of two."""
    of = of or lab()
    return jobs.build(of, workload(**changes), run_id, jobs.choose(of, entries), timeout, code)


def container(name: str, /, **changes: Any) -> Container:
    """Build a running container of a node, or of the launcher by its name, with these changes."""
    launcher = name == model.LAUNCHER
    base = Container(
        id=f"id-{name}",
        name=f"labctl-demo-{name}-1",
        node=name,
        role="launcher" if launcher else "worker",
        slots=0 if launcher else 1,
        state="running",
        health=None if launcher else "healthy",
        fingerprint="",
        image=IMAGE_ID,
        directory=str(DIRECTORY),
    )
    return replace(base, **changes)


def observed(of: Lab, **changes: dict[str, Any]) -> ObservedState:
    """Build the observed state of a lab that is up; ``worker_0={...}`` changes the fields of that container."""
    content = {file.path: file.content for file in render.render(of)}
    owners = {model.LAUNCHER: of.nodes[0].name, **{member.name: member.name for member in of.nodes}}
    return ObservedState(
        containers=tuple(
            container(
                name,
                **{
                    "fingerprint": naming.fingerprint(content[naming.compose_path(owner)]),
                    **changes.get(name.replace("-", "_"), {}),
                },
            )
            for name, owner in owners.items()
        ),
        networks=(("id-network", "labctl-demo"),),
        image=IMAGE_ID,
    )


def printed(text: str, rank: int | None = None) -> Line:
    """Build a Line printed now: parsed if it has rank_output.py's mark, else the text after the last ``|``."""
    if "\x01" in text:
        return line_of(text, time.time())
    return Line(text.replace("|", "", 1), time.time(), rank, text.rpartition("|")[2])


def read_values(metrics: Iterable[Metric], lines: Iterable[str]) -> dict[str, list[float]]:
    """Sample these lines; return the values of each metric by name."""
    sampler = Sampler(metrics)
    for line in lines:
        sampler.read(line)
    return {name: [*values] for name, values in sampler.values.items()}


def up(of: Lab, seen: ObservedState, changed: tuple[File, ...] = ()) -> str:
    """Return the plan of `up` from the observed state ``seen``, as text; ``changed``: files to write."""
    local = (WriteFiles(files=changed, cause="new or changed"),) if changed else ()
    return str(plan.up(of, render.render(of), seen, local=local))


def deployment(of: Lab, engine: FakeBackend, emit: Callable[[Event], None] = lambda _: None) -> LabDeployment:
    """Build the LabDeployment of a lab on an in-memory engine, on which the steps of its plan act."""
    context = Context(directory=of.directory, environ={"LAB_NAME": of.name}, emit=emit, flags={})
    return LabDeployment(context=context, cluster=cluster_of(context, engine), lab=of)


def cluster_of(context: Context, engine: FakeBackend | None = None) -> Cluster:
    """Build the Docker cluster of a context: this machine only, by default with an in-memory engine."""
    return Cluster(settings=context.settings(), directory=context.directory, engine=engine or FakeBackend())


def backend(context: Context, cluster: Cluster) -> DockerBackend:
    """Build Docker's backend on an already connected cluster."""
    connected = DockerBackend(context, cluster.settings, ExitStack(), {})
    connected.cluster = cluster
    return connected
