"""Earlier runs that may have left processes or results on nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from labctl.model import Cause
from labctl.records import store
from labctl.records.active import ActiveRun

UNREACHED: tuple[Cause, ...] = ("node-lost", "stalled")
"""Causes of a run's end after which a node may still have its processes."""


def unfinished(lab: Path, active: Mapping[str, ActiveRun], among: Iterable[str]) -> dict[str, str]:
    """Return the runs to end before another, with reasons: the last if it lost a node or stalled, orphaned ``among``.

    Ask the backend for ``active`` after ``among`` are known: others may have been launched since.
    """
    orphaned = [run_id for run_id in among if store.state(lab, run_id, active) == "orphaned"]
    unreached = out_of_reach(lab)
    return {**dict.fromkeys(unreached, "it lost a node"), **dict.fromkeys(orphaned, "its launcher was restarted")}


def out_of_reach(lab: Path) -> tuple[str, ...]:
    """Return the id of the last judged run if it lost a node or stalled, and processes may be left; else empty."""
    for run_id in store.ids(lab):
        if result := store.read_result(lab, run_id):
            return (run_id,) if result.cause in UNREACHED else ()
    return ()
