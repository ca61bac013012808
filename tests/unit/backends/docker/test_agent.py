"""Runs that the agent in the launcher supervises, followed over connections that break."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from support.builders import job, lab, observed
from support.fake_backend import Failed, FakeBackend, first_line
from support.harness import wait_until

from labctl.backends.docker import agent, supervise
from labctl.backends.docker.agent import AGENT, Follower
from labctl.backends.docker.engine import OnLines
from labctl.errors import HostError
from labctl.records.active import ActiveRun, InUse, LaunchError, since
from labctl.records.lines import Line
from labctl.system.process import Input

LAB = lab()
JOB = job(LAB)
LAUNCH = supervise.launch_of(LAB, JOB)


class Breaking(FakeBackend):
    """An agent whose connections break after ``each`` lines; each connection starts at the requested line."""

    def __init__(self, *lines: str, each: int) -> None:
        """Print these lines, then the end with code 0; break off after ``each`` lines."""
        super().__init__(seen=observed(LAB))
        self.lines, self.each, self.asked = (*lines, 'end {"code": 0}'), each, list[str]()

    def stream(self, container: str, argv: tuple[str, ...], on_lines: OnLines, **options: Any) -> int:  # noqa: ARG002
        """Print the next ``each`` lines, then break as a lost connection does: exit code 255."""
        is_launch = argv[-1] == "launch"
        self.asked.append("launch" if is_launch else argv[len(AGENT)])
        place = 0 if is_launch else int(argv[-1])
        if is_launch:
            assert first_line(options["typed"]), "no run was named"
        now = tuple(enumerate(self.lines, 1))[place : place + self.each]
        on_lines([line if line.startswith("end ") else f"{number} {number}.5 {line}" for number, line in now])
        return 255


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not sleep between attempts."""
    monkeypatch.setattr("labctl.backends.docker.agent.time.sleep", lambda _: None)


def test_each_line_comes_once_however_often_the_connection_breaks() -> None:
    """After a broken connection follow() goes on with the next line; each line comes once, with rank and time."""
    received: list[Line] = []
    engine = Breaking("one", "worker-1: \x0112\x02two", "\x010\x02three\x01", each=2)
    ended = agent.follow(LAB, engine, "r1", Follower(received.extend), LAUNCH)
    assert ended.code == 0
    assert received == [
        Line("one", 1.5),
        Line("worker-1: two", 2.5, 12, "two"),
        Line("three\x01", 3.5, 0, "three\x01"),
    ]
    assert engine.asked == ["launch", "follow"]


