"""The ASGI application: the routes of all pages, behind the guard."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from labctl.errors import LabError
from labctl.ui import batches, cluster, compare, labs, run, runs, validations
from labctl.ui.guard import Guard
from labctl.ui.site import STATIC, Site, error_response, failure_response
from labctl.ui.watcher import Watchers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

TYPES = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
"""Media types of scripts and styles, by suffix."""
MODULES = (runs, cluster, batches, validations, labs)
"""Modules with a function ``routes(site)``."""
OF_RUNS = (run, compare)
"""Modules with a function ``routes(site, watchers)``."""


def application(site: Site) -> Guard:
    """Return the ASGI application of a site."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes = [Route("/static/{name}", static)]
    watchers = Watchers(site.context)
    for of_runs in OF_RUNS:
        routes += of_runs.routes(site, watchers)
    for module in MODULES:
        routes += module.routes(site)
    handlers = {LabError: partial(error_response, site), Exception: partial(failure_response, site)}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, site.token)


def static(request: Request) -> Response:
    """Return a script or a style by its name."""
    from starlette.responses import FileResponse, PlainTextResponse

    files = {path.name: path for folder in STATIC for path in folder.iterdir()}
    path = files.get(request.path_params["name"])
    if not path:
        return PlainTextResponse("not found\n", 404)
    return FileResponse(path, media_type=TYPES[path.suffix], headers={"cache-control": "max-age=3600"})
