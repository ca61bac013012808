"""What every backend does for a lab, asked of it through the flows that people use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.fake_backend import Failed, FakeBackend, healthy
from support.harness import WORKLOADS, Lab

from labctl import flows, naming
from labctl.attach import session, target
from labctl.config.context import Context
from labctl.engines import Backend
from labctl.engines.state import ObservedState
from labctl.lab import cluster
from labctl.lab.status import LabStatus
from labctl.model import Result
from labctl.runs.request import RunOptions

NODES = ["launcher", "worker-0", "worker-1"]


def programs(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """What the programs of this contract print, as they would in a node."""
    yield from healthy(container, argv)
    if argv[0] == "echo":
        yield " ".join(argv[1:])
    elif argv[0] == "false":
        raise Failed(1)
    elif "deepspeed" in argv:
        for rank in range(2):
            yield f"labctl: rank {rank} of 2 on worker-{rank}"
        yield "answer 42"


@pytest.fixture(params=["fake", pytest.param("docker", marks=pytest.mark.docker)])
def context(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """A lab of two nodes that is down, on each backend."""
    if request.param == "docker":
        lab: Lab = cast(Callable[[], Lab], request.getfixturevalue("fresh_lab"))()
        yield Context(directory=lab.path, environ=lab.environ, emit=lambda _: None, flags={})
        return
    flows.init(tmp_path)
    shutil.copytree(WORKLOADS, tmp_path / "workloads", dirs_exist_ok=True)
    (tmp_path / ".env").write_text(f"LAB_NAME=demo\nLAB_ACCELERATOR=cpu\nHOST_CACHE_PATH={tmp_path}\n")
    fake = FakeBackend(answer=programs, seen=ObservedState(image="sha256:fake"))
    monkeypatch.setattr(cluster, "backend_here", lambda _: fake)
    yield Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})


def states(status: object) -> tuple[str, list[str]]:
    assert isinstance(status, LabStatus)
    return status.state, [node.name for node in status.nodes if node.state == "running"]


def printed(context: Context, node: str, *argv: str) -> tuple[int, list[str]]:
    """What `labctl exec` runs, and its lines."""
    lines: list[str] = []
    with target.entered(context, name_of(context), node) as inside:
        return session.run(inside, argv, on_line=lines.append), lines


def name_of(context: Context) -> str:
    return context.settings().text("LAB_NAME")


def backend(context: Context) -> Backend:
    return cluster.backend_here(20)


def test_a_lab_comes_up_once_runs_and_goes_down(context: Context) -> None:
    assert states(flows.status(context)) == ("down", [])
    assert states(flows.up(context)) == ("up", NODES)
    before = backend(context).observe(name_of(context)).containers
    assert states(flows.up(context)) == states(flows.status(context)) == ("up", NODES)
    assert [one.id for one in backend(context).observe(name_of(context)).containers] == [one.id for one in before]

    assert printed(context, "worker-1", "echo", "one", "two") == (0, ["one two"])
    assert printed(context, "launcher", "false") == (1, [])

    result = flows.run(context, "hello", RunOptions())
    assert isinstance(result, Result)
    assert (result.verdict, result.world_size) == ("PASS", 2)
    assert dict(result.metrics)["answer"]["value"] == 42
    assert [(one.run_id, one.state) for one in flows.status(context).runs] == [(result.run_id, "done")]

    flows.down(context)
    assert states(flows.status(context)) == ("down", [])
    left = backend(context).observe(name_of(context))
    assert (left.containers, left.networks) == ((), ())
    flows.down(context)


def test_a_container_that_is_removed_is_noticed_and_made_again(context: Context) -> None:
    flows.up(context)
    host = backend(context).hosts[0]
    seen = backend(context).observe(name_of(context)).container("worker-1")
    assert seen
    backend(context).remove(host, "container", (seen.id,))
    assert states(flows.status(context)) == ("partial", NODES[:2])
    assert states(flows.up(context)) == ("up", NODES)


def test_programs_and_logs_are_those_of_the_node_that_is_named(context: Context) -> None:
    flows.up(context)
    engine, container = backend(context), naming.container_of(name_of(context), "launcher")
    user = engine.observe(name_of(context), node="launcher").containers[0].user
    assert engine.exec(container, ("echo", "x"), user=user).out == "x\n"
    assert engine.exec(container, ("false",), user=user).code == 1
    heard: list[str] = []
    options: dict[str, Any] = {"user": user, "limit": 20}
    assert engine.stream(container, ("echo", "y"), heard.append, **options) == 0
    assert heard == ["y"]
    logged: list[str] = []
    engine.logs(naming.project_name(name_of(context)), logged.append, node="worker-1")
    assert {line.split()[0] for line in logged} == {"worker-1-1"}


def test_what_an_engine_says_of_itself_is_the_same_twice(context: Context) -> None:
    engine = backend(context)
    first, second = engine.capabilities(engine.hosts[0]), engine.capabilities(engine.hosts[0])
    assert (first.identity(), first.versions()) == (second.identity(), second.versions())
    assert first.grants(name_of(context), context.settings().text("LAB_IMAGE") or "labctl/cpu", (("nofile", 1024),))
