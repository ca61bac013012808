"""What every backend does for a lab: asked of it directly, and through the flows that people use.

Docker's engine and the one in memory, a cluster and one in memory.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pytest
from support.fake_backend import Failed, FakeBackend, healthy
from support.harness import WORKLOADS, Lab, wait_until
from support.sites import NODES, ClusterInMemory, ClusterSite, DockerSite, Site, name_of, node_of, nodes_of

from labctl import flows, naming
from labctl.backends.docker.lab import cluster
from labctl.backends.state import ObservedState
from labctl.backends.status import LabStatus
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.jobs.request import RunOptions
from labctl.model import Result

DOCKER = pytest.param("docker", marks=pytest.mark.docker)
CLUSTER = pytest.param(
    "cluster", marks=[pytest.mark.docker, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
)
RUNNING = ["fake", DOCKER, CLUSTER]
"""Where workloads run to their end."""
REAL = [DOCKER, CLUSTER]
"""Where programs are run."""


def programs(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """What the programs of this contract print, as they would in a node."""
    yield from healthy(container, argv)
    if argv[0] == "echo":
        yield " ".join(argv[1:])
    elif argv[0] == "false":
        raise Failed(1)
    elif "mpirun" in argv:
        for rank in range(2):
            yield f"\x01{rank}!\x02labctl: rank {rank} of 2 on worker-{rank}"
        yield "answer 42"


@pytest.fixture(params=["fake", "cluster in memory", DOCKER, CLUSTER])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A lab of two nodes on each backend: on Docker a lent one, which is up, elsewhere one that is down."""
    if request.param in ("docker", "cluster"):
        made: Callable[[], Lab] = request.getfixturevalue("lend" if request.param == "docker" else "cluster_lab")
        lab = made()
        context = Context(directory=lab.path, environ=lab.environ, emit=lambda _: None, flags={})
        if request.param == "docker":
            return DockerSite(context)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", lab.environ["KUBECONFIG"])
        return ClusterSite(context)
    flows.init(tmp_path)
    shutil.copytree(WORKLOADS, tmp_path / "workloads", dirs_exist_ok=True)
    settings = ["LAB_NAME=demo", "LAB_ACCELERATOR=cpu", f"HOST_CACHE_PATH={tmp_path}"]
    in_memory = request.param == "cluster in memory"
    (tmp_path / ".env").write_text("\n".join([*settings, *["LAB_ENGINE=kubernetes"][: int(in_memory)], ""]))
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    if in_memory:
        api = ClusterInMemory(programs)
        monkeypatch.setattr("labctl.backends.kubernetes.lab.Api", lambda *_: api)
        return ClusterSite(context)
    fake = FakeBackend(answer=programs, seen=ObservedState(image="sha256:fake"))
    monkeypatch.setattr(cluster, "backend_here", lambda _: fake)
    return DockerSite(context)


def states(status: object) -> tuple[str, list[str]]:
    assert isinstance(status, LabStatus)
    return status.state, [node.name for node in status.nodes if node.state == "running"]


def test_a_lab_comes_up_once_and_goes_down_whole(site: Site) -> None:
    flows.down(site.context)
    assert states(flows.status(site.context)) == ("down", [])
    site.begin()
    assert states(flows.status(site.context)) == ("up", NODES)
    before = [one.id for one in nodes_of(site)]
    site.engine.apply(*site.described)
    assert [one.id for one in nodes_of(site)] == before

    flows.down(site.context)
    assert states(flows.status(site.context)) == ("down", [])
    left = site.engine.observe(name_of(site))
    assert (left.containers, left.networks) == ((), ())
    flows.down(site.context)


@pytest.mark.parametrize("site", RUNNING, indirect=True)
def test_a_workload_passes_and_is_listed(site: Site) -> None:
    with contextlib.ExitStack() as after:
        if isinstance(site, DockerSite):
            site.begin()
        else:
            after.callback(flows.down, site.context)
        result = flows.run(site.context, "hello", RunOptions())
        assert isinstance(result, Result)
        assert (result.verdict, result.world_size) == ("PASS", 2)
        assert dict(result.metrics)["answer"]["value"] == 42
        assert (result.run_id, "done") in [(run.run_id, run.state) for run in flows.status(site.context).runs]


