from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.builders import container, deployment, host, lab, node, observed
from support.fake_backend import Failed, FakeBackend
from support.nearby import Nearby

from labctl import errors, naming
from labctl.backends.docker import agent
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import plan
from labctl.backends.docker.deploy.steps import (
    Deployment,
    RemoveState,
    WaitForSsh,
    WriteFiles,
    WriteKeys,
    of_override,
)
from labctl.backends.docker.engine import Kind
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.plan import carry_out
from labctl.backends.state import ObservedState
from labctl.errors import HostError
from labctl.model import Event

CHANGED_KEY = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key verification failed."""
CORRECT = "correct compose.override.yml, which adds to worker-0, then `labctl up`"


def answers(*documents: dict[str, object], code: int = 0, said: str = "what it complained of") -> FakeBackend:
    """Return an engine whose containers print these documents and exit with this code and message."""

    def answer(name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield each document as a line of JSON; raise Failed if the code is not 0."""
        for document in documents:
            yield json.dumps(document)
        if code:
            raise Failed(code, said)

    return FakeBackend(answer=answer)


# --- reach ---------------------------------------------------------------------------------------------------


def test_nodes_that_let_the_launcher_in_have_been_reached() -> None:
    """unreached() is empty if all nodes answered; the launcher's agent ran `reach` as the lab's user."""
    engine = answers({"node": "worker-0", "ok": True, "seconds": 0.2}, {"node": "worker-1", "ok": True, "seconds": 0.3})
    assert agent.unreached(lab(), engine, ("worker-0", "worker-1"), 60) == {}
    assert engine.started == [
        ("labctl-demo-launcher-1", (*agent.AGENT, "reach", "60", "worker-0", "worker-1")),
    ]
    assert engine.options[0]["user"] == "1000:1000"


def test_reach_names_the_nodes_that_failed_with_sshs_reason() -> None:
    """reach() raises HostError with ssh's reason of each node that failed or was not answered for, exit code 3."""
    engine = answers(
        {"node": "worker-0", "ok": True, "seconds": 0.2},
        {"node": "worker-1", "ok": False, "seconds": 60, "error": CHANGED_KEY},
        {"node": "worker-2", "ok": False, "seconds": 60, "error": "debug\nssh: connect: Connection refused\n"},
        code=1,
    )
    with pytest.raises(HostError) as caught:
        agent.reach(lab(4), engine, ("worker-0", "worker-1", "worker-2", "worker-3"), 60)
    assert caught.value.message.splitlines() == [
        "the launcher does not reach every worker over ssh",
        "  worker-1: host key is not the pinned one (REMOTE HOST IDENTIFICATION HAS CHANGED)",
        "  worker-2: ssh: connect: Connection refused",
        "  worker-3: the launcher gave no answer about it",
    ]
    assert caught.value.node == "worker-1"
    assert caught.value.exit_code == 3
    assert "labctl logs worker-1" in caught.value.hint


def test_a_node_that_has_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """reach() raises HostError while the launcher still tries, with the node's last line, and where to mend it."""
    monkeypatch.setattr(agent, "LOOKING", 0.01)
    tried = threading.Event()

    def answer(_container: str, _argv: tuple[str, ...]) -> Iterator[str]:
        """Answer nothing until the test has ended."""
        tried.wait(60)
        yield ""

    of = lab(2, override=(("worker-1", "{}"),))
    engine = FakeBackend(answer=answer, seen=observed(of, worker_1={"state": "exited", "exit_code": 1}))
    with pytest.raises(HostError, match=r"^worker-1 has stopped \(exit code 1\): labctl-demo$") as caught:
        agent.reach(of, engine, NODES, 60)
    tried.set()
    assert caught.value.hint == (
        "labctl logs worker-1; correct compose.override.yml, which adds to worker-1, then `labctl up`"
    )


