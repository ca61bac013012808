"""What befalls a lab's containers, by a daemon's events and by what the checks of an unhealthy one go on to say."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from typing import Any

from labctl.engines.state import ObservedState, lost
from labctl.errors import HostError
from labctl.model import Cause

# Seconds between two health checks of a node.
INTERVAL = 15


def watch(
    events: Iterable[dict[str, Any]], observe: Callable[[], ObservedState], last_check: Callable[[str], str]
) -> Iterator[tuple[str, Cause, str]]:
    """Yield (node, cause, what happened) for each container that dies or is lost to runs, until the events end.

    The daemon tells once that one is unhealthy, also when the check was only too slow: what its later checks say is
    asked for until it is healthy again, or lost. A daemon that does not answer that ends nothing.
    """
    heard = _heard(events)
    # One that turned unhealthy a moment before gives no event any more.
    doubtful: dict[str, str] = {}
    with contextlib.suppress(HostError):
        doubtful = {one.id: one.node for one in observe().containers if one.health == "unhealthy"}
    while True:
        for identity, node in tuple(doubtful.items()):
            reason = ""
            with contextlib.suppress(HostError):
                reason = last_check(identity)
            if cause := lost(reason):
                del doubtful[identity]
                yield node, cause, reason
        try:
            event = heard.get(timeout=INTERVAL if doubtful else None)
        except queue.Empty:
            continue
        if event is None:
            return
        identity, attributes = event["Actor"]["ID"], event["Actor"]["Attributes"]
        node = attributes.get("labctl.node", "?")
        if event["Action"] == "oom":
            yield node, "out-of-memory", "container ran out of memory"
        elif event["Action"] == "die":
            doubtful.pop(identity, None)
            yield node, "node-lost", f"container died with exit code {attributes.get('exitCode')}"
        elif event["Action"].endswith(" unhealthy"):
            doubtful[identity] = node
        else:
            doubtful.pop(identity, None)


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
