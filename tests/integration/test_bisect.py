"""Bad nodes among real containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import NewLab
from support.harness import Lab

# A node that gets less of its core stands out only where nothing else takes cores from the others.
pytestmark = [pytest.mark.docker, pytest.mark.alone]

# How much each rank computes in a second; the run is as slow as its slowest rank.
WORKLOAD = r"""
description: plain Python for a second on every rank
launcher: mpirun
script: spin.py
timeout: 1m
metrics:
  throughput: {pattern: 'Throughput: (\S+) samples/sec', unit: samples/s, reduce: min}
criteria:
  - {metric: throughput, min: 0.000001}
"""
SPIN = """
import os, sys, time
if os.uname().nodename in sys.argv[1:]:
    sys.exit(3)
# On the clock of the wall, so that a node that gets less of its core does less.
end, done = time.monotonic() + 1, 0
while time.monotonic() < end:
    done += sum(range(1000)) > 0
print(f"Throughput: {done} samples/sec", flush=True)
"""


@pytest.fixture(scope="module")
def four_nodes(new_lab: NewLab, image: str) -> Lab:
    made = new_lab({"LAB_NODES": "4", "LAB_SHM_SIZE": "256m"})
    (made.path / "workloads/spin").mkdir(parents=True)
    (made.path / "workloads/spin/workload.yml").write_text(WORKLOAD)
    (made.path / "workloads/spin/spin.py").write_text(SPIN)
    made.call("up", limit=300).expect(0)
    return made


@pytest.fixture
def slowed(four_nodes: Lab) -> Iterator[str]:
    """A node that gets a tenth of a core."""
    node = "worker-2"
    container = four_nodes.containers()[node]
    container.update(cpu_period=100_000, cpu_quota=10_000)
    yield node
    container.update(cpu_period=100_000, cpu_quota=-1)


def test_a_node_that_gets_less_of_its_core_is_found_and_drained(four_nodes: Lab, slowed: str) -> None:
    # Four ranks on two cores differ by what else the machine does.
    found = four_nodes.call("bisect", "spin", "--within", "60%", "--drain", "--json", limit=300).expect(5).json
    assert [bad["node"] for bad in found["diagnosis"]["bad"]] == [slowed]
    assert found["diagnosis"]["bad"][0]["kind"] == "slow"
    assert (found["diagnosis"]["links"], found["drained"]) == ([], [slowed])
    for run in found["diagnosis"]["bad"][0]["runs"]:
        assert slowed in run["nodes"]
    assert (four_nodes.path / "drained.txt").read_text().startswith(f"{slowed}  # slow, ")
    (four_nodes.path / "nodes.txt").write_text("".join(f"worker-{number}\n" for number in range(4)))
    made = four_nodes.call("hostfiles", "nodes.txt", "--size", "1", "--json").expect(0).json
    assert (len(made["hostfiles"]), made["drained"]) == (3, [slowed])
    (four_nodes.path / "drained.txt").unlink()


def test_a_node_on_which_a_run_fails_is_found_with_the_runs_that_show_it(four_nodes: Lab) -> None:
    done = four_nodes.call("bisect", "spin", "--within", "90%", "--", "worker-1", limit=300).expect(5)
    assert "worker-1: failing\n" in done.out
    assert "worker-1, " in done.out
    assert "failed (rank-crashed)" in done.out
    assert "3 nodes good, 1 bad, 0 bad links" in done.out
