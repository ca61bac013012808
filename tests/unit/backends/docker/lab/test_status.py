from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from support.builders import container
from support.fake_backend import FakeBackend

from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.docker.lab.status import status_of
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.backends.status import LabStatus, NodeStatus
from labctl.cli.lab import status_text
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import Event


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


def test_a_lab_of_this_name_in_another_directory_is_shown_with_a_warning(tmp_path: Path) -> None:
    """A lab whose containers another directory made is listed, with a warning that names that directory."""
    remote, events = tmp_path / "there", list[Event]()
    remote.mkdir()
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=events.append, flags={})
    current = ObservedState(
        containers=tuple(container(name, directory=str(remote)) for name in ("launcher", "worker-0"))
    )
    where = Cluster(settings=context.settings(), directory=tmp_path, engine=FakeBackend(seen=current))
    assert [node.name for node in status_of(context, where).nodes] == ["launcher", "worker-0"]
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


def test_a_node_that_docker_has_not_checked_yet_is_not_said_to_start() -> None:
    """Health `starting` is shown as `just started`, unhealthy as UNHEALTHY, none as `-`."""
    nodes = tuple(
        NodeStatus(name=f"worker-{number}", role="worker", host="local", state="running", health=health)
        for number, health in enumerate(("starting", "healthy", "unhealthy", None))
    )
    _, _, *rows = status_text(LabStatus(lab="demo", state="up", nodes=nodes, unreachable=())).splitlines()
    shown = [row.split("running")[1].rsplit(maxsplit=1)[0].strip() for row in rows]
    assert shown == ["just started", "healthy", "UNHEALTHY", "-"]
