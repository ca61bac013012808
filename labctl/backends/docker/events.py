"""Watch a lab's containers for losses, by a daemon's events and by the health checks of unhealthy ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from labctl.backends.state import Container, ObservedState, lost, paused
from labctl.errors import HostError
from labctl.model import Cause

# Seconds between two health checks of a node.
INTERVAL = 15
# Seconds until a container that leaves its network because it ends has ended: that event follows.
ENDING = 2
# Seconds that a node may be paused without a loss: `docker commit` pauses the container that it reads.
PAUSED = 15

Loss = tuple[str, Cause, str]


class Source(Protocol):
    """An engine whose events can be read."""

    def events(self, lab: str) -> Iterator[Loss]: ...


def watch(
    events: Iterable[dict[str, Any]], observe: Callable[[], ObservedState], last_check: Callable[[str], str]
) -> Iterator[Loss]:
    """Yield (node, cause, text) for each container that is dead, dies or is lost to runs, until the events end.

    The daemon reports an unhealthy container once, also if the check was only too slow: its later checks are read until
    it is healthy again, or lost. If the daemon does not answer then, no run is ended. Events of networks, which name a
    container by its id, may be of any lab.
    """
    heard = _heard(events)
    containers: tuple[Container, ...] = ()
    with contextlib.suppress(HostError):
        containers = observe().containers
    # They died before the subscription, as those of a run that is followed again.
    yield from (
        (container.node, "node-lost", f"container {container.state}")
        for container in containers
        if container.state in ("exited", "dead")
    )
    watched = _Watched(containers)
    while True:
        yield from watched.lost_by_check(last_check)
        try:
            event = heard.get(timeout=watched.patience)
        except queue.Empty:
            yield from watched.still_lost()
            continue
        if event is None:
            return
        yield from watched.hear(event)


class Losses:
    """Losses of a lab's containers for all followers of its runs, by one subscription to each daemon."""

    def __init__(self, engine: Source, lab: str) -> None:
        """Start without a subscription."""
        self._engine, self._lab = engine, lab
        self._lock = threading.Lock()
        self._hearers: list[Callable[[str, Cause, str], None]] = []
        self._listens = False

    @contextlib.contextmanager
    def subscribed(self, hear: Callable[[str, Cause, str], None]) -> Iterator[None]:
        """Pass each loss (node, cause, text) to ``hear``, in another thread, until the block ends."""
        with self._lock:
            self._hearers.append(hear)
            if not self._listens:
                # The thread ends with the events: when the command closes its connections.
                threading.Thread(target=self._listen, daemon=True).start()
            self._listens = True
        try:
            yield
        finally:
            with self._lock:
                self._hearers.remove(hear)

    def _listen(self) -> None:
        """Pass each loss to all followers until the events end; errors of events and of followers are ignored."""
        with contextlib.suppress(Exception):
            for loss in self._engine.events(self._lab):
                with self._lock:
                    hearers = tuple(self._hearers)
                for hear in hearers:
                    # An error of one follower must not keep the loss from the others.
                    with contextlib.suppress(Exception):
                        hear(*loss)
        with self._lock:
            self._listens = False


class _Watched:
    """Containers of a lab by their ids, and which of them are to be looked at again."""

    def __init__(self, containers: Iterable[Container] = ()) -> None:
        """Start with the containers as observed."""
        self._nodes = {container.id: container.node for container in containers}
        # A container that turned unhealthy before the subscription causes no event.
        unhealthy = (container for container in containers if container.health == "unhealthy")
        self._unhealthy = {container.id: container.node for container in unhealthy}
        self._doubtful: dict[str, tuple[float, Loss]] = {}
        """Losses by id, each with the time to report it unless the container ends or goes on before."""

    @property
    def patience(self) -> float | None:
        """Seconds until a container is to be looked at again without an event; None if none is."""
        now = time.monotonic()
        due = [max(until - now, 0) for until, _ in self._doubtful.values()]
        return min([INTERVAL, *due] if self._unhealthy else due, default=None)

    def hear(self, event: dict[str, Any]) -> Iterator[Loss]:
        """Yield the loss that an event reports, if any; note paused, disconnected and unhealthy containers."""
        identity, attributes = event["Actor"]["ID"], event["Actor"]["Attributes"]
        node = attributes.get("labctl.node", "?")
        if event["Action"] == "disconnect":
            identity = attributes.get("container")
            if identity in self._nodes:
                reason = f"container was disconnected from network {attributes['name']}"
                self._doubt(identity, ENDING, (self._nodes[identity], "node-lost", reason))
        elif event["Action"] == "pause":
            self._doubt(identity, PAUSED, (node, "stalled", paused(attributes["name"])))
        elif event["Action"] == "unpause":
            self._doubtful.pop(identity, None)
        elif event["Action"] == "oom":
            yield node, "out-of-memory", "container ran out of memory"
        elif event["Action"] == "die":
            self._unhealthy.pop(identity, None)
            self._doubtful.pop(identity, None)
            yield node, "node-lost", f"container died with exit code {attributes.get('exitCode')}"
        elif event["Action"].endswith(" unhealthy"):
            self._unhealthy[identity] = node
        else:
            self._unhealthy.pop(identity, None)

    def lost_by_check(self, last_check: Callable[[str], str]) -> Iterator[Loss]:
        """Read the last health check of each unhealthy container; yield the losses that they name."""
        for identity, node in tuple(self._unhealthy.items()):
            reason = ""
            with contextlib.suppress(HostError):
                reason = last_check(identity)
            if cause := lost(reason):
                del self._unhealthy[identity]
                yield node, cause, reason

    def _doubt(self, identity: str, seconds: float, loss: Loss) -> None:
        """Note a loss to report after ``seconds``, unless the container ends or goes on before."""
        self._doubtful[identity] = (time.monotonic() + seconds, loss)

    def still_lost(self) -> Iterator[Loss]:
        """Yield the noted losses that are due, as their containers neither ended nor went on in time."""
        for identity, (until, loss) in tuple(self._doubtful.items()):
            if until <= time.monotonic():
                del self._doubtful[identity]
                yield loss


def _heard(events: Iterable[dict[str, Any]]) -> queue.SimpleQueue[dict[str, Any] | None]:
    """Read events in a thread; return a queue that gets each, and None at their end or if the connection breaks."""
    heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        """Put the events into the queue, then None, also if the connection to the daemon breaks."""
        try:
            from docker.errors import DockerException
            from urllib3.exceptions import HTTPError

            lost = (OSError, HTTPError, DockerException)
            no_event = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
            with contextlib.suppress(*lost, *no_event):
                for event in events:
                    heard.put(event)
        finally:
            heard.put(None)

    threading.Thread(target=listen, daemon=True).start()
    return heard
