from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from support import builders
from support.fake_backend import FakeBackend, active
from support.nearby import Nearby

from labctl.backends.docker import agent
from labctl.backends.docker.deploy import readiness
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.hosts import facts
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import HostPortUser, ObservedState
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.jobs.request import RunOptions
from labctl.model import Lab
from labctl.records import store
from labctl.records.active import ActiveRun, InUse

PORT = builders.lab().master_port


class Busy(FakeBackend):
    """The engine of a host whose survey reports that root listens to these ports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ports: int, lab: str = "") -> None:
        """Make the survey of host h1 report that root listens to these ports."""
        super().__init__(ways={"h1": cast(Connection, Nearby(name="h1"))})
        self.others = lab
        lines = "".join(f"\t{n}: 00000000:{port:04X} 00000000:0000 0A 0 0 0 0\n" for n, port in enumerate(ports))
        plain = "labctl survey\nfact id\n\tuid=1000(ann) gid=1000(ann)\nfact home\n\t/\nfact docker\n\t/\n"
        survey = f"printf '%s' '{plain}file proc/net/tcp\n{lines}end\n'"
        monkeypatch.setattr(facts, "script", lambda: survey)

    def port_users(self) -> tuple[HostPortUser, ...]:
        """Return a container of lab `demo` and one of the other lab as users of port 1."""
        return tuple(
            HostPortUser(port=1, lab=lab, container=builders.container("worker-0")) for lab in ("demo", self.others)
        )


@pytest.fixture
def lab() -> Lab:
    """Return a lab with a node on each of two hosts, on the hosts' network."""
    names = ("h1", "h2")
    nodes = tuple(builders.node(number, host=name) for number, name in enumerate(names))
    hosts = tuple(builders.host(name=name, number=number) for number, name in enumerate(names))
    return builders.lab(nodes, hosts=hosts, network="host")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return the context of lab `demo` with accelerator cpu."""
    environ = {"LAB_NAME": "demo", "LAB_ACCELERATOR": "cpu"}
    return Context(directory=tmp_path, environ=environ, emit=lambda _: None, flags={})


@pytest.mark.parametrize(
    ("states", "hint"),
    [
        (("paused", "exited"), "docker unpause labctl-demo-worker-0-1"),
        (("paused", "paused"), "docker unpause labctl-demo-worker-0-1; docker unpause labctl-demo-worker-1-1"),
        (("running", "exited"), "labctl up"),
    ],
)
def test_what_is_paused_is_resumed_before_up_would_end_its_processes(states: tuple[str, str], hint: str) -> None:
    """The command for a lab that is not up is `docker unpause` as long as a container is paused, for a run, too."""
    containers = tuple(builders.container(f"worker-{number}", state=state) for number, state in enumerate(states))
    assert readiness.way_up(containers, {}) == hint
    lacking = [(container.node, container.state) for container in containers if container.state != "running"]
    with pytest.raises(HostError) as refused:
        readiness.require_current(builders.lab(), lacking, ObservedState(containers=containers), {})
    assert refused.value.hint == hint


def test_a_paused_node_of_another_host_is_resumed_there() -> None:
    """The command names the host."""
    assert readiness.way_up([builders.container("worker-0", state="paused", host="h1")], {}).startswith("on h1: docker")


def ask(lab: Lab, engine: Busy, *before: int) -> None:
    """Require the master port, with these ports taken on h1 before, and the next port on h2."""
    facts_by_host = {
        "h1": builders.facts(ports=dict.fromkeys(before, "root")),
        "h2": builders.facts(ports={PORT + 1: "cy"}),
    }
    readiness.require_port(lab, builders.job(lab), engine, facts_by_host)


def test_a_port_that_is_taken_where_ranks_meet_is_refused_with_all_that_is_known_and_a_free_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master port in use raises HostError with user and other lab; the hint is a port free on both hosts."""
    with pytest.raises(
        HostError, match=rf"^h1: port {PORT} \(LAB_MASTER_PORT\).* is in use \(user .*this host has lab `other`"
    ) as it:
        ask(lab, Busy(monkeypatch, PORT, lab="other"), PORT)
    assert f"LAB_MASTER_PORT={PORT + 2} in .env" in it.value.hint


