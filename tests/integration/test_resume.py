"""Runs that lose a worker and resume from their last complete checkpoint, with identical results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.harness import Lab, Running, wait_until

pytestmark = pytest.mark.docker

LIMIT = 1200
"""Time limit of a run in seconds, many times its duration on idle cores."""
SMALL = ("--set", "sequence-length=16", "--set", "deepspeed.train_micro_batch_size_per_gpu=6")
TINY = ("opt-tiny", *SMALL, "--launcher", "mpirun", "--set", "steps=65")
EVERY_20 = ("--set", "save-every=20")


def killed_after(running: Running, lab: Lab, step: str) -> None:
    """Kill worker-1 once the run has printed ``step``; fail if labctl ends before."""

    def is_printed() -> bool:
        """Return True if the run has printed the step; fail if labctl has ended."""
        assert running.process.poll() is None, running.err
        return step in running.err

    wait_until(is_printed, LIMIT, step)
    lab.containers()["worker-1"].kill("SIGKILL")


def record(lab: Lab, run_id: str) -> Path:
    """Return the record directory of a run."""
    return lab.path / "runs" / run_id


def broken(lab: Lab, arguments: tuple[str, ...], step: str) -> str:
    """Start a run, kill worker-1 at this step, check for node-lost, bring the lab up; return the run's id."""
    with lab.start("run", *arguments, "--json") as running:
        killed_after(running, lab, step)
        # Rank 0 prints a traceback about the lost rank.
        result = running.answer(LIMIT).json
    assert (result["cause"], result["exit_code"]) == ("node-lost", 4)
    lab.call("up").expect(0)
    return str(result["run_id"])


def output_by_step(lab: Lab, run_id: str, pattern: str) -> dict[str, str]:
    """Return the second group of each match of ``pattern`` in output.log, by the first, the step's number."""
    log = (record(lab, run_id) / "output.log").read_text()
    return dict(re.findall(pattern, log))


STEPS = r"\bstep (\d+)/\d+ (loss \S+(?: lr \S+)?)"


def progress(lab: Lab, run_id: str, step: int) -> Any:
    """Return progress-0.json of a run's checkpoint at a step."""
    return json.loads((record(lab, run_id) / f"checkpoints/step-{step}/progress-0.json").read_text())


def same_as(lab: Lab, whole: str, part: str, *, after: int) -> None:
    """Assert that run ``part`` prints the steps of run ``whole`` after ``after``, and step 1 only besides."""
    first, second = output_by_step(lab, whole, STEPS), output_by_step(lab, part, STEPS)
    last = max(map(int, second))
    assert second == {step: text for step, text in first.items() if after < int(step) <= last or step == "1"}
    assert len(second) > 5


@pytest.fixture
def lab(module_lab: Lab) -> Lab:
    """Return the module's lab, up."""
    module_lab.ensure_up()
    return module_lab


@pytest.fixture(scope="module")
def whole(module_lab: Lab) -> str:
    """Return the id of a passed run of opt-tiny with a checkpoint every 20 steps."""
    return str(module_lab.call("run", *TINY, *EVERY_20, "--json", limit=LIMIT).expect(0).json["run_id"])


def test_runs_that_are_ended_or_lose_a_worker_go_on_to_the_same_losses(lab: Lab, whole: str) -> None:
    """Check that ended ranks save once more, and that `--resume` and `--retries` go on from there."""
    ended = interrupted(lab, "step 3/65 ")
    (place,) = (record(lab, ended) / "checkpoints").iterdir()
    step = int(place.name.removeprefix("step-"))
    assert 3 <= step < 40

    with lab.start("run", "--resume", "latest", *EVERY_20, "--retries", "1", "--json") as running:
        killed_after(running, lab, "step 42/65 ")
        answer = running.answer(LIMIT)
    result = answer.json
    assert (result["verdict"], answer.code) == ("PASS", 0)
    (attempt,) = result["retried"]
    first = attempt.partition(":")[0]
    assert ": node-lost: worker-1 (rank 1): container" in attempt
    assert result["resumed"] == f"{first}/checkpoints/step-40"
    assert f"retry 1 of 1 goes on from {first}/checkpoints/step-40" in answer.err
    lost = lab.call("show", first, "--json").expect(0).json
    assert (lost["cause"], lost["resumed"]) == ("node-lost", f"{ended}/checkpoints/step-{step}")

    same_as(lab, whole, first, after=step)
    same_as(lab, whole, result["run_id"], after=40)
    assert max(map(int, output_by_step(lab, result["run_id"], STEPS))) == 65
    # Floats in JSON have all bits of the ranks' floats.
    for run_id, saved in ((first, 40), (result["run_id"], 60)):
        assert progress(lab, run_id, saved)["steps"] == progress(lab, whole, saved)["steps"]


