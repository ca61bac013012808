"""The page of a run, live while the run is under way: its events, log and actions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import flows
from labctl.errors import ConfigError
from labctl.jobs.job import GRACE
from labctl.records import store
from labctl.reports import runs as reports
from labctl.runs import compare, opening
from labctl.system.decode import decode
from labctl.ui import batches, download, events, files, log, so_far
from labctl.ui.site import Site, as_json, whole
from labctl.ui.watcher import Watchers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

LINES = 300
"""Lines of a window of the log unless a page asks for fewer or more."""


class NoteText(Struct, frozen=True):
    """Text of a note that a page sends."""

    text: str


def routes(site: Site, watchers: Watchers) -> list[BaseRoute]:
    """Return the addresses of a run."""
    from starlette.routing import Route

    pages = RunPages(site, watchers)
    return [
        Route("/run/{run}", pages.page),
        Route("/run/{run}/events", pages.events),
        Route("/run/{run}/report", pages.report),
        Route("/run/{run}/log", pages.log),
        Route("/run/{run}/stop", pages.stop, methods=["POST"]),
        Route("/run/{run}/stacks", pages.stacks, methods=["POST"]),
        Route("/run/{run}/note", pages.note, methods=["POST"]),
        *files.routes(site, watchers),
    ]


class RunPages:
    """Answers to requests for a run. ConfigError if there is none of the name in the address."""

    def __init__(self, site: Site, watchers: Watchers) -> None:
        self._site = site
        self._watchers = watchers

    def page(self, request: Request) -> Response:
        """Return the page; redirect from another name of the run, such as ``latest``."""
        from starlette.responses import RedirectResponse

        run_id = self._run_id(request)
        if run_id != request.path_params["run"]:
            return RedirectResponse(f"{self._site.root}/run/{quote(run_id)}")
        return self._site.page("run.html.j2", **content(self._site, run_id, self._watchers.folder(run_id)))

    def events(self, request: Request) -> Response:
        """Stream the events of a run under way that the page has not received."""
        from starlette.responses import StreamingResponse

        run_id = self._run_id(request)
        store.load_job(self._site.directory, run_id)
        place = request.headers.get("last-event-id") or request.query_params.get("place", "")
        return StreamingResponse(events.stream(self._watchers, run_id, place), media_type="text/event-stream")

    def report(self, request: Request) -> Response:
        """Return the report of the run, which has ended, as one file."""
        return download.response(self._site, opening.records(self._site.context, [self._run_id(request)]))

    def log(self, request: Request) -> Response:
        """Return a window of the log, or the lines with a text."""
        folder = self._watchers.folder(self._run_id(request))
        return as_json(log_lines(folder, request.query_params))

    def stop(self, request: Request) -> Response:
        """Stop the run; answer when it has ended."""
        return as_json({"verdict": flows.stop(self._site.context, self._run_id(request), GRACE).verdict})

    def stacks(self, request: Request) -> Response:
        """Return what the ranks are waiting for."""
        return as_json(flows.stacks(self._site.context, self._run_id(request)))

    async def note(self, request: Request) -> Response:
        """Keep a note on the run."""
        from anyio.to_thread import run_sync

        text = note_text(await request.body())
        return as_json(await run_sync(flows.note, self._site.context, request.path_params["run"], text))

    def _run_id(self, request: Request) -> str:
        """Return the id of the run that an address names."""
        return store.find(self._site.directory, request.path_params["run"])


def content(site: Site, run_id: str, growing: Path) -> dict[str, Any]:
    """Return the data of the page of a run; a run without a result is shown as under way.

    ``growing`` is the folder in which its log and metrics are complete.
    """
    shown = store.read(site.directory, run_id)
    result = shown.result or so_far.provisional(site, shown.summary)
    recorded = compare.read(site.directory, result)
    entries, _ = files.list_record(store.directory(site.directory, run_id), growing)
    page = reports.served(site.directory, [recorded], site.root)
    return {
        **page,
        # All files are listed on the page.
        "sections": [replace(section, links={}) for section in page["sections"]],
        "run_id": run_id,
        "note": shown.summary.note,
        "running": result.verdict == reports.RUNNING,
        "entries": entries,
        "batch": batches.of_run(site, run_id),
        "grace": GRACE,
        "here": "/run",
    }


def note_text(body: bytes) -> str:
    """Return the text of a note that a page sends. ConfigError if it is none."""
    try:
        return decode(body, NoteText).text
    except msgspec.MsgspecError as error:
        raise ConfigError(f"cannot read the note: {error}", hint='send {"text": "..."}') from error


def log_lines(folder: Path, query: Mapping[str, str]) -> log.Window | log.Matches:
    """Return the lines of a log that a page asks for: ``search``, ``begin`` and ``after``, or ``end`` and ``before``.

    ConfigError for a number that is none.
    """
    rank = whole(query, "rank")
    if text := query.get("search"):
        return log.search(folder, text, rank)
    begin = whole(query, "begin")
    if begin is not None:
        return log.after(folder, begin, _count(query, "after"), rank)
    return log.before(folder, whole(query, "end"), _count(query, "before"), rank)


def _count(query: Mapping[str, str], name: str) -> int:
    """Return a number of lines, from 1 to MOST_LINES."""
    number = whole(query, name)
    return max(1, min(LINES if number is None else number, log.MOST_LINES))
