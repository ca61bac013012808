"""The report of runs as one file, to keep or to send."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labctl.reports import runs as reports
from labctl.ui.site import Site

if TYPE_CHECKING:
    from starlette.responses import Response

    from labctl.runs.compare import RecordedRun

DRAWING = threading.Lock()
"""Held while charts are drawn: matplotlib does that in one thread at a time."""


def response(site: Site, runs: Sequence[RecordedRun]) -> Response:
    """Return the report of runs to save, without links to files of their records."""
    from starlette.responses import HTMLResponse

    with DRAWING:
        report = reports.of_runs(site.directory, runs, linked=False)
    name = f"{reports.name_of(runs)}.html"
    return HTMLResponse(report.html, headers={"content-disposition": f'attachment; filename="{name}"'})
