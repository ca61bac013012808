"""What befalls a lab's containers, by a daemon's events and by what the checks of an unhealthy one go on to say."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from typing import Any

from labctl.engines.state import Container, ObservedState, lost
from labctl.errors import HostError
from labctl.model import Cause

# Seconds between two health checks of a node.
INTERVAL = 15
# Seconds in which a container that leaves its network because it ends has ended: its death is told after that.
ENDING = 2

Loss = tuple[str, Cause, str]


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
            yield from watched.cut_off()
            continue
        if event is None:
            return
        yield from watched.hear(event)


class _Watched:
    """The containers of a lab by their ids, and what is to be looked at again of some."""

    def __init__(self, containers: Iterable[Container] = ()) -> None:
        self._nodes = {one.id: one.node for one in containers}
        # One that turned unhealthy a moment before gives no event any more.
        self._unhealthy = {one.id: one.node for one in containers if one.health == "unhealthy"}
        self._disconnected: dict[str, str] = {}

    @property
    def patience(self) -> float | None:
        """Seconds until something is to be looked at again without an event."""
        return ENDING if self._disconnected else INTERVAL if self._unhealthy else None

    def hear(self, event: dict[str, Any]) -> Iterator[Loss]:
        identity, attributes = event["Actor"]["ID"], event["Actor"]["Attributes"]
        node = attributes.get("labctl.node", "?")
        if event["Action"] == "disconnect":
            if attributes.get("container") in self._nodes:
                self._disconnected[attributes["container"]] = attributes["name"]
        elif event["Action"] == "oom":
            yield node, "out-of-memory", "container ran out of memory"
        elif event["Action"] == "die":
            self._unhealthy.pop(identity, None)
            self._disconnected.pop(identity, None)
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

    def cut_off(self) -> Iterator[Loss]:
        """Those that left their network and live."""
        for identity, network in self._disconnected.items():
            yield self._nodes[identity], "node-lost", f"container was disconnected from network {network}"
        self._disconnected = {}


def _heard(events: Iterable[dict[str, Any]]) -> queue.SimpleQueue[dict[str, Any] | None]:
    """The events as they come, and None at their end: one can wait for the next of these no longer than one wants."""
    heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for event in events:
                heard.put(event)
        except (OSError, ValueError, HTTPException):
            pass  # The connection is lost, or the last event is cut off: they end.
        finally:
            heard.put(None)

    threading.Thread(target=listen, daemon=True).start()
    return heard
