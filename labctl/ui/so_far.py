"""A run under way as a record to show: with a provisional result, and its metrics so far."""

from __future__ import annotations

from labctl.model import Result
from labctl.records import store
from labctl.records.store import RunSummary
from labctl.reports import runs as reports
from labctl.runs import compare
from labctl.runs.compare import RecordedRun
from labctl.ui.site import Site
from labctl.ui.watcher import Watchers


def read(site: Site, watchers: Watchers, summary: RunSummary) -> RecordedRun:
    """Return the record of a run without a result, with the metrics that a process here has recorded so far."""
    return compare.read(site.directory, provisional(site, summary), watchers.folder(summary.run_id))


def provisional(site: Site, summary: RunSummary) -> Result:
    """Return the result of a run that has none yet, or one that cannot be read: such a run has ended."""
    is_broken = summary.state == "done"
    return Result(
        run_id=summary.run_id,
        workload=summary.workload or "unknown",
        launcher=store.job(store.directory(site.directory, summary.run_id)).launcher,
        lab=site.lab,
        verdict="UNREADABLE" if is_broken else reports.RUNNING,
        cause=None,
        message=f"`{store.RESULT}` cannot be read." if is_broken else "",
        exit_code=0,
        started=summary.started or "",
        seconds=summary.age or 0,
    )
