"""Collectives: correct values at all sizes, wrong values are detected, and labctl is as fast as a manual start."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

ROW = re.compile(
    r"^(?:worker-0:)? +(\d+) +(\d+) +float +(\w+) +(-1|0) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)$", re.MULTILINE
)
REHEARSED = [8, 64, 512, 4096, 32768, 262144, 1048576]
BUS = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 1.0, "all_to_all": 0.5}
"""busbw over algbw on two ranks (nccl-tests, doc/PERFORMANCE.md)."""
# Run each operation in its own process group and folder.
OTHERS = """
import os, sys
sys.path[:0] = ["/workspace/workloads/allreduce", "/workspace/workloads/common"]
import allreduce
run, port = os.environ["LABCTL_RUN_DIR"], int(os.environ["MASTER_PORT"])
for number, operation in enumerate(sys.argv[1:]):
    folder = f"{run}/{operation}"
    os.makedirs(folder, exist_ok=True)
    os.environ.update(LABCTL_RUN_DIR=folder, MASTER_PORT=str(port + number))
    sys.argv = ["allreduce.py", "--operation", operation, "--max-bytes", "1M", "--factor", "8"]
    allreduce.main()
"""


def test_values_are_right_at_every_size(lab: Lab) -> None:
    """A rehearsal of all_reduce has no wrong value; metrics and printed table equal allreduce.json."""
    answer = lab.call("run", "allreduce", "--rehearse", "--json").expect(0)
    document = document_of(lab, answer)
    table = right(document, "all_reduce")
    metrics = answer.json["metrics"]
    assert metrics["wrong"]["value"] == 0
    assert metrics["busbw"]["value"] == pytest.approx(document["rows"][-1]["busbw"], abs=1e-6)
    assert metrics["latency"]["value"] == pytest.approx(min(row["time_us"] for row in document["rows"]), abs=0.01)
    assert rows(answer.err) == table


def test_values_of_every_other_operation_are_right(lab: Lab) -> None:
    """The other operations have no wrong value, and their printed tables equal allreduce.json."""
    (lab.path / "others.py").write_text(OTHERS)
    remaining = [operation for operation in BUS if operation != "all_reduce"]
    argv = ("--script", "others.py", "--launcher", "mpirun", "--json", "--", *remaining)
    run = lab.path / "runs" / lab.call("run", *argv).expect(0).json["run_id"]
    documents = [json.loads((run / operation / "allreduce.json").read_text()) for operation in remaining]
    tables = [right(document, operation) for document, operation in zip(documents, remaining, strict=True)]
    assert rows((run / "ranks/rank-0.log").read_text()) == [row for table in tables for row in table]


def right(document: Any, operation: str) -> list[list[float]]:
    """Assert that a document has the operation, sizes, bandwidths and no wrong value; return its rows."""
    assert (document["operation"], document["backend"], document["world_size"]) == (operation, "gloo", 2)
    assert [row["size"] for row in document["rows"]] == REHEARSED
    assert {row["wrong"] for row in document["rows"]} == {0}
    for row in document["rows"]:
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * BUS[operation])
    return [[row["size"], row["count"], row["wrong"]] for row in document["rows"]]


def rows(printed: str) -> list[list[float]]:
    """Return size, count and wrong values of each row of a printed table."""
    return [[*map(float, row[:2]), int(row[-1])] for row in ROW.findall(printed)]


def document_of(lab: Lab, answer: Answer) -> Any:
    """Return allreduce.json of an answer's run."""
    return json.loads((lab.path / "runs" / answer.json["run_id"] / "allreduce.json").read_text())


def test_a_value_that_is_off_by_one_is_counted_and_a_backend_that_is_not_here_refused(lab: Lab) -> None:
    """Two planted errors are counted as 2; `--backend nccl` gives code 2."""
    script = (
        "import sys, torch, allreduce, collectives as c\n"
        "whole = torch.empty(c.CHUNK + 1000)\n"
        "c.fill(whole, 3, start=7)\n"
        "assert c.wrong(whole, 3, start=7) == 0\n"
        "whole[5] += 1; whole[-1] = float('nan')\n"
        "print(c.wrong(whole, 3, start=7), c.wrong(whole, 3, start=8) > c.CHUNK, flush=True)\n"
        "sys.argv = ['allreduce.py', '--backend', 'nccl']\n"
        "print(f'code {allreduce.main()}')"
    )
    path = "PYTHONPATH=workloads/allreduce:workloads/common"
    # Use one pipe, as the engine does not keep the order of stdout and stderr.
    command = ("sh", "-c", 'exec python -c "$0" 2>&1', script)
    output = lab.inside("worker-0", "env", path, "PYTHONDONTWRITEBYTECODE=1", *command)
    assert {"2 True", "code 2"} <= {*output.splitlines()}
    assert "has no backend `nccl`" in output


def test_a_size_that_does_not_fit_is_skipped_aloud_and_no_pass(lab: Lab) -> None:
    """A size of 64 TiB is skipped with its reason, and the run exits with 5."""
    sizes = ("--set", "max-bytes=65536G", "--set", "factor=1048576")
    answer = lab.call("run", "all-gather", "--launcher", "mpirun", "--rehearse", "--json", *sizes)
    document = document_of(lab, answer.expect(5))
    assert document["operation"] == "all_gather"
    skipped = [entry["size"] for entry in document["skipped"]]
    assert skipped
    assert max(skipped) == 65536 << 30
    assert f"# skipped: {skipped[-1]} B: 2 x " in answer.err
    assert "on one machine of which 80% of" in document["skipped"][-1]["reason"]


@pytest.mark.slow
def test_it_is_as_fast_as_by_hand_in_the_same_containers(lab: Lab) -> None:
    """busbw at 64 MiB is 90% or more of torchrun's by hand, medians of seven pairs."""
    in_lab, by_hand = [], []
    for _ in range(7):
        arguments = ("--set", "min-bytes=64M", "--set", "max-bytes=64M")
        in_lab.append(lab.call("run", "allreduce", "--json", *arguments).expect(0).json["metrics"]["busbw"]["value"])
        by_hand.append(busbw_by_hand(lab))
    assert median(in_lab) >= 0.9 * median(by_hand), (in_lab, by_hand)


def busbw_by_hand(lab: Lab) -> float:
    """Start torchrun in both nodes by hand; return rank 0's busbw at 64 MiB in GB/s."""

    def start(number: int) -> str:
        """Run allreduce.py under torchrun in worker-NUMBER; return its output."""
        rendezvous = f"--master-addr worker-0 --master-port 29611 --node-rank {number}"
        script = "workloads/allreduce/allreduce.py --operation all_reduce --min-bytes 64M --max-bytes 64M"
        return lab.inside(f"worker-{number}", *f"torchrun --nnodes 2 --nproc-per-node 1 {rendezvous} {script}".split())

    with ThreadPoolExecutor(2) as pool:
        output, _ = pool.map(start, (0, 1))
    match = re.search(r"^busbw: (\S+) GB/s", output, re.MULTILINE)
    assert match, output
    return float(match[1])
