"""Choice of the checkpoint from which a run resumes, and the reasons if there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.builders import lab, workload

from labctl.errors import ConfigError
from labctl.jobs import checkpoints
from labctl.model import Lab, Mount, Resume

OWN = Resume("--resume", "checkpoints/step-*", "whole.json")
FILES = Resume("--load", "work/ckpt/*.pt")


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Return a lab at tmp_path that mounts its runs and a cache; nothing is written."""
    mounts = (
        Mount(source=str(tmp_path / "runs"), target="/workspace/runs", read_only=True),
        Mount(source=str(tmp_path / "cache"), target="/workspace/.cache"),
    )
    return lab(directory=tmp_path, mounts=mounts)


def saved(of: Lab, run_id: str, step: int, *, ranks: int = 2) -> Path:
    """Write a complete checkpoint of a run: a shard for each rank and whole.json; return its folder."""
    place = of.directory / f"runs/{run_id}/checkpoints/step-{step}"
    (place / "model").mkdir(parents=True)
    files = {}
    for rank in range(ranks):
        files[f"model/shard-{rank}.pt"] = (place / f"model/shard-{rank}.pt").write_bytes(b"weights")
    (place / "whole.json").write_text(json.dumps({"step": step, "world_size": ranks, "files": files}))
    return place


def went_on(of: Lab, run_id: str, checkpoint: str) -> None:
    """Write the record of a run that was resumed from this checkpoint, without checkpoints of its own."""
    path = of.directory / "runs" / run_id
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"workload": "hello", "resumed": checkpoint}))


def checkpoint_of(of: Lab, run_id: str, declared: Resume = OWN) -> str:
    """Return the path below runs/ of the run's last checkpoint."""
    return str(checkpoints.last(of.directory, run_id, declared)[0])


def reason(of: Lab, run_id: str, declared: Resume = OWN) -> str:
    """Return the reason why the run has no checkpoint; fail if it has one."""
    nothing, why = checkpoints.last(of.directory, run_id, declared)
    assert nothing is None
    return why


def test_the_last_one_is_that_of_the_highest_number(of: Lab) -> None:
    """Write checkpoints 9, 10 and 8: the last one is step-10."""
    for step in (9, 10, 8):
        saved(of, "r1", step)
    assert checkpoint_of(of, "r1") == "r1/checkpoints/step-10"


def test_a_file_may_be_a_checkpoint_and_needs_no_marker(of: Lab) -> None:
    """Write files epoch-2.pt and epoch-10.pt without a marker: the last one is epoch-10.pt."""
    folder = of.directory / "runs/r1/work/ckpt"
    folder.mkdir(parents=True)
    for name in ("epoch-2.pt", "epoch-10.pt"):
        (folder / name).touch()
    assert checkpoint_of(of, "r1", FILES) == "r1/work/ckpt/epoch-10.pt"


