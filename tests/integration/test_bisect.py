"""Bisection of bad nodes in real containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import FreshLab
from support.harness import Lab

pytestmark = pytest.mark.docker

# Each rank counts its work in a second of CPU time; the run is as slow as its slowest rank.
WORKLOAD = r"""
description: plain Python on every rank
launcher: mpirun
script: spin.py
timeout: 1m
metrics:
  throughput: {pattern: 'Throughput: (\S+) samples/sec', unit: samples/s, reduce: min}
criteria:
  - {metric: throughput, min: 0.000001}
"""
SLOW = "/tmp/slow"  # noqa: S108 - of a container
SPIN = """
import os, sys, time
if os.uname().nodename in sys.argv[1:]:
    sys.exit(3)
# Use CPU time, which does not depend on the load of the machine.
slow, done = os.path.exists("/tmp/slow"), 0
end = time.process_time() + 0.3
while time.process_time() < end:
    done += sum(range(10_000 if slow else 1000)) > 0
print(f"Throughput: {done} samples/sec", flush=True)
"""


@pytest.fixture(scope="module")
def four_nodes(lend_module: FreshLab) -> Lab:
    """Return a lab of four nodes, up, with workload `spin`, which fails on nodes given as arguments."""
    lab = lend_module(LAB_NODES="4")
    (lab.path / "workloads/spin").mkdir(parents=True)
    (lab.path / "workloads/spin/workload.yml").write_text(WORKLOAD)
    (lab.path / "workloads/spin/spin.py").write_text(SPIN)
    return lab


@pytest.fixture
def slowed(four_nodes: Lab) -> Iterator[str]:
    """Make worker-2 compute ten times as much per count during the test; yield its name."""
    node = "worker-2"
    four_nodes.inside(node, "touch", SLOW)
    yield node
    four_nodes.inside(node, "rm", SLOW)


@pytest.mark.slow  # Beside other tests, which use the cores, no speed is certain.
def test_a_node_that_computes_slower_is_found(four_nodes: Lab, slowed: str) -> None:
    """`bisect` exits with 5 and finds the slow node alone, with runs on that node as evidence."""
    document = four_nodes.call("bisect", "spin", "--within", "60%", "--json", limit=300).expect(5).json
    assert [bad["node"] for bad in document["diagnosis"]["bad"]] == [slowed]
    assert document["diagnosis"]["bad"][0]["kind"] == "slow"
    assert document["diagnosis"]["links"] == []
    for run in document["diagnosis"]["bad"][0]["runs"]:
        assert run["nodes"] == [slowed]


def test_a_bad_node_is_drained(four_nodes: Lab) -> None:
    """`bisect --drain` writes the failing node to drained.txt, and `hostfiles` leaves it out."""
    argv = ("bisect", "spin", "--within", "99%", "--drain", "--json", "--", "worker-2")
    document = four_nodes.call(*argv, limit=300).expect(5).json
    assert (document["diagnosis"]["links"], document["drained"]) == ([], ["worker-2"])
    assert (four_nodes.path / "drained.txt").read_text().startswith("worker-2  # failing, ")
    (four_nodes.path / "nodes.txt").write_text("".join(f"worker-{number}\n" for number in range(4)))
    made = four_nodes.call("hostfiles", "nodes.txt", "--size", "1", "--json").expect(0).json
    assert (len(made["hostfiles"]), made["drained"]) == (3, ["worker-2"])
    (four_nodes.path / "drained.txt").unlink()


def test_a_node_on_which_a_run_fails_is_found_with_the_runs_that_show_it(four_nodes: Lab) -> None:
    """`bisect` exits with 5, lists worker-1 as failing with two runs, and 3 good nodes."""
    done = four_nodes.call("bisect", "spin", "--within", "99%", "--", "worker-1", limit=300).expect(5)
    assert "worker-1: failing, 2 runs failed\n" in done.out
    assert "worker-1: failed (rank-crashed)" in done.out
    assert "3 nodes good, 1 bad, 0 bad links" in done.out
