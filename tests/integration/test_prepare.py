"""Extensions are compiled once per node, by one rank, independently of other nodes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

COMPILING = "compiling cpu_adam for this node"


def compiled_by(lab: Lab) -> Counter[str]:
    """Run `hello-mpi` with four ranks; return how often each node compiled its program."""
    answer = lab.call("run", "hello-mpi", "--json").expect(0)
    assert answer.json["metrics"]["answers"]["value"] == 4
    logs = (lab.path / "runs" / answer.json["run_id"] / "ranks").glob("rank-*.log")
    counts = {path.stem: path.read_text().count("compiling hello_mpi.c") for path in logs}
    nodes = {f"rank-{rank['rank']}": rank["node"] for rank in answer.json["ranks"]}
    return Counter(nodes[rank] for rank, count in counts.items() for _ in range(count))


def test_one_rank_of_each_node_compiles_what_its_node_does_not_have(lend: FreshLab) -> None:
    """Two ranks per node compile once per node without a cache; a stale lock is removed."""
    lab = lend(LAB_SLOTS="2")
    caches = {node: lab.path / ".lab/cache" / node for node in ("worker-0", "worker-1")}
    for cache in caches.values():
        shutil.rmtree(cache / "labctl/hello-mpi", ignore_errors=True)
    assert compiled_by(lab) == {"worker-0": 1, "worker-1": 1}
    lab.call("down").expect(0)
    lab.call("up").expect(0)
    shutil.rmtree(caches["worker-1"] / "labctl/hello-mpi")
    # Leave the lock file of a killed compilation by torch.
    lock = caches["worker-0"] / "torch_extensions/py311_cpu/fused/lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    assert compiled_by(lab) == {"worker-1": 1}
    assert not lock.exists()


def operators(lab: Lab) -> dict[str, tuple[int, int]]:
    """Return node -> inode and modification time of its compiled cpu_adam.so."""
    by_node: dict[str, tuple[int, int]] = {}
    for path in (lab.path / ".lab/cache").rglob("cpu_adam.so"):
        node = path.relative_to(lab.path / ".lab/cache").parts[0]
        by_node[node] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return by_node


def rehearse(lab: Lab) -> Answer:
    """Rehearse opt-tiny with the optimiser offloaded to the CPU; assert that it passes; return the answer."""
    offload = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
    return lab.call("run", "opt-tiny", "--rehearse", "--set", offload, "--json", limit=400).expect(0)


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_a_node_that_lost_its_cache_only_its_own(
    fresh_lab: Callable[..., Lab],
) -> None:
    """Three rehearsals compile cpu_adam on 2, 0 and 1 nodes, also across `down`."""
    lab = fresh_lab(LAB_SLOTS="2")
    lab.call("up").expect(0)
    first = rehearse(lab)
    assert first.err.count(COMPILING) == 2
    compiled = operators(lab)
    assert compiled.keys() == {"worker-0", "worker-1"}

    lab.call("down").expect(0)
    lab.call("up").expect(0)
    second = rehearse(lab)
    assert COMPILING not in second.err
    assert operators(lab) == compiled
    assert second.json["seconds"] < first.json["seconds"]

    lost = Path(lab.path, ".lab/cache/worker-1/torch_extensions")
    shutil.rmtree(lost)
    third = rehearse(lab)
    assert third.err.count(COMPILING) == 1
    assert f"worker-1: {COMPILING}" in third.err
    again = operators(lab)
    assert again["worker-0"] == compiled["worker-0"]
    assert again["worker-1"] != compiled["worker-1"]