def test_a_port_that_is_free_or_none_of_the_hosts_own_is_no_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port taken only before or only since, or on a bridge network, raises nothing."""
    ask(lab, Busy(monkeypatch, PORT))
    # What an earlier run of this lab left there was ended since.
    ask(lab, Busy(monkeypatch), PORT)
    ask(replace(lab, network="bridge"), Busy(monkeypatch, PORT), PORT)


def test_a_batch_needs_the_launcher_and_not_every_node(context: Context) -> None:
    """require_launcher() accepts a lost worker, and raises HostError for a changed or missing launcher."""
    lab = builders.lab(2, directory=context.directory)
    engine = FakeBackend(seen=builders.observed(lab, worker_1={"state": "exited"}))
    readiness.require_launcher(context, builders.cluster_of(context, engine), lab, builders.workload())
    engine.seen = builders.observed(lab, launcher={"image": "sha256:2222"})
    with pytest.raises(HostError, match=r"lab demo is out of date: launcher: image changed") as caught:
        readiness.require_launcher(context, builders.cluster_of(context, engine), lab, builders.workload())
    assert caught.value.hint == "labctl up"
    updated = {"limits": (("memory", "1"),), "rendered_limits": "pids=8192"}
    engine.seen = builders.observed(lab, launcher=updated)
    with pytest.raises(HostError, match=r"is out of date: launcher: memory limit changed \(docker update\)$"):
        readiness.require_launcher(context, builders.cluster_of(context, engine), lab, builders.workload())
    engine.seen = ObservedState()
    with pytest.raises(HostError, match=r"lab demo is not up: launcher: missing"):
        readiness.require_launcher(context, builders.cluster_of(context, engine), lab, builders.workload())


def test_a_script_that_starts_its_own_ranks_needs_no_program_in_the_image() -> None:
    """require_program() calls no engine for launcher `script`."""
    lab = builders.lab(2)
    readiness.require_program(lab, builders.job(lab, launcher="script"), cast(Engine, None))


def test_a_run_that_was_judged_is_ended_unless_nothing_is_to_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """under_way() stops the processes of a run that has a result, unless it is a preview; it returns none."""
    record = tmp_path / "runs/20260101-000000-000000-hello"
    record.mkdir(parents=True)
    judged = replace(builders.lab(), directory=tmp_path)
    monkeypatch.setattr(store, "unjudged", lambda _: (record.name,))
    monkeypatch.setattr(store, "read_result", lambda _, run_id: run_id == record.name)
    ended: list[str] = []
    monkeypatch.setattr(agent, "stop", lambda _lab, _engine, run_id, *_: ended.append(run_id))
    monkeypatch.setattr(readiness, "ENDING", 0)
    engine = cast(Engine, FakeBackend(active(record.name, "worker-0")))
    current = builders.observed(judged)
    assert readiness.under_way(judged, engine, current, preview=True) == ()
    assert ended == []
    assert readiness.under_way(judged, engine, current, preview=False) == ()
    assert ended == [record.name]


def test_a_dry_run_notes_nodes_in_use_and_a_run_refuses_them(tmp_path: Path) -> None:
    """Note the other run on one of a job's nodes; a run raises InUse with the same words, unless it waits."""
    notes: list[str] = []
    context = Context(directory=tmp_path, environ={}, emit=lambda event: notes.append(event.text), flags={})
    job = builders.job(builders.lab(2))
    other = ActiveRun(id="r1", nodes=("worker-1", "worker-7"), state="running", owner="ann@host")
    readiness.note_users(context, job, ())
    assert notes == []
    readiness.note_users(context, job, (other,))
    (note,) = notes
    assert note.startswith("worker-1: in use by run r1 (ann@host, since ")
    with pytest.raises(InUse) as caught:
        readiness.require_free(job, (other,), RunOptions())
    assert caught.value.message == note
    readiness.require_free(job, (other,), RunOptions(wait=True))