@pytest.mark.parametrize("name", ["whole.json", "model/shard-0.pt", "model/shard-1.pt"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_one_that_was_cut_in_the_middle_is_passed_over(of: Lab, name: str, how: str) -> None:
    """Remove or cut a file of the newest checkpoint: the one before is chosen."""
    saved(of, "r1", 60)
    file = saved(of, "r1", 90) / name
    content = file.read_bytes()
    file.unlink() if how == "missing" else file.write_bytes(content[: len(content) // 2])
    assert checkpoint_of(of, "r1") == "r1/checkpoints/step-60"


def test_what_is_wrong_with_the_last_one_is_said(of: Lab) -> None:
    """Break both checkpoints: the reason names the newest and its missing file."""
    (saved(of, "r1", 90) / "model/shard-1.pt").unlink()
    (saved(of, "r1", 60) / "whole.json").unlink()
    assert reason(of, "r1") == "checkpoints/step-90: 1 of 2 files missing or truncated, such as model/shard-1.pt"


def test_a_run_without_any_says_where_they_were_looked_for(of: Lab) -> None:
    """Ask for a run without checkpoints: the reason names folder and pattern."""
    (of.directory / "runs/r1").mkdir(parents=True)
    assert reason(of, "r1") == f"nothing in {of.directory}/runs/r1 matches checkpoints/step-*"


@pytest.mark.parametrize("content", ["{}", '{"global_step": 500}', '{"files": "all"}', "[]"])
def test_a_marker_of_another_program_says_that_it_is_whole(of: Lab, content: str) -> None:
    """Write a marker without a list of files: the checkpoint counts as complete."""
    place = of.directory / "runs/r1/out/checkpoint-500"
    place.mkdir(parents=True)
    (place / "trainer_state.json").write_text(content)
    assert checkpoint_of(of, "r1", Resume("--go", "out/checkpoint-*", "trainer_state.json")) == "r1/out/checkpoint-500"


def test_a_run_that_had_no_time_to_save_goes_on_from_where_it_did(of: Lab) -> None:
    """Ask for a run that resumed a resumed run and saved nothing: the first run's checkpoint."""
    saved(of, "r1", 60)
    went_on(of, "r2", "r1/checkpoints/step-60")
    went_on(of, "r3", "r2/checkpoints/step-70")
    assert checkpoint_of(of, "r3") == "r1/checkpoints/step-60"


def test_records_that_name_each_other_are_no_endless_search(of: Lab) -> None:
    """Write two runs that resumed each other: the search ends with a reason."""
    went_on(of, "r1", "r2/checkpoints/step-60")
    went_on(of, "r2", "r1/checkpoints/step-60")
    assert "runs/r2" in reason(of, "r2")


def test_a_link_that_leads_out_is_none(of: Lab) -> None:
    """Make the checkpoint a link to another run: none is found."""
    elsewhere = saved(of, "r1", 60)
    (of.directory / "runs/r2/checkpoints").mkdir(parents=True)
    (of.directory / "runs/r2/checkpoints/step-60").symlink_to(elsewhere)
    assert "runs/r2" in reason(of, "r2")


def going_on(of: Lab, ranks: int = 2, **changes: Any) -> Any:
    """Return the workload and checkpoint with which a run resumes r1 on these ranks."""
    return checkpoints.going_on(of, workload(**{"resume": OWN, "arguments": ("--steps", "9"), **changes}), "r1", ranks)


def test_the_script_gets_the_checkpoint_as_an_input(of: Lab) -> None:
    """Resume a run: the workload gets --resume with the checkpoint's path, as an input of kind path."""
    place = saved(of, "r1", 60)
    changed, name = going_on(of)
    assert name == "r1/checkpoints/step-60"
    assert changed.arguments == ("--steps", "9", "--resume", str(place))
    assert changed.inputs == (("resume", "path"),)


def test_one_of_other_ranks_is_refused_but_to_an_elastic_workload(of: Lab) -> None:
    """Resume with another number of ranks: ConfigError, unless the workload is elastic."""
    saved(of, "r1", 60)
    with pytest.raises(ConfigError, match="checkpoint r1/checkpoints/step-60 was saved by 2 ranks, and this run has 3"):
        going_on(of, ranks=3)
    assert going_on(of, ranks=1, elastic=True)[1] == "r1/checkpoints/step-60"


def test_a_workload_that_does_not_say_how_is_refused(of: Lab) -> None:
    """Resume a workload without a resume section: ConfigError with the section to write."""
    saved(of, "r1", 60)
    with pytest.raises(ConfigError, match="`hello` does not declare how it resumes") as caught:
        going_on(of, resume=None)
    assert "resume: {argument: --resume" in caught.value.hint


def test_a_script_that_does_not_say_how_gets_its_newest_checkpoint_by_hand(of: Lab) -> None:
    """Resume a script's run that saved last.pt: the hint has the command with its path, and the pattern."""
    folder = of.directory / "runs/r1/work/mine/out"
    folder.mkdir(parents=True)
    (folder / "last.pt").touch()
    with pytest.raises(ConfigError) as caught:
        going_on(of, resume=None, declared="--script train.py", directory=Path())
    hint = caught.value.hint
    assert "labctl run --script train.py -- --steps 9 --resume /workspace/runs/r1/work/mine/out/last.pt; " in hint
    assert "checkpoint: 'work/mine/out/*.pt'}` in a workload.yml" in hint


def test_what_was_saved_elsewhere_is_named_with_its_pattern(of: Lab) -> None:
    """Resume a run whose checkpoints are not where it is declared: the hint has the pattern that matches."""
    folder = of.directory / "runs/r1/work/mine/checkpoints"
    folder.mkdir(parents=True)
    (folder / "epoch-2.pt").touch()
    with pytest.raises(ConfigError, match="nothing in ") as caught:
        going_on(of)
    assert caught.value.hint.startswith(
        "the run has work/mine/checkpoints/epoch-2.pt, which `checkpoint: 'work/mine/checkpoints/*.pt'` matches; "
    )


def test_a_run_without_a_whole_checkpoint_is_refused(of: Lab) -> None:
    """Resume a run without a complete checkpoint: ConfigError, the hint starts from the beginning."""
    (of.directory / "runs/r1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run r1 has no complete checkpoint: nothing in ") as caught:
        going_on(of)
    assert caught.value.hint.endswith("from the beginning: labctl run hello")
