"""`up` and `down`: interrupted, concurrent, or impossible."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from docker.models.containers import Container
from support.harness import Answer, Lab, pause, wait_until

from docker import DockerClient

FreshLab = Callable[..., Lab]


def nodes(lab: Lab) -> dict[str, str]:
    """Return node -> status of the lab's containers, without trial containers of a killed `up`."""
    return {node: container.status for node, container in lab.containers().items() if node != "probe"}


def is_complete(lab: Lab) -> bool:
    """Return True if launcher and two workers, and no others, run, and the lab has one network."""
    states = nodes(lab)
    return states == dict.fromkeys(("launcher", "worker-0", "worker-1"), "running") and len(lab.networks()) == 1


def is_polite(answer: Answer, lab: Lab) -> bool:
    """Return True if the command reported Ctrl-C without a traceback, had not begun, or had finished."""
    stopped = answer.code == 130 and "Traceback" not in answer.err
    # Python exits with 1 if it is interrupted while it imports its site module.
    not_yet_labctl = answer.code == -signal.SIGINT and "main()" not in answer.err
    not_yet_python = answer.code == 1 and "init_import_site" in answer.err
    return stopped or not_yet_labctl or not_yet_python or (answer.code == 0 and is_complete(lab))


@pytest.mark.docker
@pytest.mark.slow
def test_up_that_was_interrupted_at_ten_moments_converges_and_down_leaves_nothing(fresh_lab: FreshLab) -> None:
    """Ctrl-C at ten moments of `up`: no traceback, and the next `up` completes the lab."""
    lab = fresh_lab()
    lab.call("up").expect(0)
    lab.call("down").expect(0)
    whole = lab.call("up").expect(0).seconds
    impolite = []
    for moment in range(10):
        lab.call("down").expect(0)
        assert lab.labelled() == []
        with lab.start("up") as running:
            running.ends_within((moment + 0.5) / 10 * whole)
            running.press()
            answer = running.answer(60)
        if not is_polite(answer, lab):
            impolite.append((moment, answer.code, answer.err))
        lab.call("up").expect(0)
        assert is_complete(lab)
    lab.call("down").expect(0)
    assert lab.labelled() == []
    assert impolite == []


MOMENTS: dict[str, Callable[[Lab], object]] = {
    "the first key is there": lambda lab: [*(lab.path / ".lab/nodes").glob("*/*/*_ed25519*")],
    "the network is there": Lab.networks,
    "the first node is there": nodes,
}


@pytest.mark.docker
@pytest.mark.parametrize("interrupted", [(True, False, True), (False, True, False)])
def test_up_that_is_interrupted_and_killed_converges_and_down_leaves_nothing(
    fresh_lab: FreshLab, interrupted: tuple[bool, ...]
) -> None:
    """Continue in each `up` from the state that the previous one left."""
    lab = fresh_lab()
    for (moment, has_come), by_ctrl_c in zip(MOMENTS.items(), interrupted, strict=True):
        with lab.start("up") as running:
            wait_until(lambda: has_come(lab), 120, moment)  # noqa: B023 - it is called here
            running.press(signal.SIGINT if by_ctrl_c else signal.SIGKILL)
            answer = running.answer(120)
        assert is_polite(answer, lab) or not by_ctrl_c, (moment, answer)
    lab.call("up").expect(0)
    assert is_complete(lab)
    lab.call("exec", "--all", "--", "true").expect(0)
    lab.call("down").expect(0)
    assert lab.labelled() == []


@pytest.mark.docker
@pytest.mark.smoke
def test_a_strangers_container_with_a_nodes_name_is_named_and_stays(fresh_lab: FreshLab, image: str) -> None:
    """`up` exits with 3, with a `docker rename` as hint; without the container it passes."""
    lab = fresh_lab()
    name = f"labctl-{lab.name}-worker-1-1"
    theirs = lab.engine.containers.run(image, ["600"], entrypoint="sleep", name=name, detach=True)
    try:
        error = lab.call("up", "--json").expect(3).json["error"]
        assert name in error["message"]
        assert error["hint"] == f"docker rename {name} {name}-other  # or set another LAB_NAME in .env"
        theirs.reload()
        assert (theirs.status, theirs.name) == ("running", name)
    finally:
        theirs.remove(force=True)
    lab.call("up").expect(0)
    assert is_complete(lab)


@pytest.mark.docker
def test_up_and_down_wait_for_the_up_that_is_under_way_and_say_for_whom(fresh_lab: FreshLab) -> None:
    """While one `up` is stopped, another command waits and names its pid; both pass."""
    lab = fresh_lab()
    lock = lab.path / ".lab/lock"
    for command in ("up", "down"):
        with lab.start("up") as first:
            wait_until(lambda: lock.exists() and str(first.process.pid) in lock.read_text(), 120, "it has the lock")
            os.kill(first.process.pid, signal.SIGSTOP)
            with lab.start(command) as second:
                wait_until(lambda: "waiting for" in second.err, 120, "the second says that it waits")
                assert re.search(rf"waiting for .*labctl up.*\bpid {first.process.pid}\b", second.err)
                assert not second.ends_within(0.5)
                os.kill(first.process.pid, signal.SIGCONT)
                first.answer(180).expect(0)
                second.answer(180).expect(0)
        assert is_complete(lab) == (command == "up")
    assert lab.labelled() == []


