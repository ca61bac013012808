"""State of a live page, in named parts: each browser gets, as server-sent events, the parts that changed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from labctl.ui.site import event

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import StreamingResponse

TICK = 0.25
"""Seconds between checks for changes."""


class Part(Struct, frozen=True):
    """A part as JSON, and the version of the page that it came with."""

    version: int
    content: bytes


class PageState:
    """Parts of a page by name; any thread may put them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._version = 0
        self._mark = secrets.token_hex(4)
        """Prefix of event ids, by which those of an earlier server at this address are recognized."""

    def put(self, parts: Mapping[str, object]) -> None:
        """Replace parts; those that are equal do not count as changed."""
        with self._lock:
            self._version += 1
            for name, value in parts.items():
                content = msgspec.json.encode(value)
                before = self._parts.get(name)
                if before is None or before.content != content:
                    self._parts[name] = Part(self._version, content)

    def keep(self, names: set[str], prefix: str) -> None:
        """Forget the parts that begin with a prefix, except these."""
        with self._lock:
            for name in [name for name in self._parts if name.startswith(prefix) and name not in names]:
                del self._parts[name]

    def since(self, version: int) -> tuple[dict[str, Raw], int]:
        """Return the parts that changed after a version, and the latest version."""
        with self._lock:
            changed = {name: Raw(part.content) for name, part in self._parts.items() if part.version > version}
            return changed, self._version

    def identity(self, version: int) -> str:
        """Return the id of an event."""
        return f"{self._mark}-{version}"

    def version_of(self, identity: str) -> int:
        """Return the version that an event's id names; 0 for one of another server."""
        mark, _, version = identity.partition("-")
        return int(version) if mark == self._mark and version.isdecimal() else 0


def stream(page: PageState, request: Request, work: Callable[[], object]) -> StreamingResponse:
    """Return a stream of events ``parts``, from the last that the page had; ``work`` is called while it is open."""
    from starlette.responses import StreamingResponse

    last = page.version_of(request.headers.get("last-event-id", ""))
    return StreamingResponse(_events(page, last, work), media_type="text/event-stream")


async def _events(page: PageState, version: int, work: Callable[[], object]) -> AsyncIterator[str]:
    """Yield an event for each change, until the page is closed."""
    import anyio

    while True:
        work()
        changed, version = page.since(version)
        if changed:
            yield event("parts", changed, page.identity(version))
        await anyio.sleep(TICK)
