"""Earlier runs that may have left processes or results on nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from labctl.records import store
from labctl.records.active import ActiveRun

UNREACHED: Mapping[str | None, str] = {"node-lost": "it lost a node", "stalled": "it stalled"}
"""Causes of a run's end after which a node may still have its processes, in words."""


def unfinished(lab: Path, active: Mapping[str, ActiveRun], among: Iterable[str]) -> dict[str, str]:
    """Map runs to end before another to reasons: the last if it lost a node or stalled, and orphans ``among``.

    Ask the backend for ``active`` after ``among`` are known: others may have been launched since.
    """
    orphaned = [run_id for run_id in among if store.state(lab, run_id, active) == "orphaned"]
    return {**out_of_reach(lab), **dict.fromkeys(orphaned, "its launcher was restarted")}


def out_of_reach(lab: Path) -> dict[str, str]:
    """Map the last judged run to why it may have left processes (lost node, stall); empty if it did not."""
    for run_id in store.ids(lab):
        if result := store.read_result(lab, run_id):
            # The agent has ended the ranks of a stalled run that it could look at.
            was_ended = result.cause == "stalled" and result.hang and result.hang.kind != "node-unreached"
            was_left = result.cause in UNREACHED and not was_ended
            return {run_id: UNREACHED[result.cause]} if was_left else {}
    return {}
