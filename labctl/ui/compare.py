"""The page that compares runs: settings that differ, metrics with their noise, curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labctl.config.context import Context
from labctl.errors import ConfigError
from labctl.runs import compare, opening
from labctl.ui.site import Site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from labctl.runs.compare import RecordedRun

MOST = 20
"""Runs to compare at most: more lines cannot be told apart."""
AGAIN = "select two or more ended runs in the list"


def routes(site: Site) -> list[BaseRoute]:
    """Return the address of a comparison."""
    from starlette.routing import Route

    def page(request: Request) -> Response:
        """Return the page of the runs that are named."""
        from labctl.reports import runs as reports

        runs, left_out = chosen(site.context, request.query_params.getlist("run"))
        content = reports.served(site.directory, runs, site.root)
        return site.page("compare.html.j2", here="", left_out=left_out, **content)

    return [Route("/compare", page)]


def chosen(context: Context, named: Sequence[str]) -> tuple[list[RecordedRun], list[str]]:
    """Return the records of the named runs that have ended, and a sentence on each other; judge ended ones.

    ConfigError for an unknown run, for fewer than two that have ended, or more than MOST.
    """
    if len(named) > MOST:
        raise ConfigError(f"cannot compare {len(named)} runs: {MOST} is the limit", hint=AGAIN)
    runs = {run.summary.run_id: run for run in (opening.show(context, name) for name in named)}
    left_out = [_sentence(run_id, run.summary.state) for run_id, run in runs.items() if not run.result]
    results = [run.result for run in runs.values() if run.result]
    if len(results) < 2:
        raise ConfigError(" ".join(["a comparison needs two ended runs.", *left_out]), hint=AGAIN)
    return [compare.read(context.directory, result) for result in results], left_out


def _sentence(run_id: str, state: str) -> str:
    """Return why a run without a result is left out."""
    reason = "its result cannot be read" if state == "done" else f"it is {state}"
    return f"Run {run_id} is left out: {reason}."
