from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import backend, container
from support.fake_backend import FakeBackend

from labctl.backends import spec
from labctl.backends.docker.daemon import container_of
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.docker.lab.status import status_of
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.backends.status import LabStatus, NodeStatus, RunState
from labctl.cli.lab import status_text
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import Event
from labctl.records.store import RunSummary
from labctl.runs import judge, labs


def test_nodes_are_in_their_order_also_where_a_host_does_not_answer(tmp_path: Path) -> None:
    """Nodes are sorted by number; the one planned on the silent host h1 is unreachable."""

    def daemon(host: str, *nodes: str) -> FakeBackend:
        """Return a fake engine of this host with these containers."""
        return FakeBackend(seen=ObservedState(host=host, containers=tuple(container(name) for name in nodes)))

    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    where = Cluster(
        settings=context.settings(),
        directory=tmp_path,
        engine=MultiHostEngine(
            {"h0": daemon("h0", "launcher", "worker-0"), "h2": daemon("h2", "worker-2", "worker-7")}, {}
        ),
        inventory=tuple(InventoryHost(name=name) for name in ("h0", "h1", "h2")),
        failed={"h1": HostError("h1: silent", node="h1")},
    )
    nodes = [(node.name, node.state == "unreachable") for node in status_of(context, where).nodes]
    assert nodes == [
        ("launcher", False),
        ("worker-0", False),
        ("worker-1", True),
        ("worker-2", False),
        ("worker-7", False),
    ]


def test_nodes_of_hosts_that_answer_are_missing_where_another_host_is_silent(tmp_path: Path) -> None:
    """Without containers and with h0 silent, the node of h1 is listed as missing beside those of h0."""
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    where = Cluster(
        settings=context.settings(),
        directory=tmp_path,
        engine=MultiHostEngine({"h1": FakeBackend(seen=ObservedState(host="h1"))}, {}),
        inventory=tuple(InventoryHost(name=name) for name in ("h0", "h1")),
        failed={"h0": HostError("h0: silent", node="h0")},
    )
    status = status_of(context, where)
    assert [(node.name, node.state) for node in status.nodes] == [
        ("launcher", "unreachable"), ("worker-0", "unreachable"), ("worker-1", "missing"),
    ]  # fmt: skip
    assert status.state == "unknown"


def test_a_lab_of_this_name_in_another_directory_is_shown_with_a_warning(tmp_path: Path) -> None:
    """A lab whose containers another directory made is listed, with a warning that names that directory."""
    remote, events = tmp_path / "there", list[Event]()
    remote.mkdir()
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=events.append, flags={})
    current = ObservedState(
        containers=tuple(container(name, directory=str(remote)) for name in ("launcher", "worker-0"))
    )
    where = Cluster(settings=context.settings(), directory=tmp_path, engine=FakeBackend(seen=current))
    assert [(node.name, node.state) for node in status_of(context, where).nodes] == [
        ("launcher", "running"), ("worker-0", "running"), ("worker-1", "missing"),
    ]  # fmt: skip
    assert [event.text for event in events] == [f"this machine has a lab of this name that is not yours: {remote}"]


def test_a_node_that_up_would_recreate_is_named_with_the_reason(tmp_path: Path) -> None:
    """A node without the lab's network has that as reason, and the lab is `partial`; with it the lab is `up`."""
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    cut_off = container("worker-1", network="labctl-demo", directory=str(tmp_path))
    containers = (*(container(node, directory=str(tmp_path)) for node in ("launcher", "worker-0")), cut_off)
    engine = FakeBackend(seen=ObservedState(containers=containers))
    status = status_of(context, Cluster(settings=context.settings(), directory=tmp_path, engine=engine))
    assert status.state == "partial"
    assert [node.reason for node in status.nodes] == ["", "", "not on network labctl-demo"]
    assert status_text(status).splitlines()[-1] == "worker-1: not on network labctl-demo"
    engine.seen = ObservedState(containers=(*containers[:2], replace(cut_off, networks=("labctl-demo",))))
    assert status_of(context, Cluster(settings=context.settings(), directory=tmp_path, engine=engine)).state == "up"


def test_a_node_that_was_paused_is_said_to_await_its_health_check(tmp_path: Path) -> None:
    """A running node that is unhealthy without a reason has one; a paused node, and one with a reason, keep theirs."""
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    changes: tuple[dict[str, Any], ...] = ({}, {"state": "paused"}, {"reason": "device lost"})
    containers = tuple(
        container(f"worker-{number}", directory=str(tmp_path), health="unhealthy", **change)
        for number, change in enumerate(changes)
    )
    engine = FakeBackend(seen=ObservedState(containers=containers))
    status = status_of(context, Cluster(settings=context.settings(), directory=tmp_path, engine=engine))
    reasons = [node.reason for node in status.nodes if node.name != "launcher"]
    assert reasons == [
        "was paused; unhealthy until its next health check",
        "",
        "device lost",
    ]


def nodes_of(count: int, **changes: Any) -> tuple[NodeStatus, ...]:
    """Build the status of running workers with these changes."""
    plain = NodeStatus(name="worker", role="worker", host="local", state="running", slots=1)
    return tuple(replace(plain, name=f"worker-{number}", **changes) for number in range(count))


