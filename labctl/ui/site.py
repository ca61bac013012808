"""The served site: its lab, and how pages, JSON and errors are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from labctl.config.context import Context
from labctl.errors import ConfigError, LabError
from labctl.reports import page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response

PAGES = Path(__file__).parent / "pages"
STATIC = (Path(__file__).parent / "static", Path(page.__file__).parent / "static")
"""Folders of the scripts and styles of pages."""


class Site(Struct, frozen=True, kw_only=True):
    """A lab's pages, below the address ``/TOKEN``."""

    context: Context
    lab: str
    """Name of the lab."""
    token: str

    @property
    def root(self) -> str:
        """Return the path that all addresses begin with."""
        return f"/{self.token}"

    @property
    def directory(self) -> Path:
        """Return the lab's directory."""
        return self.context.directory

    def page(self, name: str, *, status: int = 200, **data: object) -> HTMLResponse:
        """Return a page of a template in ``pages/`` or of the reports."""
        from starlette.responses import HTMLResponse

        return HTMLResponse(page.render(name, PAGES, site=self, **data), status)


def as_json(answer: object, status: int = 200) -> Response:
    """Return an answer as JSON."""
    from starlette.responses import Response

    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def whole(values: Mapping[str, str], name: str) -> int | None:
    """Return a parameter or header as a whole number; None without it. ConfigError if it is none."""
    text = values.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ConfigError(f"{name}={text}: not a number", hint=f"{name}=100")
    return int(text)


def event(name: str, data: object, identity: str = "") -> str:
    """Return a server-sent event; a page that connects again sends the last id that is not empty."""
    identified = f"id: {identity}\n" if identity else ""
    return f"event: {name}\n{identified}data: {msgspec.json.encode(data).decode()}\n\n"


def error_response(site: Site, request: Request, error: LabError) -> Response:
    """Return an error of labctl."""
    return _problem(site, request, error, 404 if isinstance(error, ConfigError) else 503)


def failure_response(site: Site, request: Request, error: Exception) -> Response:
    """Return a bug of labctl, whose traceback is printed where the server runs."""
    failure = LabError(f"labctl failed: {error!r}", hint="see the traceback in the terminal of `labctl ui`")
    return _problem(site, request, failure, 500)


def _problem(site: Site, request: Request, error: LabError, status: int) -> Response:
    """Return an error: as a page for a person, as JSON for a script."""
    problem: Mapping[str, str] = {"message": error.message, "hint": error.hint}
    if "text/html" in request.headers.get("accept", ""):
        return site.page("error.html.j2", status=status, **problem)
    return as_json({"error": problem}, status)