@pytest.mark.parametrize(
    ("complaint", "hint"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '/etc/lab/ssh/config'", "labctl up"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ssh'", "image labctl/cpu has no ssh client"),
    ],
)
def test_an_agent_that_lacks_a_file_names_the_way_out(complaint: str, hint: str) -> None:
    """The HostError has the last line of a traceback only, and a hint by the file that was not found."""
    with pytest.raises(HostError) as caught:
        agent.reach(lab(), answers(code=1, said=f"Traceback:\n  some line\n{complaint}\n"), NODES, 60)
    assert caught.value.message == f"launcher: {complaint}"
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("changes", "hint", "expected"),
    [
        ({}, "labctl doctor", "labctl doctor"),
        ({"override": (("worker-1", "{}"),)}, "labctl doctor", "labctl doctor"),
        ({"override": (("worker-0", "{}"),)}, "labctl doctor", CORRECT),
        ({"override": (("worker-0", "{}"),)}, "choose another port in LAB_PORTS", CORRECT),
        ({"override": (("worker-0", "{}"),), "ports": (("127.0.0.1", 80, 80),)}, "or LAB_PORTS", "or LAB_PORTS"),
    ],
)
def test_a_refusal_of_the_users_additions_names_their_file(changes: dict[str, Any], hint: str, expected: str) -> None:
    """of_override() names compose.override.yml if that adds to a node that was to be created, else keeps the hint."""
    refused = HostError("no such device", hint=hint)
    error = of_override(refused, lab(**changes), ("worker-0",))
    assert (error.message, error.hint) == ("no such device", expected)


def test_an_agent_that_breaks_says_what_it_complained_of() -> None:
    """An agent that fails without answers raises HostError with its stderr, of the launcher."""
    with pytest.raises(HostError) as caught:
        agent.reach(lab(), answers(code=1), ("worker-0",), 60)
    assert caught.value.message == "launcher: what it complained of"
    assert caught.value.node == "launcher"


def test_an_agent_that_ends_without_a_word_is_told_by_its_code() -> None:
    """An agent that fails with no output raises HostError with its exit code."""
    with pytest.raises(HostError, match=r"^launcher: .*labnode.py reach exited with code 137") as caught:
        agent.reach(lab(), answers(code=137, said=""), ("worker-0",), 60)
    assert caught.value.hint == "labctl status; labctl logs launcher"


@pytest.mark.parametrize("message", ["", "\n \n"])
def test_silence_is_a_reason_too(message: str) -> None:
    """ssh_reason() of an empty or blank text is `no answer`."""
    assert ssh_errors.ssh_reason(message) == "no answer"


NODES = ("worker-0", "worker-1")


def names(*nodes: str) -> FakeBackend:
    """Return an engine in whose launcher a shell prints these names."""
    return FakeBackend(answer=lambda _, argv: iter(nodes if argv[0] == "sh" else ()))


@pytest.mark.parametrize(("early", "again"), [(NODES[::-1], 0), (NODES[:1], 1), ((), 1)])
def test_nodes_that_answered_meanwhile_are_not_reached_again(
    early: tuple[str, ...], again: int, tmp_path: Path
) -> None:
    """WaitForSsh starts no agent if the early reach had all nodes, else one."""
    of = lab(directory=tmp_path)
    begun = agent.begin_reach(names(*early), "launcher-1", NODES)
    engine = answers(*({"node": name, "ok": True, "seconds": 0.2} for name in NODES))
    step = WaitForSsh(nodes=NODES, seconds=60, cause="wait for SSH")
    assert carry_out((step,), replace(deployment(of, engine), early=begun)) == {}
    assert len(engine.started) == again


def test_nodes_of_a_host_that_failed_are_not_waited_for() -> None:
    """WaitForSsh leaves out the nodes of a failed host, and returns its failure unchanged."""
    of = lab((node(0), node(1, host="red")), hosts=(host(), host(name="red")))
    engine = answers({"node": "worker-0", "ok": True, "seconds": 0.2})
    failed = {"red": HostError("red: no answer", node="red")}
    step = WaitForSsh(nodes=NODES, seconds=60, cause="wait for SSH")
    assert carry_out((step,), deployment(of, engine), failed) == failed
    assert [argv[len(agent.AGENT) :] for _, argv in engine.started] == [("reach", "60", "worker-0")]