def test_a_container_that_is_removed_is_gone_and_made_again(site: Site) -> None:
    site.begin()
    removed = node_of(site, "worker-1").id
    site.engine.remove(site.engine.hosts[0], "container", (removed,))
    wait_until(lambda: removed not in [one.id for one in nodes_of(site)], 60, "it is gone")
    # One that is gone already is fine.
    site.engine.remove(site.engine.hosts[0], "container", (removed,))
    site.begin()
    assert [one.node for one in nodes_of(site)] == NODES


@pytest.mark.parametrize("site", ["cluster in memory", *REAL], indirect=True)
def test_a_container_that_is_lost_is_reported(site: Site) -> None:
    site.begin()
    events = site.engine.events(name_of(site))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, events)

        def lose_one() -> bool:
            """Again where it was lost before anybody listened."""
            site.begin()
            site.engine.remove(site.engine.hosts[0], "container", (node_of(site, "worker-1").id,))
            return bool(wait_for([first], 5).done)

        wait_until(lose_one, 60, "a loss is reported")
    node, cause, said = first.result()
    assert (node, cause) == ("worker-1", "node-lost"), said


def test_programs_and_logs_are_those_of_the_node_that_is_named(site: Site) -> None:
    site.begin()
    node, name = node_of(site, "worker-1"), name_of(site)
    assert site.engine.exec(node.name, ("echo", "x"), user=node.user).out == "x\n"
    assert site.engine.exec(node.name, ("false",), user=node.user).code == 1
    heard: list[str] = []
    assert site.engine.stream(node.name, ("echo", "y"), heard.extend, user=node.user, limit=20) == 0
    assert site.engine.attach(node.name, ("echo", "z"), user=node.user, workdir=None, on_line=heard.append) == 0
    assert site.engine.attach(node.name, ("false",), user=node.user, workdir=None, on_line=heard.append) == 1
    assert heard == ["y", "z"]
    logged: list[str] = []
    site.engine.logs(naming.project_name(name), logged.append, node="worker-1")
    assert {line.split()[0].removesuffix("-1") for line in logged} <= {"worker", "worker-1"}
    assert logged
    assert not [line for line in logged if "\x01" in line], "marks of ranks are labctl's own"


@pytest.mark.parametrize("site", REAL, indirect=True)
def test_programs_have_what_they_are_given_and_end_with_their_time(site: Site) -> None:
    site.begin()
    node = node_of(site, "worker-1")
    look = ("sh", "-c", 'echo "$X $PWD"; echo wrong >&2; hostname; exit 9')
    heard: list[str] = []
    given: dict[str, Any] = {"user": node.user, "workdir": "/usr", "on_line": heard.append}
    assert site.engine.attach(node.name, look, environment=("X=a b",), **given) == 9
    assert {"a b /usr", "wrong"} < {*heard}
    assert any(line.endswith("worker-1") for line in heard)
    done = site.engine.exec(node.name, look, user=node.user, workdir="/usr")
    assert (done.code, done.err) == (9, "wrong\n")
    heard.clear()
    user = node.user
    assert site.engine.stream(node.name, look, heard.extend, user=user, environment=(("X", "c"),), limit=20) == 9
    assert any(line.startswith("c ") for line in heard)
    with pytest.raises(HostError):
        site.engine.exec(node.name, ("sleep", "4"), user=user, limit=1)
    with pytest.raises(HostError):
        site.engine.stream(node.name, ("sleep", "4"), heard.extend, user=user, limit=1)


def test_what_an_engine_says_of_itself_is_the_same_twice(site: Site) -> None:
    engine, name = site.engine, name_of(site)
    first, second = engine.capabilities(engine.hosts[0]), engine.capabilities(engine.hosts[0])
    assert (first.identity(), first.versions()) == (second.identity(), second.versions())
    assert first.identity()
    image = site.context.settings().text("LAB_IMAGE") or "labctl/cpu"
    # What limits a pod has is its node's to say.
    assert first.grants(name, image, (("nofile", 1024),)) is isinstance(site, DockerSite)
