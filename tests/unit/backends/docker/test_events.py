"""Container events of a run, from planted events of a daemon."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.builders import lab, observed
from urllib3.exceptions import ProtocolError

from labctl.backends.docker import api, events
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.state import ObservedState
from labctl.errors import HostError

SLOW = "Health check exceeded timeout (15s)"
LOST = "device lost: /dev/nvidia0 is gone; `labctl up` recreates this node"
LIMIT = 60.0
"""Time limit of a test in seconds."""


class Daemon:
    """Stand-in for the SDK's client: planted events, and the health checks of worker-0, one after the other."""

    def __init__(
        self, *events: tuple[str, str] | bytes, checks: tuple[str | Exception, ...] = (), status: str = "healthy"
    ):
        """Plant events, worker-0's health checks and its health; without checks the events end at once."""
        self._events, self._checks, self._status = events, deque(checks), status
        self._all_read = threading.Event()
        self.asked = 0
        if not checks:
            self._all_read.set()

    @contextmanager
    def api(self) -> Iterator[Daemon]:
        """Yield this stand-in as the client."""
        yield self

    @contextmanager
    def event_lines(self, **_: object) -> Iterator[Iterator[bytes]]:
        """Yield the planted events as parsed lines."""
        yield api.lines(self.stream())

    def stream(self) -> Iterator[bytes]:
        """Yield the events; end once the last check has been read."""
        for event in self._events:
            if isinstance(event, bytes):
                yield event + b"\n"
                continue
            node, action = event
            if action == "disconnect":
                about = {"Type": "network", "Actor": {"ID": "1", "Attributes": {"container": node, "name": "lab-net"}}}
            else:
                of = "another" if node == "theirs" else "demo"
                attributes = {"labctl.node": node, "labctl.lab": of, "exitCode": "137"}
                about = {"Type": "container", "Actor": {"ID": node, "Attributes": attributes}}
            yield json.dumps({"Action": action, **about}).encode() + b"\n"
        assert self._all_read.wait(LIMIT), "nobody asked for the checks"

    def networks(self, **_: object) -> list[dict[str, Any]]:
        return []

    def containers(self, **_: object) -> list[dict[str, Any]]:
        """Return worker-0 as the only container, running for 2 minutes with the planted health."""
        labels = {"labctl.node": "worker-0", "labctl.role": "worker"}
        status = f"Up 2 minutes ({self._status})"
        return [{"Id": "worker-0", "Labels": labels, "Status": status, "State": "running", "ImageID": "1"}]

    def inspect_container(self, _: str) -> dict[str, Any]:
        """Return a container with the next health check, or raise it if it is an error; the last one stays."""
        self.asked += 1
        answer = self._checks.popleft()
        if not self._checks:
            self._checks.append(answer)
            self._all_read.set()
        if isinstance(answer, Exception):
            raise answer
        limits = dict.fromkeys(("Memory", "NanoCpus", "CpuQuota", "CpuShares"), 0)
        return {
            "State": {"Health": {"Log": [{"Output": f"{answer}\n"}]}},
            "HostConfig": {**limits, "PidsLimit": None, "CpusetCpus": ""},
            "NetworkSettings": {"Networks": {}},
        }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check unhealthy nodes each 0.01 s."""
    monkeypatch.setattr(events, "INTERVAL", 0.01)


def losses_of(daemon: Daemon) -> list[tuple[str, str, str]]:
    """Return the losses that the engine reports of lab `demo` with this daemon."""
    engine: Any = DockerEngine()
    engine._api = daemon.api
    return [(node, str(cause), message) for node, cause, message in engine.events("demo")]


UNHEALTHY = ("worker-0", "health_status: unhealthy")
HEALTHY = ("worker-0", "health_status: healthy")
DIED: events.Loss = ("worker-1", "node-lost", "container died with exit code 137")
GONE: events.Loss = ("worker-0", "device-lost", LOST)
BUSY = HostError("Docker Engine does not answer: timed out")


def test_deaths_and_lack_of_memory_are_told_in_order() -> None:
    """Events `oom` and `die` are losses: out-of-memory, and node-lost with exit code 137."""
    losses = losses_of(Daemon(("worker-0", "oom"), ("worker-1", "die")))
    assert losses == [("worker-0", "out-of-memory", "container ran out of memory"), DIED]


def test_what_befalls_containers_of_others_is_not_told() -> None:
    """Events of another lab's containers are no losses."""
    assert losses_of(Daemon(("theirs", "die"), ("theirs", "disconnect"), ("worker-1", "die"))) == [DIED]