def test_a_launcher_that_does_not_answer_again_leaves_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that stays silent raises HostError that run r1 goes on, with `labctl attach r1` as hint."""
    monkeypatch.setattr(agent, "PATIENCE", 0)
    engine = Breaking("one", "two", each=1)
    engine.lines = ("one",)
    with pytest.raises(HostError, match="the launcher does not answer; run r1 goes on without labctl") as caught:
        agent.follow(LAB, engine, "r1", Follower(lambda *_: None))
    assert caught.value.hint == "labctl attach r1"


def test_a_launcher_that_is_gone_ends_the_run() -> None:
    """With an exited launcher follow() returns code 137 and lost."""
    engine = Breaking(each=1)
    engine.lines = ("one",)
    engine.seen = observed(LAB, launcher={"state": "exited"})
    ended = agent.follow(LAB, engine, "r1", Follower(lambda *_: None), LAUNCH)
    assert (ended.code, ended.lost) == (137, True)


def saying(*lines: str) -> FakeBackend:
    """Return an engine whose agent prints these lines and exits with 1."""

    class Saying(FakeBackend):
        def stream(self, container: str, argv: tuple[str, ...], on_lines: OnLines, **options: Any) -> int:  # noqa: ARG002
            """Hand on the planted lines; return exit code 1."""
            assert first_line(options["typed"]), "no run was named"
            on_lines(lines)
            return 1

    return Saying(seen=observed(LAB))


@pytest.mark.parametrize("error", ["KeyError: 'launch'", "TypeError: launch() missing 1 required argument"])
def test_an_agent_of_an_earlier_labctl_is_told_what_to_build(error: str) -> None:
    """KeyError or TypeError of the agent raises LaunchError with `labctl build && labctl up` as hint."""
    with pytest.raises(LaunchError, match=re.escape(f"launcher: {error}")) as caught:
        agent.follow(LAB, saying("Traceback", error), "r1", Follower(lambda *_: None), LAUNCH)
    assert caught.value.hint == "labctl build && labctl up"


def test_nodes_that_are_in_use_are_named_with_their_run() -> None:
    """A `busy` line of the agent raises InUse with node, run and owner, and how to wait or stop as hint."""
    busy = '{"id": "r0", "nodes": ["worker-0"], "state": "running", "owner": "ann@desk", "order": 1767000000}'
    with pytest.raises(InUse, match=r"worker-0: in use by run r0 \(ann@desk, since 20") as caught:
        agent.follow(LAB, saying(f"busy {busy}"), "r1", Follower(lambda *_: None), LAUNCH)
    assert caught.value.hint == "--wait waits for it; `labctl stop r0` ends it"


class Waiting(FakeBackend):
    """An agent that waits for its run, prints these lines meanwhile, and records its input after the run."""

    def __init__(self, *lines: str, answers: bool = True) -> None:
        super().__init__(seen=observed(LAB))
        self.lines, self.answers, self.told = lines, answers, list[bytes]()
        self.over = False

    def stream(
        self, container: str, argv: tuple[str, ...], on_lines: OnLines, *, typed: Input | None = None, **_: Any
    ) -> int:
        """Wait for a run as the agent does, and note its input; without ``answers`` end, else end the run at once."""
        assert typed
        assert (container, argv[-1]) == ("labctl-demo-launcher-1", "launch")
        on_lines(self.lines)
        read, write = os.pipe()
        with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
            typed.open(writer)
            for line in reader:
                self.told.append(line.strip())
                if line.startswith(b"{") and not self.answers:
                    return 0
                if line.startswith(b"{"):
                    on_lines(["1 0.5 one", 'end {"code": 0}'])
        self.over = True
        return 0


def test_an_agent_that_waits_asks_the_nodes_then_launches_its_run_and_forgets_it() -> None:
    """Standby passes once both nodes are reached, launches the run on the same connection, and forgets it once."""
    engine, received = Waiting("reached worker-0", "reached worker-1", "reached"), list[Line]()
    standby = agent.Standby(LAB, engine, "r1", ("worker-0", "worker-1"))
    assert standby.passed(("worker-1", "worker-0"))
    assert agent.follow(LAB, engine, "r1", Follower(received.extend), LAUNCH, standby).code == 0
    assert standby.forget()
    launched, messages = engine.told
    assert (launched, messages) == (msgspec.json.encode(LAUNCH), b"forget")
    assert received == [Line("one", 0.5)]
    assert standby.ended
    assert not standby.forget()


def test_a_run_is_over_only_when_its_last_lines_have_been_passed_on() -> None:
    """Follower.ended is set only after the lines before the end have been handed on."""
    received: list[str] = []
    ends: list[bool] = []

    def keep(lines: Sequence[Line]) -> None:
        """Record the lines, and whether the run had ended when they came."""
        ends.append(follower.ended is not None)
        received.extend(line.text for line in lines)

    follower = Follower(keep)
    follower.read(["1 0.5 one"])
    follower.read(["2 0.5 two", 'end {"code": 0}'])
    assert (received, ends, follower.ended is not None) == (["one", "two"], [False, False], True)


def test_a_silent_second_passes_on_no_lines() -> None:
    """So that who follows a run can leave it, and the next line is that after the last."""
    received: list[Sequence[Line]] = []
    follower = Follower(received.append)
    follower.read(["7 0.5 one"])
    follower.read(["beat"])
    assert (received[1:], follower.place) == ([[]], 7)


def test_an_agent_that_fails_without_a_word_has_launched_nothing() -> None:
    """An agent that exits with 137 and no line raises LaunchError."""

    class Failing(Waiting):
        def stream(self, *args: Any, **options: Any) -> int:
            """Wait for a run like Waiting; return exit code 137."""
            super().stream(*args, **options)
            return 137

    with pytest.raises(LaunchError, match="its agent exited with code 137"):
        agent.launch_run(LAB, Failing(answers=False), Follower(len), LAUNCH)


def test_an_agent_that_is_opened_for_a_launch_is_dismissed_after_it() -> None:
    """After follow() without a standby, the agent's input is closed."""
    engine = Waiting()
    assert agent.follow(LAB, engine, "r1", Follower(len), LAUNCH).code == 0
    wait_until(lambda: engine.over, 60, "its input is closed")


@pytest.mark.parametrize("lines", [("reached worker-0", "reached"), ("reached",), ("Error response from daemon",)])
def test_a_node_whose_sshd_does_not_greet_has_not_passed(lines: tuple[str, ...]) -> None:
    """passed() is False if not all nodes were reached, or the connection ended without an answer."""
    standby = agent.Standby(LAB, Waiting(*lines), "r1", ("worker-0", "worker-1"))
    if "reached" not in lines:
        # Its connection ends without a word about the nodes.
        standby.close()
    assert not standby.passed(("worker-0", "worker-1"))
    standby.close()


def test_a_launcher_that_could_not_be_entered_is_entered_again() -> None:
    """A standby whose connection ended is not used: follow() launches by a new one."""
    early = Waiting("Error response from daemon: container is not running")
    standby = agent.Standby(LAB, early, "r1")
    standby.close()
    wait_until(lambda: standby.ended, 60, "the connection has ended")
    assert agent.follow(LAB, Waiting(), "r1", Follower(len), LAUNCH, standby).code == 0
    assert early.told == []


@pytest.mark.parametrize(("followed", "reported"), [(1.0, False), (30.0, True)])
def test_a_run_whose_labctl_is_gone_says_when_it_ends(followed: float, reported: bool) -> None:
    """since() tells that the run ends in 90 s if its labctl was last there 30 of 120 s ago, not after 1 s."""
    run = ActiveRun(id="r0", nodes=("worker-0",), state="running", order=1.0, patience=120, followed=followed)
    assert ("its labctl is gone and it ends in 90 s" in since(run)) == reported


def test_an_error_of_who_is_handed_the_lines_is_not_taken_for_a_broken_connection() -> None:
    """HostError of the function that gets the lines is raised by follow(), without a new connection."""

    def refuse(*_: object) -> None:
        """Raise HostError."""
        raise HostError("No space left on device")

    with pytest.raises(HostError, match="No space left"):
        agent.follow(LAB, Breaking("one", "two", each=1), "r1", Follower(refuse), LAUNCH)


def test_an_agent_of_an_earlier_labctl_knows_of_no_runs() -> None:
    """active() is empty if the agent fails with KeyError of `runs`."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail with exit code 1 and KeyError of `runs`."""
        yield from ()
        raise Failed(1, "KeyError: 'runs'")

    assert agent.active(FakeBackend(answer=answer), observed(LAB)) == ()
