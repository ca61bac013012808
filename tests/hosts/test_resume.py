"""A run over two hosts resumes from shards that each host has written itself."""

from __future__ import annotations

import json

import pytest
from conftest import RackLabs
from support.harness import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_the_shards_of_all_hosts_are_gathered_and_sent_to_all(rack_lab: RackLabs) -> None:
    """Both hosts' checkpoint files are in the record; --resume goes on from step 4, same losses."""
    lab = rack_lab(2)
    lab.call("up", limit=600).expect(0)
    argv = ("opt-tiny", "--rehearse", "--set", "save-every=2")
    whole = lab.call("run", *argv, "--json", limit=1200).expect(0).json
    folder = lab.path / "runs" / whole["run_id"] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    marker = json.loads((folder / "step-4/whole.json").read_text())
    for name, size in marker["files"].items():
        assert (folder / "step-4" / name).stat().st_size == size
    part = lab.call("run", "--resume", "latest", "--json", limit=1200).expect(0).json
    assert part["resumed"] == f"{whole['run_id']}/checkpoints/step-4"
    assert part["metrics"]["loss"] == whole["metrics"]["loss"]


def test_a_node_that_is_lost_on_another_host_is_brought_up_again_and_its_shards_are_used(rack_lab: RackLabs) -> None:
    """Kill worker-1 at step 25: the retry passes from step 20 or 30."""
    lab = rack_lab(2)
    lab.call("up", limit=600).expect(0)
    argv = ("opt-tiny", "--set", "steps=50", "--set", "save-every=10", "--retries", "1")
    with lab.start("run", *argv, "--json") as running:
        wait_until(lambda: "step 25/50 " in running.err, 1200, "step 25")
        lab.containers()["worker-1"].kill("SIGKILL")
        result = running.answer(1200).json
    first = result["retried"][0].partition(":")[0]
    assert result["verdict"] == "PASS"
    assert result["resumed"] in {f"{first}/checkpoints/step-20", f"{first}/checkpoints/step-30"}


ELASTIC = """\
description: waits until it goes on from a checkpoint
launcher: torchrun
script: waits.py
timeout: 10m
resume: {argument: --resume, checkpoint: 'ckpt/*.pt'}
elastic: true
"""
WAITS = """\
import os, sys, time
from pathlib import Path

if len(sys.argv) > 1:
    print("read", Path(sys.argv[-1]).read_text(), "on", os.environ["WORLD_SIZE"], "ranks", flush=True)
    sys.exit()
if os.environ["RANK"] == "0":
    folder = Path(os.environ["LABCTL_RUN_DIR"]) / "ckpt"
    folder.mkdir()
    (folder / "new").write_text("weights")
    (folder / "new").rename(folder / "1.pt")
print("waits", flush=True)
time.sleep(600)
"""


def test_an_elastic_workload_goes_on_without_a_host_that_is_gone(rack_lab: RackLabs) -> None:
    """h2 falls silent: the retry passes on one rank, from the checkpoint."""
    lab = rack_lab(2)
    (lab.path / "workloads/waits").mkdir()
    (lab.path / "workloads/waits/workload.yml").write_text(ELASTIC)
    (lab.path / "workloads/waits/waits.py").write_text(WAITS)
    lab.call("up", limit=600).expect(0)
    with lab.start("run", "waits", "--retries", "1", "--json") as running:
        wait_until(lambda: running.err.count("waits\n") >= 2, 120, "both ranks wait")
        lab.hosts[1].drop()
        answer = running.answer(600)
    result = answer.json
    first = result["retried"][0].partition(":")[0]
    assert (result["verdict"], result["world_size"], result["resumed"]) == ("PASS", 1, f"{first}/ckpt/1.pt")
    assert "going on without worker-1" in answer.err
    assert "read weights on 1 ranks" in answer.err