def interrupted(lab: Lab, step: str) -> str:
    """Run opt-tiny without periodic checkpoints, press Ctrl-C at ``step``; return the id (exit code 130)."""
    with lab.start("run", *TINY, "--set", "save-every=1000", "--json") as running:
        wait_until(lambda: step in running.err, LIMIT, step)
        running.press()
        return str(running.answer(LIMIT).expect(130).json["run_id"])


def test_both_nodes_shards_are_in_the_last_two_checkpoints(lab: Lab, whole: str) -> None:
    """Checkpoints 40 and 60 are kept; the last has the shards and random states of both ranks."""
    folder = record(lab, whole) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-40", "step-60"]
    marker = json.loads((folder / "step-60/whole.json").read_text())
    assert (marker["step"], marker["world_size"]) == (60, 2)
    shards = [name for name in marker["files"] if "optim_states" in name]
    assert len(shards) == 2
    assert {"random-0.pt", "random-1.pt", "model/mp_rank_00_model_states.pt", *shards} <= set(marker["files"])


def test_a_checkpoint_that_was_cut_in_the_middle_is_not_taken(lab: Lab, whole: str) -> None:
    """A truncated shard: --resume takes the step before; without another one it exits with 2."""
    cut = record(lab, f"{whole}-cut")
    shutil.copytree(record(lab, whole), cut)
    (shard,) = (cut / "checkpoints/step-60/model").glob("*zero_pp_rank_1*optim_states.pt")
    shard.write_bytes(shard.read_bytes()[:100_000])
    plan = lab.call("run", "--resume", cut.name, "--dry-run").expect(0).out
    assert f"--resume /workspace/runs/{cut.name}/checkpoints/step-40" in plan
    shutil.rmtree(cut / "checkpoints/step-40")
    error = lab.call("run", "--resume", cut.name, "--json").expect(2).json["error"]
    assert f"run {cut.name} has no complete checkpoint: checkpoints/step-60: 1 of " in error["message"]
    shutil.rmtree(cut)


def test_a_checkpoint_is_for_as_many_ranks_as_wrote_it(lab: Lab, whole: str) -> None:
    """--resume of two ranks with one: exit code 2, and both numbers are said."""
    error = lab.call("run", "--resume", whole, "--include", "worker-0", "--json").expect(2).json["error"]
    assert error["message"] == f"checkpoint {whole}/checkpoints/step-60 was saved by 2 ranks, and this run has 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "step", "after"),
    [
        (("opt-tiny-reward", "--set", "save-every=20"), "step 45/60 ", 40),
        (("opt-tiny-rlhf", "--set", "save-every=10"), "step 25/30 ", 20),
        (("lora-clm-tiny", "--set", "save-every=20"), "step 45/60 ", 40),
        (("opt-tiny", "--set", "save-every=50", "--set", "deepspeed.zero_optimization.stage=3"), "step 60/120 ", 50),
        (("opt-tiny", "--set", "save-every=50", "--set", "lora-dim=4"), "step 60/120 ", 50),
    ],
)
def test_every_workload_goes_on_to_the_same_losses(lab: Lab, command: tuple[str, ...], step: str, after: int) -> None:
    """Kill worker-1: the resumed run of each workload prints the losses of an uninterrupted one."""
    uninterrupted = lab.call("run", *command, "--json", limit=LIMIT).json["run_id"]
    result = lab.call("run", "--resume", broken(lab, command, step), "--json", limit=LIMIT).json
    assert result["resumed"].endswith(f"/checkpoints/step-{after}")
    same_as(lab, uninterrupted, result["run_id"], after=after)


@pytest.mark.slow
def test_a_vision_transformer_goes_on_in_the_middle_of_an_epoch(lab: Lab) -> None:
    """Kill worker-1 in vit-tiny: the resumed run prints the same loss and accuracy per epoch."""
    argv = ("vit-tiny", "--set", "save-every=40")
    pattern = r"\bepoch (\d+)/\d+ (loss \S+ accuracy \S+)"
    uninterrupted = lab.call("run", *argv, "--json", limit=LIMIT).expect(0).json
    run_id = broken(lab, argv, "epoch 2/4 ")
    result = lab.call("run", "--resume", run_id, "--json", limit=LIMIT).expect(0).json
    assert output_by_step(lab, result["run_id"], pattern) == output_by_step(lab, uninterrupted["run_id"], pattern)