def test_a_container_that_ends_is_not_told_as_disconnected() -> None:
    """`disconnect` followed by `die` is one loss, that the container died."""
    assert losses_of(Daemon(("worker-0", "disconnect"), ("worker-0", "die"))) == [("worker-0", *DIED[1:])]


def test_a_container_that_was_disconnected_and_lives_is_lost_to_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was disconnected from the lab's network and still runs is node-lost."""
    monkeypatch.setattr(events, "ENDING", 0.01)
    over = threading.Event()

    def endless() -> Iterator[dict[str, Any]]:
        """Yield the event of a disconnection, then wait."""
        attributes = {"container": "id-worker-0", "name": "labctl-demo"}
        yield {"Action": "disconnect", "Actor": {"ID": "id-network", "Attributes": attributes}}
        assert over.wait(LIMIT)

    losses = events.watch(endless(), lambda: observed(lab()), lambda _: "")
    assert next(losses) == ("worker-0", "node-lost", "container was disconnected from network labctl-demo")
    over.set()


def paused(*actions: str) -> list[tuple[str, str, str]]:
    """Return the losses that `watch` reports if worker-0 has these actions, and worker-1 dies later."""

    def all_of_them() -> Iterator[dict[str, Any]]:
        """Yield worker-0's actions; yield worker-1's death once a loss was reported or worker-0 resumed."""
        attributes = {"labctl.node": "worker-0", "name": "labctl-demo-worker-0-1"}
        for action in (*actions, "die"):
            if action == "die":
                heard_out.wait(LIMIT)
                attributes = {"labctl.node": "worker-1", "exitCode": "137"}
            yield {"Action": action, "Actor": {"ID": attributes["labctl.node"], "Attributes": attributes}}

    heard_out, losses = threading.Event(), []
    if "unpause" in actions:
        heard_out.set()
    for node, cause, message in events.watch(all_of_them(), ObservedState, lambda _: ""):
        losses.append((node, str(cause), message))
        heard_out.set()
    return losses


def test_a_container_that_stays_paused_is_lost_to_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that stays paused is stalled, with `docker unpause` in the message."""
    monkeypatch.setattr(events, "PAUSED", 0.01)
    message = "container is paused; to resume it: docker unpause labctl-demo-worker-0-1"
    assert paused("pause") == [("worker-0", "stalled", message), DIED]


def test_a_container_that_is_paused_for_a_moment_is_not_lost() -> None:
    """A container that is paused and resumed is no loss."""
    assert paused("pause", "unpause") == [DIED]


@pytest.mark.parametrize("lost", [ConnectionResetError(), ProtocolError()])
def test_events_end_where_the_connection_is_lost(lost: Exception) -> None:
    """The losses end without an error if the connection to the daemon is lost."""

    def broken() -> Iterator[dict[str, Any]]:
        """Yield a death, then raise the error."""
        yield {"Action": "die", "Actor": {"ID": "1", "Attributes": {"labctl.node": "worker-1", "exitCode": "137"}}}
        raise lost

    assert list(events.watch(broken(), ObservedState, lambda _: "")) == [DIED]


def test_a_check_that_names_a_loss_is_told_once() -> None:
    """An unhealthy node whose check tells of a lost device is one loss."""
    assert losses_of(Daemon(UNHEALTHY, checks=(LOST,))) == [GONE]


def test_a_check_that_was_only_too_slow_is_no_loss() -> None:
    """Health checks that timed out are no loss."""
    assert losses_of(Daemon(UNHEALTHY, checks=(SLOW, SLOW, SLOW))) == []


def test_a_loss_after_a_check_that_was_too_slow_is_told() -> None:
    """A check that tells of a lost device after two that timed out is a loss."""
    assert losses_of(Daemon(UNHEALTHY, checks=(SLOW, SLOW, LOST))) == [GONE]


def test_a_node_that_was_unhealthy_before_and_is_lost_later_is_told() -> None:
    """A node that was unhealthy before the watch began and then loses its device is a loss."""
    assert losses_of(Daemon(checks=(SLOW, SLOW, SLOW, LOST), status="unhealthy")) == [GONE]


def test_a_container_that_died_before_the_subscription_is_lost() -> None:
    """A container that had exited before the watch began is node-lost."""
    state = observed(lab(), worker_1={"state": "exited"})
    assert list(events.watch([], lambda: state, lambda _: "")) == [("worker-1", "node-lost", "container exited")]


def test_a_daemon_that_does_not_answer_ends_no_watch() -> None:
    """If the daemon does not answer about a check twice, losses are still reported."""
    losses = losses_of(Daemon(UNHEALTHY, ("worker-1", "die"), checks=(BUSY, BUSY, LOST)))
    assert sorted(losses) == [GONE, DIED]


def test_a_daemon_that_does_not_answer_at_first_ends_no_watch() -> None:
    """If the daemon does not answer about an unhealthy node at first, other losses are still reported."""
    assert losses_of(Daemon(("worker-1", "die"), checks=(BUSY,), status="unhealthy")) == [DIED]


def test_a_node_that_is_healthy_again_is_not_asked_about_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `healthy` a node that was unhealthy is not checked again."""
    monkeypatch.setattr(events, "INTERVAL", LIMIT)
    daemon = Daemon(UNHEALTHY, HEALTHY, ("worker-1", "die"), checks=(SLOW,))
    assert losses_of(daemon) == [DIED]
    assert daemon.asked == 1