def test_a_node_is_reachable_once_the_launcher_has_reached_it() -> None:
    """Health `starting` is shown as `just started`, or `reachable` if it was reached; unhealthy as UNHEALTHY."""
    health = ("starting", "starting", "healthy", "unhealthy")
    nodes = [replace(node, health=reported) for node, reported in zip(nodes_of(4), health, strict=True)]
    nodes[1] = replace(nodes[1], reached=True)
    text = status_text(LabStatus(lab="demo", state="up", nodes=tuple(nodes), unreachable=()))
    assert (
        text
        == """\
lab demo: up
NODE      STATE    HEALTH        SLOTS
worker-0  running  just started  1
worker-1  running  reachable     1
worker-2  running  healthy       1
worker-3  running  UNHEALTHY     1"""
    )


def test_nodes_have_age_image_devices_and_run_as_far_as_the_terminal_is_wide() -> None:
    """Render nodes with all columns; on 60 columns without slots and image; an image id is short."""
    nodes = nodes_of(
        1, host="h0", health="healthy", age=7300.0, image="labctl/nvidia", devices=("0", "1"), run="r-c3a223"
    )
    runs = (RunState("r-c3a223", "running", "c3a223", ("worker-0",)),)
    status = LabStatus(lab="demo", state="up", nodes=nodes, unreachable=(), runs=runs)
    assert status_text(status).splitlines()[1:] == [
        "NODE      HOST  STATE    HEALTH   SLOTS  DEVICES  AGE  IMAGE          RUN",
        "worker-0  h0    running  healthy  1      0, 1     2h   labctl/nvidia  c3a223",
    ]
    assert status_text(status, 60).splitlines()[1] == "NODE      HOST  STATE    HEALTH   DEVICES  AGE  RUN"
    moved = replace(status, nodes=nodes_of(1, image="sha256:0123456789abcdef"))
    assert status_text(moved).endswith("  0123456789ab")


def test_what_is_not_up_has_the_command_that_brings_it_up() -> None:
    """Render a lab that is down, and one that is out of date: state, reason and hint."""
    down = LabStatus(lab="demo", state="down", nodes=(), unreachable=(), hint="labctl up")
    assert status_text(down) == "lab demo: down\nhint: labctl up"
    stale = LabStatus(
        lab="demo", state="up", nodes=nodes_of(1), unreachable=(), out_of_date="LAB_MOUNTS changed", hint="labctl up"
    )
    lines = status_text(stale).splitlines()
    assert (lines[0], lines[-1]) == ("lab demo: up, out of date: LAB_MOUNTS changed", "hint: labctl up")


def test_nodes_that_await_their_first_check_are_asked_for(tmp_path: Path) -> None:
    """The launcher is asked only if a node is `starting`; nodes that it reaches are marked."""
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    names = ("launcher", "worker-0", "worker-1")
    containers = tuple(container(name, health="starting", directory=str(tmp_path)) for name in names)
    engine = FakeBackend(answer=lambda *_: iter(["worker-1"]), seen=ObservedState(containers=containers))
    where = Cluster(settings=context.settings(), directory=tmp_path, engine=engine)
    assert [node.reached for node in status_of(context, where).nodes] == [False, False, True]
    asked = len(engine.started)
    assert [node.reached for node in status_of(context, where, reached=("worker-0",)).nodes] == [False, True, False]
    engine.seen = ObservedState(containers=tuple(replace(each, health="healthy") for each in containers))
    assert not any(node.reached for node in status_of(context, where).nodes)
    assert len(engine.started) == asked == 1


def test_a_node_has_the_age_and_image_of_its_container_and_the_run_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Age and image are those that Docker lists, the run is the latest that runs on the node."""
    listed = {
        "Id": "0", "Names": ["/worker-0"], "State": "running", "ImageID": "1", "Image": "labctl/cpu",
        "Created": int(time.time()) - 90, "Labels": {"labctl.node": "worker-0", "labctl.directory": str(tmp_path)},
    }  # fmt: skip
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    engine = FakeBackend(seen=ObservedState(containers=(container_of(listed, "local"),)))
    where = Cluster(settings=context.settings(), directory=tmp_path, engine=engine)
    runs = [
        RunSummary(run_id=f"r{number}", short_id=f"{number}", state=state, nodes=("worker-0",))
        for number, state in enumerate(("waiting", "running", "running", "done"))
    ]
    monkeypatch.setattr(judge, "states", lambda *_: tuple(runs))
    status = labs.status(backend(context, where))
    worker = next(node for node in status.nodes if node.name == "worker-0")
    assert 90 <= (worker.age or 0) < 100
    assert (worker.image, worker.run) == ("labctl/cpu", "r1")
    assert status_text(status).splitlines()[3].split()[-3:] == ["1m", "labctl/cpu", "1"]


def test_a_host_with_one_device_misses_no_second_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LAB_NODES the number of nodes is that of `up`; with it, the missing ones are listed."""
    monkeypatch.setattr(spec, "usual_nodes", lambda *_: 1)
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    containers = tuple(container(name, directory=str(tmp_path)) for name in ("launcher", "worker-0"))
    engine = FakeBackend(seen=ObservedState(containers=containers))
    where = Cluster(settings=context.settings(), directory=tmp_path, engine=engine)
    assert status_of(context, where).state == "up"
    where = replace(where, settings=where.settings.with_value("LAB_NODES", "2", "flag"))
    status = status_of(context, where)
    assert (status.state, status.nodes[-1].name, status.nodes[-1].state) == ("partial", "worker-1", "missing")
