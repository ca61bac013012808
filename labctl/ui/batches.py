"""Batches of a lab and searches for bad nodes: their list, and the timeline of one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from labctl.batches import record, search
from labctl.batches.baseline import CHECKS
from labctl.batches.bisect import Diagnosis, shown_by
from labctl.batches.record import RECORD, Batch
from labctl.errors import ConfigError
from labctl.records import store
from labctl.system import filelock, human
from labctl.ui.site import Site, as_json
from labctl.ui.timeline import lay_out, name, table

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

OUTPUT, REPORTS = "output", "reports"
"""Folders of a lab in which batches, searches and validations are kept unless the user names others."""
ROUND = "round"
SHOWN = 50
"""Latest batches that are listed."""


class Place(Struct, frozen=True):
    """A batch or a search: its path below the lab, and the folders with its batches, in order."""

    path: str
    folders: tuple[str, ...]
    is_search: bool = False


class Finding(Struct, frozen=True, kw_only=True):
    """A bad node or link of a search, with what shows it."""

    name: str
    kind: str
    text: str


def routes(site: Site) -> list[BaseRoute]:
    """Return the addresses of batches."""
    from starlette.routing import Route

    def listing(_: Request) -> Response:
        """Return the latest batches."""
        places = sorted(find_all(site.directory).values(), key=lambda place: _changed_at(site, place), reverse=True)
        rows = [row for place in places[:SHOWN] if (row := _row(site, place))]
        return as_json({"batches": rows, "more": max(0, len(places) - SHOWN)})

    def page(request: Request) -> Response:
        """Return the page of a batch."""
        path = request.path_params["path"]
        place = find_all(site.directory).get(path)
        batches = _batches(site, place) if place else []
        if not place or not batches:
            raise ConfigError(f"batch {path} not found", hint=f"ls {OUTPUT} {REPORTS}")
        return site.page("batch.html.j2", here="", **_shown(site, place, batches, time.time()))

    return [Route("/cluster/batches.json", listing), Route("/cluster/batches/{path:path}", page)]


# --- folders -------------------------------------------------------------------------------------------------


def find_all(lab: Path) -> dict[str, Place]:
    """Return the batches and searches of a lab by path: those in output/, and the checks of validations."""
    parents = [OUTPUT, *(f"{REPORTS}/{folder}/{CHECKS}" for folder in subfolders(lab / REPORTS))]
    places: dict[str, Place] = {}
    for parent in parents:
        for folder in subfolders(lab / parent):
            if place := _place(lab, f"{parent}/{folder}"):
                places[place.path] = place
    return places


def of_run(site: Site, run_id: str) -> tuple[str, str] | None:
    """Return the path of the batch that a run belongs to, and the name of its job; None without one here."""
    request = store.job(store.directory(site.directory, run_id)).request or {}
    batch_id, _, log = str(request.get("batch", "")).partition(" ")
    if not batch_id:
        return None
    for place in find_all(site.directory).values():
        for batch in _batches(site, place):
            if batch.id == batch_id:
                return place.path, next((name(job) for job in batch.jobs if job.log == log), log)
    return None


def _place(lab: Path, path: str) -> Place | None:
    """Return the batch in a folder, or the search whose rounds are batches; None without either."""
    if (lab / path / RECORD).is_file():
        return Place(path, (path,))
    rounds = [folder for folder in subfolders(lab / path) if folder.startswith(ROUND)]
    folders = tuple(f"{path}/{folder}" for folder in sorted(rounds) if (lab / path / folder / RECORD).is_file())
    return Place(path, folders, is_search=True) if folders else None


def subfolders(parent: Path) -> list[str]:
    """Return the names of the folders in another, links left out; none if it is not there."""
    try:
        with os.scandir(parent) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _batches(site: Site, place: Place) -> list[Batch]:
    """Return the batches of a place that can be read."""
    batches: list[Batch] = []
    for folder in place.folders:
        with suppress(ConfigError, OSError):
            status = (site.directory / folder / RECORD).stat()
            batches += filter(None, [_loaded(site.directory / folder, status.st_mtime_ns, status.st_size)])
    return batches


@lru_cache(maxsize=256)
def _loaded(directory: Path, changed: int, size: int) -> Batch | None:  # noqa: ARG001 - a changed file is another key
    """Return the batch of a directory, read again when its record changed."""
    return record.load(directory)


def _changed_at(site: Site, place: Place) -> float:
    """Return the time of a batch's last change; 0 if it is gone."""
    try:
        return (site.directory / place.folders[-1] / RECORD).stat().st_mtime
    except OSError:
        return 0


# --- a row of the list ---------------------------------------------------------------------------------------


def _row(site: Site, place: Place) -> dict[str, object] | None:
    """Return a batch as the list shows it; None if it cannot be read."""
    batches = _batches(site, place)
    if not batches:
        return None
    jobs = [job for batch in batches for job in batch.jobs]
    return {
        "path": place.path,
        "kind": "bisect" if place.is_search else "batch",
        "workload": batches[0].workload,
        "began": batches[0].began,
        "state": _state(site, place, batches),
        "jobs": len(jobs),
        "passed": sum(job.verdict == "PASS" for job in jobs),
        "rounds": len(batches) if place.is_search else 0,
    }


def _state(site: Site, place: Place, batches: list[Batch]) -> dict[str, str]:
    """Return the state of a batch, as text and class."""
    if is_under_way(site.directory / place.path):
        return {"text": "running", "kind": "running"}
    if place.is_search:
        return _outcome(search.read_report(site.directory / place.path))
    jobs = batches[-1].jobs
    if not batches[-1].complete:
        return {"text": "interrupted", "kind": "unsure"}
    bad = sum(job.verdict != "PASS" for job in jobs)
    return {"text": f"{bad} failed", "kind": "failed"} if bad else {"text": "passed", "kind": "passed"}


def is_under_way(directory: Path) -> bool:
    """Return True if a labctl carries out a batch or a search."""
    return filelock.is_held(directory / ".lock")


def _outcome(report: search.BisectReport | None) -> dict[str, str]:
    """Return the result of a search, as text and class."""
    if not report:
        return {"text": "no result", "kind": "unsure"}
    kinds: Mapping[int, dict[str, str]] = {
        0: {"text": "no bad node", "kind": "passed"},
        6: {"text": "unsure", "kind": "unsure"},
        130: {"text": "interrupted", "kind": "unsure"},
    }
    bad = human.listed(finding.name for finding in _findings(report.diagnosis))
    return kinds.get(report.exit_code, {"text": f"bad: {bad}" if bad else "every run failed", "kind": "failed"})


# --- the page of a batch -------------------------------------------------------------------------------------


def _shown(site: Site, place: Place, batches: list[Batch], now: float) -> dict[str, Any]:
    """Return the data of the page of a batch."""
    directory = site.directory / place.path
    report = search.read_report(directory) if place.is_search else None
    return {
        "place": place,
        "batch": batches[0],
        "state": _state(site, place, batches),
        "live": is_under_way(directory),
        "timeline": lay_out(batches, now),
        "rows": table(batches, now, rounds=place.is_search),
        "notes": search.read_notes(directory) if place.is_search else (),
        "report": report,
        "findings": tuple(_findings(report.diagnosis)) if report else (),
    }


def _findings(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Yield the bad nodes and links of a search."""
    for bad in diagnosis.bad:
        yield Finding(name=bad.node, kind=bad.kind, text=shown_by(bad))
    for link in diagnosis.links:
        yield Finding(name=f"link {' - '.join(link.nodes)}", kind=link.kind, text=shown_by(link))
