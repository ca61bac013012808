"""The contract of engines of Docker hosts: the real one and the in-memory one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pytest
from support.fake_backend import Failed, FakeBackend, healthy
from support.harness import WORKLOADS, Lab, wait_until

from labctl import flows, naming
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.lab import cluster
from labctl.backends.state import Container, ObservedState
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import HERE
from labctl.system.process import Input

NODES = ["launcher", "worker-0", "worker-1"]
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
REAL = [DOCKER]
"""Engines that run programs."""


def programs(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """Answer programs run in a container: echo, false with code 1, else as a healthy agent does."""
    yield from healthy(container, argv)
    if argv[0] == "echo":
        yield " ".join(argv[1:])
    elif argv[0] == "false":
        raise Failed(1)


class EngineLab:
    """A lab of two nodes, and its engine."""

    def __init__(self, context: Context) -> None:
        self.context, self.name = context, context.settings().text("LAB_NAME")

    @property
    def engine(self) -> Engine:
        """Return a new client of the engine of this host, with a limit of 20 seconds."""
        return cluster.backend_here(20)

    def nodes(self) -> list[Container]:
        """Return the lab's running containers, sorted by node name."""
        containers = self.engine.observe(self.name).containers
        running = [container for container in containers if container.state == "running"]
        return sorted(running, key=lambda container: container.node)

    def node(self, name: str) -> Container:
        """Observe the engine and return a node's container; fail if it has none."""
        container = self.engine.observe(self.name, node=name).container(name)
        assert container
        return container

    def lose(self, name: str) -> None:
        """Remove a node's container through the engine of this host."""
        self.engine.remove(HERE, "container", (self.node(name).id,))


@pytest.fixture(params=["fake", DOCKER])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineLab:
    """Bring up a lab of two nodes, a shared one on Docker or a new one on an in-memory engine; return it."""
    if request.param == "docker":
        lent: Lab = request.getfixturevalue("lend")()
        made = EngineLab(Context(directory=lent.path, environ=lent.environ, emit=lambda _: None, flags={}))
    else:
        flows.init(tmp_path)
        shutil.copytree(WORKLOADS, tmp_path / "workloads", dirs_exist_ok=True)
        (tmp_path / ".env").write_text(f"LAB_NAME=demo\nLAB_ACCELERATOR=cpu\nHOST_CACHE_PATH={tmp_path}\n")
        fake = FakeBackend(answer=programs, seen=ObservedState(image="sha256:fake"))
        monkeypatch.setattr(cluster, "backend_here", lambda _: fake)
        made = EngineLab(Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={}))
    flows.up(made.context)
    return made


def test_what_is_applied_twice_is_made_once_and_all_of_it_can_be_removed(lab: EngineLab) -> None:
    """A second apply() of the compose files keeps the containers; `down` leaves no container and no network."""
    before = [container.id for container in lab.nodes()]
    # The launcher is in the first worker's file.
    files = tuple(lab.context.directory / naming.compose_path(name) for name in NODES[1:])
    lab.engine.apply(HERE, naming.project_name(lab.name), files)
    assert [container.id for container in lab.nodes()] == before
    flows.down(lab.context)
    left = lab.engine.observe(lab.name)
    assert (left.containers, left.networks) == ((), ())


def test_a_container_that_is_removed_is_gone_and_made_again(lab: EngineLab) -> None:
    """A removed container is not observed, removing it twice raises nothing, and `up` makes a new one."""
    removed = lab.node("worker-1").id
    lab.engine.remove(HERE, "container", (removed,))
    wait_until(lambda: removed not in [container.id for container in lab.nodes()], 60, "it is gone")
    # A container that is gone already is fine.
    lab.engine.remove(HERE, "container", (removed,))
    flows.up(lab.context)
    assert [container.node for container in lab.nodes()] == NODES


