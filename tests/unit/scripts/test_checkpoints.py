"""Checkpoints without torch: completeness, and checkpoints that a rank refuses to resume from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from unit.scripts.conftest import ImportScripts

Modules = SimpleNamespace


@pytest.fixture(scope="module")
def scripts(import_scripts: ImportScripts) -> Modules:
    """Return the modules checkpoints and script_exit of workload opt."""
    return import_scripts("opt", "checkpoints", "script_exit")


@pytest.fixture
def whole(scripts: Modules, tmp_path: Path) -> Path:
    """Write a complete checkpoint of two ranks after step 60; return its folder."""
    (tmp_path / "model").mkdir()
    for rank in (0, 1):
        (tmp_path / f"model/shard-{rank}.pt").write_bytes(b"weights" * 10)
    files = scripts.checkpoints.sync(tmp_path)
    marker = {"step": 60, "world_size": 2, "facts": {"tokens": "ab12"}, "files": files}
    scripts.checkpoints.write_marker(tmp_path, marker)
    return tmp_path


def test_a_marker_lists_every_file_below_and_is_the_only_file_more(scripts: Modules, whole: Path) -> None:
    """Read the marker: it lists both shards with their sizes, and lies beside model/ alone."""
    marker = scripts.checkpoints.read_marker(whole)
    assert marker["files"] == {"model/shard-0.pt": 70, "model/shard-1.pt": 70}
    assert sorted(path.name for path in whole.iterdir()) == ["model", "whole.json"]


@pytest.mark.parametrize("name", ["whole.json", "model/shard-1.pt"])
def test_a_checkpoint_that_misses_a_file_is_refused(scripts: Modules, whole: Path, name: str) -> None:
    """Remove the marker or a shard: read_marker raises InputError that names it."""
    (whole / name).unlink()
    with pytest.raises(scripts.script_exit.InputError, match=rf"is not a complete checkpoint: {name}"):
        scripts.checkpoints.read_marker(whole)


@pytest.mark.parametrize("name", ["whole.json", "model/shard-1.pt"])
def test_a_checkpoint_that_is_cut_in_the_middle_is_refused(scripts: Modules, whole: Path, name: str) -> None:
    """Cut the marker or a shard in half: read_marker raises InputError that names it."""
    content = (whole / name).read_bytes()
    (whole / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(scripts.script_exit.InputError, match=rf"is not a complete checkpoint: {name}"):
        scripts.checkpoints.read_marker(whole)


def test_a_checkpoint_is_not_whole_from_the_moment_it_is_being_removed(
    scripts: Modules, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove a checkpoint with rmtree disabled: it counts as incomplete."""
    monkeypatch.setattr(scripts.checkpoints.shutil, "rmtree", lambda *_, **__: None)
    scripts.checkpoints.remove(whole)
    with pytest.raises(scripts.script_exit.InputError):
        scripts.checkpoints.read_marker(whole)


def test_other_data_or_ranks_than_those_of_the_checkpoint_are_refused(scripts: Modules, whole: Path) -> None:
    """Compare facts of a checkpoint: InputError names each that differs."""
    scripts.checkpoints.require_same({"ranks": 2, "tokens": "ab12"}, {"ranks": 2, "tokens": "ab12"}, whole)
    with pytest.raises(scripts.script_exit.InputError, match="ranks was 2, and is 3"):
        scripts.checkpoints.require_same({"ranks": 2}, {"ranks": 3}, whole)
    with pytest.raises(scripts.script_exit.InputError, match="tokens was None, and is cd34"):
        scripts.checkpoints.require_same({"ranks": 2}, {"ranks": 2, "tokens": "cd34"}, whole)


def arguments(**changes: object) -> Modules:
    """Return a script's arguments without saving and resuming; ``changes`` replace them."""
    return SimpleNamespace(**{"save_every": 0, "resume": None, **changes})


def test_without_save_every_nothing_is_asked_of_the_other_ranks(
    scripts: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use Checkpoints without --save-every: load() is {}, and no rank is asked for anything."""
    monkeypatch.setattr(scripts.checkpoints, "largest", lambda _: pytest.fail("the ranks talked to each other"))
    saved = scripts.checkpoints.Checkpoints({}, arguments(), {})
    assert saved.load(10) == {}
    saved.after(5, 10, lambda: pytest.fail("progress was asked for"))


def test_a_checkpoint_of_the_last_step_is_nothing_to_go_on_from(scripts: Modules, whole: Path) -> None:
    """Resume from a checkpoint of the last step: InputError."""
    saved = scripts.checkpoints.Checkpoints({}, arguments(resume=whole), {"tokens": "ab12"})
    marker = json.loads((whole / "whole.json").read_text())
    scripts.checkpoints.write_marker(whole, {**marker, "world_size": 1})
    with pytest.raises(scripts.script_exit.InputError, match="step 60 is not before the last one, 60"):
        saved.load(60)


def test_all_ranks_save_when_one_of_them_is_to_end_and_then_exit(
    scripts: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let one rank be told to end: every rank saves at that step and exits with 143."""
    done: list[object] = []
    monkeypatch.setattr(scripts.checkpoints, "largest", lambda _: 1.0)
    monkeypatch.setattr(scripts.checkpoints.Checkpoints, "_save", lambda _, *given: done.append(given))
    monkeypatch.setattr(scripts.checkpoints.os, "_exit", done.append)
    monkeypatch.setattr(scripts.checkpoints.signal, "signal", lambda *_: None)
    scripts.checkpoints.Checkpoints({}, arguments(save_every=30), {}).after(7, 10, dict)
    assert done == [(7, {}), 143]


def test_steps_between_checkpoints_save_nothing(scripts: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run nine steps with --save-every 3: steps 3 and 6 are saved, not the last."""
    done: list[int] = []
    monkeypatch.setattr(scripts.checkpoints, "largest", lambda value: value)
    monkeypatch.setattr(scripts.checkpoints.Checkpoints, "_save", lambda _, step, __: done.append(step))
    monkeypatch.setattr(scripts.checkpoints.signal, "signal", lambda *_: None)
    saved = scripts.checkpoints.Checkpoints({}, arguments(save_every=3), {})
    for step in range(1, 10):
        saved.after(step, 9, dict)
    assert done == [3, 6]


def test_a_negative_interval_is_refused(scripts: Modules) -> None:
    """Give --save-every -1: InputError."""
    with pytest.raises(scripts.script_exit.InputError, match="--save-every -1"):
        scripts.checkpoints.Checkpoints({}, arguments(save_every=-1), {})
