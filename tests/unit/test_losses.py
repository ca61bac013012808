"""What a run hears of its containers, from planted events of a daemon."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from labctl.engines import events as losses
from labctl.engines.docker import DockerEngine

SLOW = "Health check exceeded timeout (15s)"
LOST = "device lost: /dev/nvidia0 is gone; `labctl up` makes this node anew"
LIMIT = 60.0
"""Seconds that a test waits for what must happen."""


class Daemon:
    """As the docker SDK shows it: its events, and what the checks of worker-0 say, one after the other."""

    def __init__(self, *events: tuple[str, str], checks: tuple[str | Exception, ...] = (), status: str = "healthy"):
        self._events, self._checks, self._status = events, deque(checks), status
        self._all_read = threading.Event()
        self.asked = 0
        if not checks:
            self._all_read.set()

    def events(self, **_: Any) -> Daemon:
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """They end when the last check has been read."""
        for node, action in self._events:
            yield {"Action": action, "Actor": {"ID": node, "Attributes": {"labctl.node": node, "exitCode": "137"}}}
        assert self._all_read.wait(LIMIT), "nobody asked for the checks"

    def close(self) -> None: ...

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        labels = {"labctl.node": "worker-0", "labctl.role": "worker"}
        status = f"Up 2 minutes ({self._status})"
        return [{"Id": "worker-0", "Labels": labels, "Status": status, "State": "running", "ImageID": "1"}]

    def networks(self, **_: Any) -> list[dict[str, Any]]:
        return []

    def inspect_container(self, _: str) -> dict[str, Any]:
        self.asked += 1
        said = self._checks.popleft()
        if not self._checks:
            self._checks.append(said)
            self._all_read.set()
        if isinstance(said, Exception):
            raise said
        return {"State": {"Health": {"Log": [{"Output": f"{said}\n"}]}}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "INTERVAL", 0.01)


def heard(daemon: Daemon) -> list[tuple[str, str, str]]:
    engine = DockerEngine()
    engine.__dict__["_reader"] = daemon
    return [(node, str(cause), what) for node, cause, what in engine.losses("demo")]


UNHEALTHY = ("worker-0", "health_status: unhealthy")
HEALTHY = ("worker-0", "health_status: healthy")
DIED = ("worker-1", "node-lost", "container died with exit code 137")
GONE = ("worker-0", "device-lost", LOST)
BUSY = requests.ConnectionError("read timed out")


def test_deaths_and_lack_of_memory_are_told_in_order() -> None:
    told = heard(Daemon(("worker-0", "oom"), ("worker-1", "die")))
    assert told == [("worker-0", "out-of-memory", "container ran out of memory"), DIED]


def test_a_check_that_names_a_loss_is_told_once() -> None:
    assert heard(Daemon(UNHEALTHY, checks=(LOST,))) == [GONE]


def test_a_check_that_was_only_too_slow_is_no_loss() -> None:
    assert heard(Daemon(UNHEALTHY, checks=(SLOW, SLOW, SLOW))) == []


def test_a_loss_after_a_check_that_was_too_slow_is_told() -> None:
    assert heard(Daemon(UNHEALTHY, checks=(SLOW, SLOW, LOST))) == [GONE]


def test_a_node_that_was_unhealthy_before_and_is_lost_later_is_told() -> None:
    assert heard(Daemon(checks=(SLOW, SLOW, SLOW, LOST), status="unhealthy")) == [GONE]


def test_a_daemon_that_does_not_answer_ends_no_watch() -> None:
    told = heard(Daemon(UNHEALTHY, ("worker-1", "die"), checks=(BUSY, BUSY, LOST)))
    assert sorted(told) == [GONE, DIED]


def test_a_daemon_that_does_not_answer_at_first_ends_no_watch() -> None:
    assert heard(Daemon(("worker-1", "die"), checks=(BUSY,), status="unhealthy")) == [DIED]


def test_a_node_that_is_healthy_again_is_not_asked_about_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "INTERVAL", LIMIT)
    daemon = Daemon(UNHEALTHY, HEALTHY, ("worker-1", "die"), checks=(SLOW,))
    assert heard(daemon) == [DIED]
    assert daemon.asked == 1