@pytest.mark.parametrize("lab", REAL, indirect=True)
def test_a_container_that_is_lost_is_reported(lab: EngineLab) -> None:
    """Removing worker-1's container yields the event (`worker-1`, `node-lost`)."""
    events = lab.engine.events(lab.name)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, events)

        def lose() -> bool:
            """Bring the lab up and remove worker-1; return True if the loss is reported within 5 seconds."""
            flows.up(lab.context)
            lab.lose("worker-1")
            return bool(wait_for([first], 5).done)

        wait_until(lose, 60, "a loss is reported")
    node, cause, message = first.result()
    assert (node, cause) == ("worker-1", "node-lost"), message


def test_programs_and_logs_are_those_of_the_container_that_is_named(lab: EngineLab) -> None:
    """exec(), stream() and attach() return worker-1's output and exit codes; logs() has lines of it alone."""
    engine, node = lab.engine, lab.node("worker-1")
    assert engine.exec(node.name, ("echo", "x"), user=node.user).out == "x\n"
    assert engine.exec(node.name, ("false",), user=node.user).code == 1
    heard: list[str] = []
    assert engine.stream(node.name, ("echo", "y"), heard.extend, user=node.user, limit=60) == 0
    assert engine.attach(node.name, ("echo", "z"), user=node.user, workdir=None, on_line=heard.append) == 0
    assert engine.attach(node.name, ("false",), user=node.user, workdir=None, on_line=heard.append) == 1
    assert heard == ["y", "z"]
    logged: list[str] = []
    engine.logs(naming.project_name(lab.name), logged.append, node="worker-1")
    assert {line.split()[0] for line in logged} == {"worker-1-1"}


@pytest.mark.parametrize("lab", REAL, indirect=True)
def test_programs_have_what_they_are_given_and_end_with_their_time(lab: EngineLab) -> None:
    """A program gets the variables, directory and user given; past its limit exec() and stream() raise HostError."""
    engine, node = lab.engine, lab.node("worker-1")
    look = ("sh", "-c", 'echo "$X $PWD"; echo wrong >&2; hostname; exit 9')
    heard: list[str] = []
    given: dict[str, Any] = {"user": node.user, "workdir": "/usr", "on_line": heard.append}
    assert engine.attach(node.name, look, environment=("X=a b",), **given) == 9
    assert {"a b /usr", "wrong", "worker-1"} == {*heard}
    done = engine.exec(node.name, look, user=node.user, workdir="/usr")
    assert (done.code, done.err) == (9, "wrong\n")
    heard.clear()
    user = node.user
    assert engine.stream(node.name, look, heard.extend, user=user, environment=(("X", "c"),), limit=60) == 9
    assert any(line.startswith("c ") for line in heard)
    with pytest.raises(HostError):
        engine.exec(node.name, ("sleep", "4"), user=user, limit=1)
    with pytest.raises(HostError):
        engine.stream(node.name, ("sleep", "4"), heard.extend, user=user, limit=1)


@pytest.mark.parametrize("lab", REAL, indirect=True)
def test_a_program_hears_what_is_typed_before_and_after_it_starts_until_that_is_closed(lab: EngineLab) -> None:
    """`cat` prints `early`, typed before its start, and `late`, typed after; it ends when input is closed."""
    engine, node, typed, heard = lab.engine, lab.node("worker-1"), Input(), list[str]()
    typed.write("early")

    def hear(lines: Sequence[str]) -> None:
        """Collect the lines that are not empty; after the first one, type `late` and close the input."""
        heard.extend(filter(None, lines))
        if len(heard) == 1:
            typed.write("late")
            typed.close()

    assert engine.stream(node.name, ("cat",), hear, user=node.user, limit=60, typed=typed) == 0
    assert heard == ["early", "late"]


def test_what_an_engine_says_of_itself_is_the_same_twice(lab: EngineLab) -> None:
    """Two calls of capabilities() have the same identity and versions, and grant a test's ulimit for the image."""
    first, second = lab.engine.capabilities(HERE), lab.engine.capabilities(HERE)
    assert (first.identity(), first.versions()) == (second.identity(), second.versions())
    assert first.identity()
    image = lab.context.settings().text("LAB_IMAGE") or "labctl/cpu"
    assert first.grants(lab.name, image, (("nofile", 1024),))
