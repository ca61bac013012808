"""Elastic launchers, which go on after the loss of a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab, wait_until

pytestmark = pytest.mark.docker

SNAPSHOTS = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
path = os.environ["LABCTL_RUN_DIR"] + "/snapshot.pt"
model, first = DistributedDataParallel(torch.nn.Linear(8, 1)), 0
if os.path.exists(path):
    first = torch.load(path) + 1
for step in range(first, 50):
    model(torch.randn(4, 8)).square().mean().backward()
    if dist.get_rank() == 0:
        print(f"step {step} of a world of {dist.get_world_size()}", flush=True)
        torch.save(step, path + ".new")
        os.replace(path + ".new", path)
    time.sleep(0.1)
dist.destroy_process_group()
"""
COMMITS = """
import time
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))

@hvd.elastic.run
def train(state):
    while state.step < 50:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if hvd.rank() == 0:
            print(f"step {state.step} of a world of {hvd.size()}", flush=True)
        state.step += 1
        state.commit()
        time.sleep(0.1)

train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
"""


def loses_a_node(lab: Lab, script: str, launcher: str) -> None:
    """Run the script, kill worker-1 at step 10; assert that all 50 steps complete and the run passes."""
    Path(lab.path / "train.py").write_text(script)
    with lab.start("run", "--script", "train.py", "--launcher", launcher, "--timeout", "5m", "--json") as running:
        wait_until(lambda: "step 10 of" in running.err, 200, "step 10")
        lab.containers()["worker-1"].kill("SIGKILL")
        # The script's own output may have a traceback about the lost peer.
        result = running.answer(300).json
    assert result["verdict"] == "PASS"
    assert "It went on without worker-1: container died with exit code 137." in result["message"]
    worlds = dict(re.findall(r"step (\d+) of a world of (\d)", running.err))
    assert [int(step) for step in worlds] == list(range(50))
    assert (worlds["5"], worlds["49"]) == ("2", "1")
    assert lab.processes_of(result["run_id"]) == []


def test_torchrun_starts_the_ranks_again_on_the_node_that_is_left(lab: Lab) -> None:
    """Kill worker-1 under torchrun:elastic: it goes on from the last snapshot with one rank."""
    loses_a_node(lab, SNAPSHOTS, "torchrun:elastic")


@pytest.mark.slow
def test_horovod_goes_on_from_the_last_commit_with_the_ranks_that_are_left(lend: FreshLab) -> None:
    """Kill worker-1 under horovod:elastic: all 50 steps complete with one rank."""
    loses_a_node(lend(LAB_IMAGE="labctl/horovod", LAB_SHM_SIZE="256m"), COMMITS, "horovod:elastic")
