"""`labctl runs prune`: which records of runs are removed, and how."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from labctl.records import store
from labctl.system import filelock, files


class PrunedRuns(Struct, frozen=True):
    """The runs whose records are removed, the oldest first, and how many that have ended are kept."""

    removed: tuple[str, ...]
    kept: int


def choose(lab: Path, keep: int) -> PrunedRuns:
    """The oldest runs that were judged, all but so many; none from which one that is under way goes on."""
    needed = {store.job(store.directory(lab, run_id)).resumed.partition("/")[0] for run_id in store.unjudged(lab)}
    ended = [run_id for run_id in store.ids(lab) if store.state(lab, run_id) == "done"]
    old = [one for one in reversed(ended[keep:]) if one not in needed and not filelock.is_held(store.lock(lab, one))]
    return PrunedRuns(tuple(old), len(ended) - len(old))


def remove(lab: Path, run_id: str) -> None:
    """Remove all that a run has left. HostError for what cannot be removed."""
    path = store.directory(lab, run_id)
    with store.recording(lab, run_id):
        if store.outputs(lab, run_id).is_dir():
            files.remove(store.outputs(lab, run_id))
        # The result last: with it, what is left where this is cut short is a run that has ended, for the next time.
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == store.RESULT):
            files.remove(entry)
        path.rmdir()