@pytest.mark.parametrize(
    "odd",
    [b"[]", b"{}", b"7", b"[" * 100_000, b'{"Actor": {"Attributes": 7}}', b"x" * 3_000_000, b'{"Actor": null}'],
)
def test_what_is_no_event_ends_the_watch_without_a_word(odd: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """An event that is invalid or huge ends the losses, without an error on stderr."""
    assert losses_of(Daemon(("worker-1", "die"), odd, ("worker-1", "die"))) == [DIED]
    assert capsys.readouterr().err == ""


class Stream:
    """An engine with planted losses; an error in their place ends them."""

    def __init__(self) -> None:
        self.asked = 0
        self.losses: queue.SimpleQueue[events.Loss | None] = queue.SimpleQueue()

    def events(self, lab: str) -> Iterator[events.Loss]:  # noqa: ARG002
        """Yield the planted losses until None."""
        self.asked += 1
        yield from iter(self.losses.get, None)


def fails(*_: str) -> None:
    """Raise HostError."""
    raise HostError("it could not be told")


def test_all_who_follow_runs_hear_of_a_loss_by_one_connection() -> None:
    """All subscribers get a loss from one connection, though one of them raises; none after its block."""
    stream, first, second = Stream(), queue.SimpleQueue[events.Loss](), queue.SimpleQueue[events.Loss]()
    losses = events.Losses(stream, "demo")
    with losses.subscribed(lambda *loss: first.put(loss)):
        with losses.subscribed(fails), losses.subscribed(lambda *loss: second.put(loss)):
            stream.losses.put(DIED)
            assert first.get(timeout=LIMIT) == second.get(timeout=LIMIT) == DIED
        stream.losses.put(GONE)
        assert first.get(timeout=LIMIT) == GONE
    assert (second.empty(), stream.asked) == (True, 1)
    stream.losses.put(None)


def test_losses_are_listened_to_again_once_their_connection_has_ended() -> None:
    """After the connection has ended, a new subscriber opens a second one and gets its losses."""
    stream, received = Stream(), queue.SimpleQueue[events.Loss]()
    losses, before = events.Losses(stream, "demo"), threading.enumerate()
    with losses.subscribed(lambda *loss: received.put(loss)):
        (listener,) = (thread for thread in threading.enumerate() if thread not in before)
        stream.losses.put(None)
        listener.join(LIMIT)
    stream.losses.put(DIED)
    with losses.subscribed(lambda *loss: received.put(loss)):
        assert received.get(timeout=LIMIT) == DIED
    assert stream.asked == 2
    stream.losses.put(None)