def test_other_nodes_than_those_asked_meanwhile_are_reached() -> None:
    """An early reach has passed for its nodes or fewer, not for others, nor once it is too old."""
    begun = agent.begin_reach(names(*NODES), "launcher-1", NODES)
    assert begun
    assert begun.passed(NODES)
    assert begun.passed(NODES[:1])
    assert not begun.passed((*NODES, "worker-2"))
    assert not begun._replace(begun=begun.begun - agent.FRESH - 1).passed(NODES)


# --- carrying out --------------------------------------------------------------------------------------------


def test_up_is_carried_out_in_order_and_said_aloud(tmp_path: Path) -> None:
    """`up` writes files, removes the surplus container, applies compose and emits five numbered steps."""
    of = lab(directory=tmp_path)
    engine = answers({"node": "worker-0", "ok": True, "seconds": 0}, {"node": "worker-1", "ok": True, "seconds": 0})
    surplus = container("worker-7", directory=str(tmp_path))
    current = ObservedState(containers=(surplus,), image="sha256:1111")
    files = render.render(of)
    events: list[Event] = []
    local = (WriteKeys(paths=("keys",), cause="new"), WriteFiles(files=files, cause="new"))
    steps = plan.up(of, files, current, local=local).steps
    assert carry_out(steps, deployment(of, engine, events.append)) == {}
    assert [path.relative_to(tmp_path).as_posix() for path in sorted((tmp_path / ".lab").rglob("*.yml"))] == [
        naming.compose_path("worker-0"),
        naming.compose_path("worker-1"),
    ]
    assert engine.done == [
        ("remove container", ("id-worker-7",)),
        ("apply", ("labctl-demo", *(tmp_path / naming.compose_path(node.name) for node in of.nodes))),
    ]
    assert [event.text.split()[0] for event in events] == ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"]
    assert {event.kind for event in events} == {"step"}


def test_a_step_that_fails_ends_the_plan(tmp_path: Path) -> None:
    """A failing step raises HostError: the launcher is missing, or a file cannot be written."""
    of = lab(directory=tmp_path)
    engine = FakeBackend(dead=("labctl-demo-launcher-1",))
    local = (WriteFiles(files=render.render(of), cause="new"),)
    with pytest.raises(HostError, match="No such container"):
        carry_out(plan.up(of, (*local[0].files,), ObservedState(), local=local).steps, deployment(of, engine))
    with pytest.raises(HostError, match="cannot create"):
        carry_out(local, deployment(lab(directory=tmp_path / naming.compose_path("worker-0")), engine))


def test_state_is_kept_for_a_host_that_failed_but_not_what_no_node_needs(tmp_path: Path) -> None:
    """RemoveState keeps .lab if a host failed; files that no node needs are removed anyway."""
    of, failed = lab(directory=tmp_path), {"red": HostError("red: no answer", node="red")}
    up = deployment(of, FakeBackend())
    secret = tmp_path / ".lab/nodes/worker-0/secrets/hf_token"
    secret.parent.mkdir(parents=True)
    secret.touch()
    down = Deployment(context=up.context, cluster=up.cluster)
    carry_out((RemoveState(paths=(".lab",), cause="labctl clean"),), down, failed)
    assert secret.exists()
    path = str(secret.relative_to(tmp_path))
    carry_out((RemoveState(paths=(path,), cause="no longer needed"),), up, failed)
    assert not secret.exists()


def test_down_needs_no_lab_on_disk() -> None:
    """down() of a lab without a directory removes its containers and network."""
    engine = FakeBackend()
    carry_out(plan.down(observed(lab())).steps, deployment(lab(), engine))
    assert engine.done == [
        ("remove container", ("id-launcher", "id-worker-0", "id-worker-1")),
        ("remove network", ("id-network",)),
    ]


