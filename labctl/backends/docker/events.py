"""What befalls a lab's containers, by a daemon's events and by what the checks of an unhealthy one go on to say."""

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
# Seconds in which a container that leaves its network because it ends has ended: its death is told after that.
ENDING = 2
# Seconds that a node may be paused without a loss: `docker commit` pauses what it reads.
PAUSED = 15

Loss = tuple[str, Cause, str]


class Source(Protocol):
    """An engine, as far as it is listened to."""

    def events(self, lab: str) -> Iterator[Loss]: ...


def watch(
    events: Iterable[dict[str, Any]], observe: Callable[[], ObservedState], last_check: Callable[[str], str]
) -> Iterator[Loss]:
    """Yield (node, cause, what happened) for each container that dies or is lost to runs, until the events end.

    The daemon tells once that one is unhealthy, also when the check was only too slow: what its later checks say is
    asked for until it is healthy again, or lost. A daemon that does not answer that ends nothing. Events of networks,
    which name a container by its id, may be those of any lab.
    """
    heard = _heard(events)
    watched = _Watched()
    with contextlib.suppress(HostError):
        watched = _Watched(observe().containers)
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
    """Losses of a lab's containers for all who follow runs of it, over one subscription to each daemon."""

    def __init__(self, engine: Source, lab: str) -> None:
        self._engine, self._lab = engine, lab
        self._lock = threading.Lock()
        self._hearers: list[Callable[[str, Cause, str], None]] = []
        self._listens = False

    @contextlib.contextmanager
    def subscribed(self, hear: Callable[[str, Cause, str], None]) -> Iterator[None]:
        """Hand each loss on to this, until the block ends: node, cause, what happened."""
        with self._lock:
            self._hearers.append(hear)
            if not self._listens:
                # Connections that end from now on end with the command.
                threading.Thread(target=self._listen, daemon=True).start()
            self._listens = True
        try:
            yield
        finally:
            with self._lock:
                self._hearers.remove(hear)

    def _listen(self) -> None:
        with contextlib.suppress(Exception):
            for loss in self._engine.events(self._lab):
                with self._lock:
                    hearers = tuple(self._hearers)
                for hear in hearers:
                    # The others hear of it, too.
                    with contextlib.suppress(Exception):
                        hear(*loss)
        with self._lock:
            self._listens = False


class _Watched:
    """The containers of a lab by their ids, and what is to be looked at again of some."""

    def __init__(self, containers: Iterable[Container] = ()) -> None:
        self._nodes = {one.id: one.node for one in containers}
        # One that turned unhealthy a moment before gives no event any more.
        self._unhealthy = {one.id: one.node for one in containers if one.health == "unhealthy"}
        self._doubtful: dict[str, tuple[float, Loss]] = {}
        """Those that are lost, and how, unless they end or go on before a time."""

    @property
    def patience(self) -> float | None:
        """Seconds until something is to be looked at again without an event."""
        now = time.monotonic()
        due = [max(until - now, 0) for until, _ in self._doubtful.values()]
        return min([INTERVAL, *due] if self._unhealthy else due, default=None)

    def hear(self, event: dict[str, Any]) -> Iterator[Loss]:
        identity, attributes = event["Actor"]["ID"], event["Actor"]["Attributes"]
        node = attributes.get("labctl.node", "?")
        if event["Action"] == "disconnect":
            identity = attributes.get("container")
            if identity in self._nodes:
                what = f"container was disconnected from network {attributes['name']}"
                self._doubt(identity, ENDING, (self._nodes[identity], "node-lost", what))
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
        """Of the unhealthy those whose last check names a loss."""
        for identity, node in tuple(self._unhealthy.items()):
            reason = ""
            with contextlib.suppress(HostError):
                reason = last_check(identity)
            if cause := lost(reason):
                del self._unhealthy[identity]
                yield node, cause, reason

    def _doubt(self, identity: str, seconds: float, loss: Loss) -> None:
        self._doubtful[identity] = (time.monotonic() + seconds, loss)

    def still_lost(self) -> Iterator[Loss]:
        """Those that neither ended nor went on in their time."""
        for identity, (until, loss) in tuple(self._doubtful.items()):
            if until <= time.monotonic():
                del self._doubtful[identity]
                yield loss


def _heard(events: Iterable[dict[str, Any]]) -> queue.SimpleQueue[dict[str, Any] | None]:
    """The events as they come, and None at their end: one can wait for the next of these no longer than one wants."""
    heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
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
