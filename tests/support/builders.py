"""Small labs, hosts, workloads, jobs and containers for tests; every field can be given, the rest is sensible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from labctl import model, naming
from labctl.compose import render
from labctl.config.context import Context
from labctl.deploy import plan
from labctl.deploy.executor import LabDeployment
from labctl.engines import Daemon
from labctl.engines.state import Container, ObservedState
from labctl.hosts import facts as survey
from labctl.lab.cluster import Cluster
from labctl.model import Cause, Device, DeviceMapping, Event, File, Host, Job, Lab, Limits, Mount, Node, Pairs, Workload
from labctl.runs import job as jobs
from labctl.system.process import CompletedProcess

DIRECTORY = Path("/srv/lab")
IMAGE_ID = "sha256:1111"


def host(**changes: Any) -> Host:
    return replace(Host(name="local", cpus=(0, 1, 2, 3), memory=8 << 30, mtu=1500, uid=1000, gid=1000), **changes)


def facts(**changes: Any) -> survey.HostFacts:
    """What the second host of two told as its connection was opened."""
    plain = survey.HostFacts(
        user="ann",
        uid=1000,
        home="/home/ann",
        skew=0.0,
        home_free=1 << 40,
        ports={},
    )
    return replace(plain, **changes)


def devices(*names: str) -> tuple[Device, ...]:
    """Devices by their ids, or by their paths."""
    return tuple(Device(id=name, path=name if name.startswith("/") else f"/dev/x{name}") for name in names)


def node(index: int = 0, **changes: Any) -> Node:
    mapping = DeviceMapping(environment=(("DS_ACCELERATOR", "cpu"),))
    return replace(Node(name=f"worker-{index}", host="local", slots=1, devices=mapping), **changes)


def lab(nodes: int | tuple[Node, ...] = 2, **changes: Any) -> Lab:
    """A CPU lab with so many nodes, or with these."""
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
        mounts=(Mount(source="/srv/lab/runs", target="/workspace/runs"),),
        environment=(("PROJECT_PATH", "/workspace"),),
    )
    return replace(base, **changes)


def workload(**changes: Any) -> Workload:
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
    **changes: Any,
) -> Job:
    """A run of the workload, changed so, on the lab."""
    of = of or lab()
    return jobs.build(of, workload(**changes), run_id, jobs.choose(of, entries), timeout)


def container(name: str, /, **changes: Any) -> Container:
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
    """The lab as it is once it is up; ``worker_0={...}`` changes that container."""
    content = {file.path: file.content for file in render.render(of)}
    owners = {model.LAUNCHER: of.nodes[0].name, **{one.name: one.name for one in of.nodes}}
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


def up(of: Lab, seen: ObservedState, changed: tuple[File, ...] = ()) -> str:
    """The text of the plan that brings the lab up."""
    local = (plan.WriteFiles(files=changed, cause="new or changed"),) if changed else ()
    return str(plan.up(of, render.render(of), seen, local=local))


class Failed(Exception):
    """Raised by an answer: the program ends with this code."""

    def __init__(self, code: int, err: str = "") -> None:
        super().__init__(code)
        self.code, self.err = code, err


Answer = Callable[[str, tuple[str, ...]], Iterator[str]]
"""Container and command -> the lines that the program prints."""


def silent(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """A program that prints nothing and ends well."""
    yield from ()


@dataclass
class FakeEngine:
    """An engine in memory: ``answer`` is what programs print, ``dead`` the containers that are gone."""

    answer: Answer = silent
    seen: ObservedState = field(default_factory=ObservedState)
    dead: tuple[str, ...] = ()
    fallen: tuple[tuple[str, Cause, str], ...] = ()
    """What ``losses`` reports, once a program runs."""
    started: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    done: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    observations: int = 0
    """How often ``observe`` was called."""
    running: threading.Event = field(default_factory=threading.Event)

    connection = None
    docker = ("docker",)

    def information(self) -> dict[str, Any]:
        return {}

    def identity(self) -> str:
        return "fake"

    def image_id(self, image: str) -> str | None:  # noqa: ARG002
        return self.seen.image

    def image_labels(self, image: str) -> dict[str, str]:  # noqa: ARG002
        return {}

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:  # noqa: ARG002
        return True

    @property
    def hosts(self) -> tuple[str, ...]:
        return ("local",)

    def on(self, host: str) -> Daemon:  # noqa: ARG002
        return cast(Daemon, self)

    def versions(self) -> dict[str, str]:
        return {"engine": "0", "api": "0", "kernel": "0"}

    def observe(self, lab: str, image: str | None = None) -> ObservedState:  # noqa: ARG002
        self.observations += 1
        return self.seen

    def compose_up(self, project: str, files: tuple[Path, ...]) -> None:
        self.done.append(("compose_up", (project, *files)))

    def remove(self, containers: tuple[str, ...]) -> None:
        self.done.append(("remove", containers))

    def remove_networks(self, networks: tuple[str, ...]) -> None:
        self.done.append(("remove_networks", networks))

    def remove_image(self, image: str) -> None:
        self.done.append(("remove_image", (image,)))

    def call(self, container: str, argv: tuple[str, ...], *, user: str, limit: float = 0) -> CompletedProcess:  # noqa: ARG002
        printed: list[str] = []
        code, err = self._execute(container, argv, printed.append, user=user)
        return CompletedProcess(argv, code, "".join(f"{line}\n" for line in printed), err)

    def follow(
        self,
        container: str,
        argv: tuple[str, ...],
        on_line: Callable[[str], None],
        *,
        user: str,
        workdir: str,
        environment: Pairs,
        limit: float,  # noqa: ARG002
    ) -> int:
        self.running.set()
        return self._execute(container, argv, on_line, user=user, workdir=workdir, environment=environment)[0]

    def _execute(
        self, container: str, argv: tuple[str, ...], on_line: Callable[[str], None], **options: Any
    ) -> tuple[int, str]:
        self.started.append((container, argv))
        self.options.append(options)
        if container in self.dead:
            return 1, f"Error response from daemon: No such container: {container}"
        try:
            for line in self.answer(container, argv):
                on_line(line)
        except Failed as failed:
            return failed.code, failed.err
        return 0, ""

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:  # noqa: ARG002
        return True

    def losses(self, lab: str) -> Iterator[tuple[str, Cause, str]]:  # noqa: ARG002
        self.running.wait(5)
        yield from self.fallen

    def reaped(self) -> list[str]:
        """The containers in which the run's processes were ended, in name order."""
        return sorted({container for container, argv in self.started if "reap" in argv})


def deployment(of: Lab, engine: FakeEngine, emit: Callable[[Event], None] = lambda _: None) -> LabDeployment:
    """What the steps of a plan for this lab act on."""
    context = Context(directory=of.directory, environ={"LAB_NAME": of.name}, emit=emit, flags={})
    return LabDeployment(context=context, cluster=site(context, engine), lab=of)


def site(context: Context, engine: FakeEngine | None = None) -> Cluster:
    """This machine as the site of the lab that a context says."""
    return Cluster(settings=context.settings(), directory=context.directory, engine=engine or FakeEngine())