class Removing(FakeBackend):
    """An engine that refuses to remove images, with this message."""

    words = ""

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:
        """Raise HostError with the planted message."""
        raise HostError(
            f"{host}: `docker {kind} rm {ids[0]}` failed:\nError response from daemon: {self.words}", node="h1"
        )


def test_an_image_that_a_container_uses_stays_and_is_no_failure() -> None:
    """An image in use is a warning and no failure; another error of its removal is the host's failure."""
    engine, events = Removing(seen=ObservedState(host="h1")), list[Event]()
    steps = plan.down(ObservedState(host="h1", image="sha256:1"), image="labctl/cpu")
    engine.words = (
        'conflict: unable to remove repository reference "labctl/cpu" (must force) - '
        "container f970c0067a97 is using its referenced image 9ee0058fd941"
    )
    assert carry_out(steps.steps, deployment(lab(), engine, events.append)) == {}
    (warning,) = (event.text for event in events if event.kind == "warning")
    assert warning.startswith("h1: image labctl/cpu stays: ")
    assert "container f970c0067a97" in warning
    engine.words = "read-only file system"
    assert set(carry_out(steps.steps, deployment(lab(), engine, events.append))) == {"h1"}


def test_programs_start_where_a_container_belongs_whoever_else_has_one_of_its_name() -> None:
    """exec() runs in the planned host's launcher, though another host still has a container of its name."""
    stale = ObservedState(host="h2", containers=(container("launcher", host="h2"),))
    first, second = FakeBackend(seen=observed(lab())), FakeBackend(seen=stale)
    engines = MultiHostEngine({"h1": first, "h2": second}, {"labctl-demo-launcher-1": "h1"})
    engines.observe("demo")
    engines.exec("labctl-demo-launcher-1", ("true",), user="1000:1000")
    assert (first.started, second.started) == ([("labctl-demo-launcher-1", ("true",))], [])


def test_a_hosts_files_are_removed_once_what_is_only_there_is_here(tmp_path: Path) -> None:
    """Results are fetched before a host's directory is removed; if that fails, it and the state stay."""
    directory = tmp_path / ".labctl/demo"
    directory.mkdir(parents=True)
    engine = FakeBackend(ways={"red": cast(Any, Nearby(name="red"))})
    current = ObservedState(parts=(ObservedState(host="red"),))
    steps = plan.down(current, {"red": (str(directory),)}, state="kept").steps
    (tmp_path / "kept").mkdir()
    made = deployment(lab(directory=tmp_path), engine)
    target = Deployment(context=made.context, cluster=made.cluster)
    (directory / naming.OUTPUTS / "\n..").mkdir(parents=True)
    assert set(carry_out(steps, target)) == {"red"}
    assert (directory.exists(), (tmp_path / "kept").exists()) == (True, True)
    shutil.rmtree(directory / "runs")
    (directory / naming.OUTPUTS / "r1").mkdir(parents=True)
    (directory / naming.OUTPUTS / "r1/loss").write_text("1")
    # The run is this lab's.
    (tmp_path / "runs/r1").mkdir(parents=True)
    assert carry_out(steps, target) == {}
    assert ((tmp_path / "runs/r1/loss").read_text(), directory.exists()) == ("1", False)
    assert not (tmp_path / "kept").exists()


def test_hosts_that_fail_are_all_named_and_what_to_type_is_said_for_each() -> None:
    """raise_all() of two hosts raises HostError with both messages, the first one's hint and node."""
    lost = {
        "red": HostError("red: is silent", hint="ping red", node="red"),
        "blue": HostError("no room\nat all", hint="df", node="blue"),
    }
    with pytest.raises(HostError) as caught:
        errors.raise_all(lost)
    assert caught.value.message == "2 hosts failed:\n  red: is silent\n  blue: no room\n    at all"
    assert caught.value.hint == "ping red (for red; `labctl doctor` has a hint for each); then re-run the command"
    assert caught.value.node == "red"