CHANGES: dict[str, tuple[str, Callable[[Lab, Container], object]]] = {
    "disconnect": ("not on network", lambda lab, worker: lab.networks()[0].disconnect(worker)),
    "docker update": ("memory limit changed", lambda _, worker: worker.update(mem_limit="1g", memswap_limit="1g")),
    "pause": ("paused", lambda _, worker: pause(worker)),
}


@pytest.mark.docker
def test_up_recreates_the_container_that_was_changed_by_hand_and_no_other(lab: Lab) -> None:
    """Disconnect, update or pause worker-1: `run` says which, `up` recreates it alone."""
    for reason, change in CHANGES.values():
        before = lab.identities()
        change(lab, lab.containers()["worker-1"])
        assert f"worker-1: {reason}" in lab.call("run", "hello").expect(3).err
        lab.call("up").expect(0)
        after = lab.identities()
        assert {node for node in before if before[node] != after[node]} == {"worker-1"}
        assert is_complete(lab)


@pytest.mark.docker
def test_orphans_are_reaped(lab: Lab) -> None:
    """100 background processes whose shell ended disappear, also as zombies."""
    worker = lab.containers()["worker-1"]

    def orphans() -> list[list[str]]:
        """List pid, state and command of worker-1's zombies and `sleep 5.4321`."""
        assert worker.id is not None
        rows = lab.engine.api.top(worker.id, "-o pid,stat,args")["Processes"]
        return [row for row in rows if row[1].startswith("Z") or "sleep 5.4321" in row[2]]

    lab.inside("worker-1", "sh", "-c", "for one in $(seq 100); do sleep 5.4321 > /dev/null 2>&1 & done")
    assert len(orphans()) == 100
    wait_until(lambda: not orphans(), 120, "nothing is left of the orphans")


@pytest.mark.docker
def test_a_mount_whose_source_is_not_there_is_named_and_nothing_is_made(fresh_lab: FreshLab) -> None:
    """HOST_REPO_PATH does not exist: exit code 3, mkdir as hint, nothing is made."""
    lab = fresh_lab(HOST_REPO_PATH="/nonexistent/clone")
    error = lab.call("up", "--json").expect(3).json["error"]
    assert "/nonexistent/clone" in error["message"]
    assert "mkdir" in error["hint"]
    assert lab.labelled() == []
    assert not (lab.path / ".lab/nodes").exists()
    assert not Path("/nonexistent").exists()


@pytest.mark.docker
@pytest.mark.parametrize("command", [("up",), ("run", "hello")], ids=" ".join)
def test_a_lab_of_the_same_name_in_another_directory_is_refused(
    lab: Lab, fresh_lab: FreshLab, command: tuple[str, ...]
) -> None:
    """`up` and `run` with the LAB_NAME of another lab exit with 3, name its directory, and change nothing."""
    other = fresh_lab()
    other.configure({"LAB_NAME": lab.name, "LAB_IMAGE": lab.containers()["launcher"].attrs["Config"]["Image"]})
    before = lab.identities()
    error = other.call(*command, "--json").expect(3).json["error"]
    assert lab.name in error["message"]
    assert str(lab.path) in error["message"]
    assert "LAB_NAME" in error["hint"]
    assert lab.identities() == before
    assert other.run_ids() == []


@pytest.mark.docker
def test_an_image_that_is_not_there_is_named(fresh_lab: FreshLab) -> None:
    """LAB_IMAGE does not exist: exit code 3, it is named with a hint, and nothing is made."""
    lab = fresh_lab(LAB_IMAGE="labctl-tests/no-such-image:1")
    error = lab.call("up", "--json").expect(3).json["error"]
    assert "labctl-tests/no-such-image:1" in error["message"]
    assert error["hint"]
    assert lab.labelled() == []


@pytest.mark.docker
def test_a_run_on_a_lab_that_is_down_says_what_to_type(fresh_lab: FreshLab) -> None:
    """`run` exits with 3 and the hint `labctl up`; no run is recorded."""
    lab = fresh_lab()
    error = lab.call("run", "hello", "--json").expect(3).json["error"]
    assert error["hint"] == "labctl up"
    assert lab.run_ids() == []
    assert lab.labelled() == []


@pytest.fixture(scope="module")
def offline_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield a lab directory whose Docker client never contacts an engine."""
    with closing(DockerClient(version="1.44")) as nobody:
        yield Lab.make(tmp_path_factory.mktemp("offline"), "offline", nobody, {})


@pytest.mark.parametrize("command", [("status",), ("up",), ("run", "hello"), ("down",)], ids=" ".join)
@pytest.mark.parametrize(
    "address", ["unix:///nonexistent/docker.sock", "tcp://127.0.0.1:1"], ids=["no-socket", "nobody-listens"]
)
def test_without_a_daemon_there_is_a_reason_and_a_hint(
    offline_lab: Lab, command: tuple[str, ...], address: str
) -> None:
    """No engine at DOCKER_HOST: each command exits with 3, with message and hint, also in JSON."""
    environ = {"DOCKER_HOST": address}
    for_people = offline_lab.call(*command, environ=environ).expect(3)
    assert "error: " in for_people.err
    assert "hint: " in for_people.err
    assert for_people.out == ""
    document = offline_lab.call(*command, "--json", environ=environ).expect(3).json
    assert document["error"]["kind"] == "environment"
    assert "Docker" in document["error"]["message"]
    assert document["error"]["hint"]
