"""The page that compares runs: settings that differ, metrics with their noise, curves over each other.

Runs under way are among them, with their settings and curves so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.reports import runs as reports
from labctl.runs import compare, opening
from labctl.ui import download, so_far
from labctl.ui.site import Site
from labctl.ui.watcher import Watchers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from labctl.records.store import ShownRun
    from labctl.runs.compare import RecordedRun

MOST = 20
"""Runs to compare at most: more lines cannot be told apart."""
AGAIN = "select two or more runs in the list"
UNDER_WAY = ("running", "waiting")
"""States of runs that are compared by what there is so far."""


def routes(site: Site, watchers: Watchers) -> list[BaseRoute]:
    """Return the addresses of a comparison."""
    from starlette.routing import Route

    def page(request: Request) -> Response:
        """Return the page of the runs that are named."""
        runs, left_out = chosen(site, watchers, request.query_params.getlist("run"))
        return site.page("compare.html.j2", here="", left_out=left_out, **content(site, runs))

    def report(request: Request) -> Response:
        """Return the same as one file."""
        runs, _ = chosen(site, watchers, request.query_params.getlist("run"))
        return download.response(site, known_so_far(runs))

    return [Route("/compare", page), Route("/compare/report", report)]


def chosen(site: Site, watchers: Watchers, named: Sequence[str]) -> tuple[list[RecordedRun], list[str]]:
    """Return the records of the named runs, and a sentence on each that cannot be compared; judge ended ones.

    ConfigError for an unknown run, for fewer than two to compare, or more than MOST.
    """
    if len(named) > MOST:
        raise ConfigError(f"cannot compare {len(named)} runs: {MOST} is the limit", hint=AGAIN)
    shown = {run.summary.run_id: run for run in (opening.show(site.context, name) for name in named)}
    runs = {run_id: _record(site, watchers, run) for run_id, run in shown.items()}
    left_out = [_sentence(run_id, shown[run_id].summary.state) for run_id, run in runs.items() if not run]
    compared = [run for run in runs.values() if run]
    if len(compared) < 2:
        raise ConfigError(" ".join(["a comparison needs two runs.", *left_out]), hint=AGAIN)
    return compared, left_out


def _record(site: Site, watchers: Watchers, run: ShownRun) -> RecordedRun | None:
    """Return the record of a run that has ended or is under way; None for any other."""
    if run.result:
        return compare.read(site.directory, run.result)
    return so_far.read(site, watchers, run.summary) if run.summary.state in UNDER_WAY else None


def _sentence(run_id: str, state: str) -> str:
    """Return why a run without a result is left out."""
    reason = "its result cannot be read" if state == "done" else f"it is {state}"
    return f"Run {run_id} is left out: {reason}."


def content(site: Site, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the data of the page; no metric is judged against a run that has none yet."""
    page = reports.served(site.directory, known_so_far(runs), site.root)
    compared = page["compared"]
    growing = {group.name for group in compared.groups if set(group.verdicts) == {reports.RUNNING}}
    effects = tuple(effect for effect in compared.effects if growing.isdisjoint((effect.group, effect.against)))
    return {
        **page,
        "described": list(compare.described(replace(compared, effects=effects))),
        "under_way": [section for section in page["sections"] if section.running],
        "queries": queries([run.result.run_id for run in runs]),
    }


def queries(run_ids: Sequence[str]) -> dict[str, str]:
    """Map each run to the query of an address that compares all runs, with this one as the reference."""
    return {reference: _query(dict.fromkeys((reference, *run_ids))) for reference in run_ids}


def _query(run_ids: Iterable[str]) -> str:
    """Return the query of an address that compares runs."""
    return urlencode([("run", run_id) for run_id in run_ids])


def known_so_far(runs: Sequence[RecordedRun]) -> Sequence[RecordedRun]:
    """Return runs without the facts that those under way will have at their end only: of files, and printed notes."""
    growing = [set(run.facts) for run in runs if run.result.verdict == reports.RUNNING]
    if not growing:
        return runs
    at_end = {name for run in runs for name in run.facts if name.startswith(compare.FILE) or name in run.result.notes}
    late = at_end - growing[0].intersection(*growing)
    return [replace(run, facts={name: run.facts[name] for name in run.facts if name not in late}) for run in runs]
