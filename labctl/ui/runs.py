"""The page of all runs: a list to sort and filter, live."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from labctl.errors import LabError
from labctl.runs import judge, opening
from labctl.system.parallel import begin
from labctl.ui.index import Index
from labctl.ui.site import Site, as_json, event, whole

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

INTERVAL = 2
"""Seconds between two looks at the runs, by all open pages together."""
ASKING = 10
"""Seconds between two questions to the nodes about the same runs: each takes a tenth of a second of a core."""
ANSWERING = 1
"""Seconds that a look waits for the nodes: a host that does not answer would hold up the list for 20."""
SHORT = 0.2
"""Seconds that a page waits for the look of another at least."""


class Matching(Struct, frozen=True):
    """Ids of the runs that match the terms that were asked for, the latest first."""

    runs: list[str]
    unknown: dict[str, str]
    """Names in the terms that no run has, each with the most similar name, which is empty if none is similar."""


def routes(site: Site) -> list[BaseRoute]:
    """Return the addresses of the list of runs."""
    from starlette.routing import Route

    pages = ListPages(site)
    return [
        Route("/", pages.page),
        Route("/runs.json", pages.rows),
        Route("/column.json", pages.column),
        Route("/names.json", pages.names),
        Route("/events", pages.events),
    ]


class ListPages:
    """Answers to requests for the list of runs."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._listing = Listing(site)

    def page(self, _: Request) -> Response:
        """Return the page."""
        return self._site.page("list.html.j2", here="/")

    def rows(self, request: Request) -> Response:
        """Return the rows of the latest ``limit`` runs, or of all; for terms the ids of the runs that match them."""
        index = self._listing.index
        if terms := request.query_params.getlist("term"):
            return as_json(Matching(index.matching(terms), index.unknown(terms)))
        return as_json(index.latest(whole(request.query_params, "limit")))

    def column(self, request: Request) -> Response:
        """Map ids of runs to their metric, argument or setting of a name, of those since a change if it is given."""
        since = whole(request.query_params, "since")
        return as_json(self._listing.index.column(request.query_params.get("name", ""), since or 0))

    def names(self, _: Request) -> Response:
        """Return the names of all metrics, arguments and settings."""
        return as_json(self._listing.index.names())

    async def events(self, request: Request) -> Response:
        """Stream the rows that change, those since the last event or the rows of the page first."""
        from starlette.responses import StreamingResponse

        last = whole(request.headers, "last-event-id") or whole(request.query_params, "since")
        return StreamingResponse(changes(self._listing, last or 0), media_type="text/event-stream")


class Listing:
    """Rows of the runs, which all open pages look at together."""

    def __init__(self, site: Site) -> None:
        self.index = Index(site.directory)
        self._context = site.context
        self._looking = threading.Lock()
        self._looked = 0.0
        self._asked: list[str] = []
        self._asked_at = 0.0
        self._answer: Future[None] | None = None

    def look(self) -> None:
        """Read what has changed, unless another page does, or did within INTERVAL; judge runs that have ended."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self._looked + INTERVAL:
                self._look()
                self._looked = time.monotonic()
        finally:
            self._looking.release()

    def pause(self) -> float:
        """Return the seconds until the next look, or until that of another page may have ended."""
        return max(SHORT, self._looked + INTERVAL - time.monotonic())

    def _look(self) -> None:
        """Read what has changed, and ask the nodes for runs without a result, as `labctl runs` does."""
        self.index.latest()
        # Those that are launched meanwhile are not taken for lost ones.
        unjudged = self.index.without_result()
        if not unjudged or (unjudged == self._asked and time.monotonic() < self._asked_at + ASKING):
            return
        if not self._answer or self._answer.done():
            self._asked, self._asked_at = unjudged, time.monotonic()
            self._answer = begin(partial(self._ask, unjudged))
        if wait((self._answer,), ANSWERING).done:
            # An error of labctl itself is raised.
            self._answer.result()

    def _ask(self, unjudged: Sequence[str]) -> None:
        """Ask the nodes for runs, and judge those that have ended."""
        try:
            with opening.connected(self._context, demand=False) as backend:
                self.index.keep_states(unjudged, judge.judge_ended(backend, unjudged))
        except LabError:
            self.index.keep_states((), {})


async def changes(listing: Listing, since: int) -> AsyncIterator[str]:
    """Yield the rows that change after a change, as server-sent events, until the page is closed."""
    import anyio
    from anyio import to_thread

    while True:
        # A look that judges a run may take long: it goes on when the page is closed.
        await to_thread.run_sync(listing.look, abandon_on_cancel=True)
        rows = listing.index.since(since)
        if rows.runs or rows.removed:
            since = rows.change
            yield event("runs", rows, str(since))
        await anyio.sleep(listing.pause())
