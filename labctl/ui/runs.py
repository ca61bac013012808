"""The page of all runs: a list to sort and filter, live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl import flows
from labctl.ui.site import Site, as_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute


def routes(site: Site) -> list[BaseRoute]:
    """Return the addresses of the list of runs."""
    from starlette.routing import Route

    def page(_: Request) -> Response:
        """Return the page."""
        return site.page("list.html.j2", here="/")

    def rows(_: Request) -> Response:
        """Return the rows of the list."""
        return as_json(flows.runs(site.context))

    return [Route("/", page), Route("/runs.json", rows)]
