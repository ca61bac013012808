from __future__ import annotations

import json
from pathlib import Path

import pytest

from labctl.errors import HostError
from labctl.records import store
from labctl.runs import prune
from labctl.system import filelock, files


def run(lab: Path, run_id: str, *, judged: bool = True, resumed: str = "") -> Path:
    """Write the record of a run, with a result if ``judged``; return its directory."""
    path = lab / "runs" / run_id
    (path / "ranks").mkdir(parents=True)
    (path / "ranks/rank-0.log").write_text("hello\n")
    (path / "started").touch()
    (path / "job.json").write_text(json.dumps({"resumed": resumed}))
    if judged:
        (path / "result.json").write_text("{}")
    return path


def test_the_oldest_runs_are_chosen_and_named(tmp_path: Path) -> None:
    """Choose with keep=2 among four runs: the two oldest."""
    for number in (3, 1, 4, 2):
        run(tmp_path, f"r{number}")
    assert prune.choose(tmp_path, 2) == prune.PrunedRuns(("r1", "r2"), 2)
    assert prune.choose(tmp_path, 4) == prune.PrunedRuns((), 4)


def test_a_run_that_is_not_judged_is_neither_counted_nor_chosen(tmp_path: Path) -> None:
    """Choose among runs without result: they are neither counted nor chosen."""
    run(tmp_path, "r1", judged=False)
    run(tmp_path, "r2")
    run(tmp_path, "r3")
    run(tmp_path, "r4", judged=False)
    assert prune.choose(tmp_path, 1) == prune.PrunedRuns(("r2",), 1)


def test_a_run_that_another_labctl_works_on_or_a_run_goes_on_from_is_kept(tmp_path: Path) -> None:
    """Choose among locked and resumed runs: both are kept; removing a locked one is HostError."""
    for run_id in ("r1", "r2", "r3", "r4"):
        run(tmp_path, run_id)
    run(tmp_path, "r5", judged=False, resumed="r1/checkpoints/step-60")
    with filelock.held(store.lock(tmp_path, "r2"), "run r2"):
        assert prune.choose(tmp_path, 1) == prune.PrunedRuns(("r3",), 3)
        with pytest.raises(HostError, match="run r2"):
            prune.remove(tmp_path, "r2")


def test_all_that_a_run_left_is_removed_and_nothing_that_it_links_to(tmp_path: Path) -> None:
    """Remove a run: its record and outputs are gone, a linked folder stays."""
    path = run(tmp_path, "r1")
    run(tmp_path, "r2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/set").touch()
    (path / "data").symlink_to(tmp_path / "data")
    store.outputs(tmp_path, "r1").mkdir(parents=True)
    prune.remove(tmp_path, "r1")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"r2", ".outputs"}
    assert not store.outputs(tmp_path, "r1").exists()
    assert (tmp_path / "data/set").exists()


def test_a_removal_that_is_cut_short_leaves_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt a removal: the run is still "done", and a second removal works."""
    path = run(tmp_path, "r1")
    remove = files.remove

    def stopped(entry: Path) -> None:
        """Remove the entry; raise KeyboardInterrupt after ranks."""
        remove(entry)
        if entry.name == "ranks":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "remove", stopped)
    with pytest.raises(KeyboardInterrupt):
        prune.remove(tmp_path, "r1")
    monkeypatch.undo()
    assert store.state(tmp_path, "r1") == "done"
    prune.remove(tmp_path, "r1")
    assert not path.exists()
