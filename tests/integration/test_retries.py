"""`run --retries` on containers: it stops where trying again does not help, and goes on while checkpoints do."""

from __future__ import annotations

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

WORKLOAD = """\
description: three steps, then it is killed
launcher: mpirun
script: fails.py
timeout: 60s
resume: {argument: --resume, checkpoint: 'ckpt/*.pt'}
"""
SCRIPT = """\
import argparse, os, pathlib, signal

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
parser.add_argument("--save", action="store_true")
parser.add_argument("--raise", dest="raises", action="store_true")
asked = parser.parse_args()
done = int(pathlib.Path(asked.resume).stem) if asked.resume else 0
if done >= 6:
    raise SystemExit
for step in range(1, 4):
    print(f"step {step}/3", flush=True)
if os.environ["RANK"] == "0":
    if asked.save:
        folder = pathlib.Path(os.environ["LABCTL_RUN_DIR"], "ckpt")
        folder.mkdir()
        (folder / f"{done + 3}.pt").touch()
    if asked.raises:
        raise KeyError("text")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def lab(module_lab: Lab) -> Lab:
    """Return the module's lab, up, with workload `fails`, which kills itself at step 3."""
    module_lab.ensure_up()
    folder = module_lab.path / "workloads/fails"
    folder.mkdir(exist_ok=True)
    (folder / "workload.yml").write_text(WORKLOAD)
    (folder / "fails.py").write_text(SCRIPT)
    return module_lab


def run(lab: Lab, *arguments: str) -> Answer:
    """Run the workload with `--retries 5`; assert that `show` prints the same with its command; return the answer."""
    answer = lab.call("run", "fails", "--retries", "5", "--json", *arguments)
    command = " ".join(("labctl run fails", *arguments))
    assert lab.call("show", "latest", "--json").expect(0).json == {**answer.json, "note": "", "command": command}
    return answer


def test_a_crash_at_the_same_step_ends_after_two_attempts(lab: Lab) -> None:
    """Two attempts end at step 3 without a checkpoint: exit code 7, cause no-progress."""
    before = lab.run_ids()
    result = run(lab).expect(7).json
    first, second = lab.run_ids()[len(before) :]
    assert (result["verdict"], result["cause"], result["run_id"]) == ("ERROR", "no-progress", second)
    ended = f"runs {first} and {second} ended at step 3 of 3, without a newer checkpoint"
    assert result["message"].startswith(f"{ended} (rank-crashed): rank 0 on worker-0 exited with code 137 (SIGKILL)")
    assert (result["domain"], result["retry"], result["evidence"]) == ("unknown", "does not", ended)
    (attempt,) = result["retried"]
    assert attempt.startswith(f"{first}: rank-crashed: rank 0 on worker-0 exited with code 137")
    assert f"does not help: {ended}" in lab.call("show").expect(0).out


def test_attempts_that_save_newer_checkpoints_go_on(lab: Lab) -> None:
    """Each attempt saves a newer checkpoint: the third one passes from checkpoint 6."""
    result = run(lab, "--set", "save").expect(0).json
    first, second = (attempt.partition(":")[0] for attempt in result["retried"])
    assert (result["verdict"], result["resumed"]) == ("PASS", f"{second}/ckpt/6.pt")
    assert lab.call("show", second, "--json").expect(0).json["resumed"] == f"{first}/ckpt/3.pt"
    assert (result["domain"], result["retry"], result["evidence"]) == (None, None, "")


def test_what_would_fail_again_is_not_tried_again(lab: Lab) -> None:
    """A KeyError in the script: exit code 4, no retry, and the exception's line as evidence."""
    answer = run(lab, "--set", "raise")
    result = answer.json
    assert (answer.code, result["cause"], result["retried"]) == (4, "rank-crashed", [])
    fact = "KeyError: 'text' (fails.py:19)"
    assert (result["domain"], result["retry"], result["evidence"]) == ("workload", "does not", fact)
    assert f"run {result['run_id']} is not started again: trying again does not help: {fact}" in answer.err
