"""What is compiled on a node is compiled once, by one rank of it, whatever the other nodes have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

COMPILING = "compiling cpu_adam for this node"


def operators(lab: Lab) -> dict[str, tuple[int, int]]:
    """Inode and time of each node's compiled operator: the same as before only where it was not compiled again."""
    found: dict[str, tuple[int, int]] = {}
    for path in (lab.path / ".lab/cache").rglob("cpu_adam.so"):
        node = path.relative_to(lab.path / ".lab/cache").parts[0]
        found[node] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def rehearse(lab: Lab) -> Answer:
    """A rehearsal whose optimiser is DeepSpeed's own for the CPU, on two ranks of two nodes each."""
    offload = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
    return lab.call("run", "opt-tiny", "--rehearse", "--set", offload, "--json", limit=400).expect(0)


def test_each_node_has_a_cache_of_its_own(lab: Lab) -> None:
    nodes = ("worker-0", "worker-1")
    for node in nodes:
        lab.inside(node, "sh", "-c", f"echo {node} > /home/lab/.cache/whose")
    for node in nodes:
        assert lab.inside(node, "cat", "/home/lab/.cache/whose") == f"{node}\n"
        assert (lab.path / ".lab/cache" / node / "whose").read_text() == f"{node}\n"


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_a_node_that_lost_its_cache_only_its_own(
    fresh_lab: Callable[..., Lab],
) -> None:
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
