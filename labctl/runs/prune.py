"""`labctl runs prune`: choose the runs to remove, and remove their records."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from labctl.records import store
from labctl.system import filelock, files


class PrunedRuns(Struct, frozen=True):
    """Runs to remove, the oldest first, and the number of finished runs that are kept."""

    removed: tuple[str, ...]
    kept: int


def choose(lab: Path, keep: int) -> PrunedRuns:
    """Return done runs to remove (not the latest ``keep``, resumed, locked ones), and how many stay; delete none."""
    needed = {store.job(store.directory(lab, run_id)).resumed.partition("/")[0] for run_id in store.unjudged(lab)}
    ended = [run_id for run_id in store.ids(lab) if store.state(lab, run_id) == "done"]
    candidates = [run_id for run_id in reversed(ended[keep:]) if run_id not in needed]
    old = [run_id for run_id in candidates if not filelock.is_held(store.lock(lab, run_id))]
    return PrunedRuns(tuple(old), len(ended) - len(old))


def remove(lab: Path, run_id: str) -> None:
    """Delete a run's record and outputs, its result last. HostError if that fails, LockHeld if it is in use."""
    path = store.directory(lab, run_id)
    with store.recording(lab, run_id):
        if store.outputs(lab, run_id).is_dir():
            files.remove(store.outputs(lab, run_id))
        # The result last: with it, what is left where this is cut short is a run that has ended, for the next time.
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == store.RESULT):
            files.remove(entry)
        path.rmdir()
