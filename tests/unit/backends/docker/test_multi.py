"""Several daemons as one: broken streams of events, and the loss of a host."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import container
from support.fake_backend import FakeBackend

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.errors import HostError
from labctl.model import Cause


class Way(Connection):
    """A broken connection that can be reopened, if allowed."""

    def __init__(self, message: str, *, comes_back: bool = True) -> None:
        self.said, self.comes_back = message, comes_back

    def why_lost(self) -> str:
        """Return why the connection was lost, empty if it stands."""
        return self.said

    def reconnect(self, seconds: float) -> None:  # noqa: ARG002
        """Raise HostError unless the connection may come back; then it stands."""
        if not self.comes_back:
            raise HostError(self.said)
        self.said = ""


class Listened(FakeBackend):
    """A daemon whose events end once, without an event; the second stream may have some."""

    def __init__(self, host: str, way: Connection, *after: tuple[str, Cause, str]) -> None:
        """Have one container on this host, no events in the first stream and these in the second."""
        node = container("worker-0" if host == "h1" else "worker-1", host=host)
        super().__init__(seen=ObservedState(host=host, containers=(node,)), ways={host: way})
        self.streams: Iterator[tuple[tuple[str, Cause, str], ...]] = itertools.chain([(), after], itertools.repeat(()))

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:  # noqa: ARG002
        """Yield the events of the next stream."""
        yield from next(self.streams)


class Quiet(FakeBackend):
    """A daemon without events."""

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:  # noqa: ARG002
        """Wait for ever."""
        threading.Event().wait()
        yield from ()


def other(*said: str, host: str = "h2", state: str = "running") -> FakeBackend:
    """Return a host's daemon whose containers report these results of reaching the first host, then `heard`."""
    remaining = iter(said)

    def answer(name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield the next result for worker-0, none if it is empty."""
        assert argv[-2:] == ("hears", "worker-0")
        if word := next(remaining, "heard"):
            yield f"worker-0 {word}"

    node = container("worker-1", host=host, state=state)
    return Quiet(answer=answer, seen=ObservedState(host=host, containers=(node,)), ways={host: Connection()})


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not sleep between attempts."""
    monkeypatch.setattr("labctl.backends.docker.multi.time.sleep", lambda _: None)


def first_told(*daemons: FakeBackend) -> tuple[str, Cause, str]:
    """Return the first loss that these daemons, joined, report."""
    engine = MultiHostEngine({daemon.seen.host: daemon for daemon in daemons}, {})
    return next(engine.events("demo"))


LOST = "h1 (10.0.0.5): the connection was lost: Timeout"


def test_an_engine_that_ends_takes_its_nodes_with_it() -> None:
    """If the stream of events ends and the connection is closed, the host's node is lost."""
    message = "host h1 no longer answers (the connection to it ended)"
    assert first_told(Listened("h1", Way(""))) == ("worker-0", "node-lost", message)


def test_a_host_that_the_others_do_not_hear_either_is_lost() -> None:
    """If the other hosts do not hear host h1 either, its node is lost with ssh's reason."""
    losses = first_told(Listened("h1", Way(LOST)), other("silent"), other("", host="h3"))
    assert losses == ("worker-0", "node-lost", f"host {LOST}")


@pytest.mark.parametrize(
    "daemons",
    [
        (other("silent"), other("heard", host="h3")),
        (other(state="exited"),),
        (other("heard", "silent", "silent", "heard"),),
        (),
    ],
    ids=["one of them hears it", "they cannot be asked", "they miss it for a moment", "there are none"],
)
def test_a_host_that_another_hears_or_none_can_be_asked_about_is_not_lost(daemons: tuple[FakeBackend, ...]) -> None:
    """If another host hears h1, or none can be asked, its node is not lost; the later death is reported."""
    died: tuple[str, Cause, str] = ("worker-0", "node-lost", "container died with exit code 1")
    way = Way(LOST, comes_back=False)
    tries = itertools.count()

    def reconnect(seconds: float) -> None:
        """Reconnect; the first four attempts fail."""
        way.comes_back = next(tries) > 3
        Way.reconnect(way, seconds)

    way.reconnect = reconnect  # type: ignore[method-assign]
    assert first_told(Listened("h1", way, died), *daemons) == died


def test_a_node_that_refuses_twice_is_told_of_and_a_host_that_dies_meanwhile_is_lost() -> None:
    """A node whose sshd refuses twice is lost with that; one that then is silent is lost with its host."""
    node, cause, message = first_told(Listened("h1", Way(LOST, comes_back=False)), other("refused", "refused"))
    assert (node, cause) == ("worker-0", "node-lost")
    assert message.startswith("its sshd is gone")
    losses = first_told(Listened("h1", Way(LOST, comes_back=False)), other("refused", "silent"))
    assert losses == ("worker-0", "node-lost", f"host {LOST}")


def test_a_connection_that_another_part_of_labctl_has_made_again_loses_nothing() -> None:
    """If the connection was made again elsewhere in labctl, nothing is lost; the later death is reported."""
    died: tuple[str, Cause, str] = ("worker-0", "node-lost", "container died with exit code 1")
    way = Way("")

    class Remade(Listened):
        def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
            """Count the connection as made again, once."""
            way.made += way.made == 1
            return super().events(lab)

    assert first_told(Remade("h1", way, died), other()) == died


def test_a_connection_that_another_part_of_labctl_is_about_to_make_again_loses_nothing() -> None:
    """If the connection is made again while why_lost() is asked, nothing is lost; the later death is reported."""
    died: tuple[str, Cause, str] = ("worker-0", "node-lost", "container died with exit code 1")
    way = Way("")

    def why_lost() -> str:
        """Count the connection as made again; return no reason."""
        way.made = 2
        return ""

    way.why_lost = why_lost  # type: ignore[method-assign]
    assert first_told(Listened("h1", way, died), other()) == died


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_host_that_only_labctl_does_not_hear_is_connected_to_again(comes_back: bool) -> None:
    """reconnect() is called until it succeeds, at the first or third attempt; then the death is reported."""
    way, died = Way(LOST, comes_back=comes_back), ("worker-0", "node-lost", "container died with exit code 1")
    tries: list[Any] = []

    def reconnect(seconds: float) -> None:
        """Record the attempt; reconnect at once if ``comes_back``, else from the third one on."""
        tries.append(seconds)
        way.comes_back = len(tries) > 2 or comes_back
        Way.reconnect(way, seconds)

    way.reconnect = reconnect  # type: ignore[method-assign]
    assert first_told(Listened("h1", way, died), other()) == died  # type: ignore[arg-type]
    assert len(tries) == (1 if comes_back else 3)


def test_a_container_that_died_unheard_is_told_of_once_its_host_is_back() -> None:
    """A container that exited while the connection was broken is node-lost after reconnecting."""
    engine, way = Listened("h1", Way(LOST)), Way(LOST)
    engine.ways = {"h1": way}

    def reconnect(seconds: float) -> None:
        """Let the container have exited, then reconnect."""
        (node,) = engine.seen.containers
        engine.seen = replace(engine.seen, containers=(replace(node, state="exited"),))
        Way.reconnect(way, seconds)

    way.reconnect = reconnect  # type: ignore[method-assign]
    node, cause, message = first_told(engine, other())
    assert (node, cause) == ("worker-0", "node-lost")
    assert message == "container died while the connection to its host was broken"
