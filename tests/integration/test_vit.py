"""The vision transformer's workload on two nodes: the rehearsal, metrics.csv, and both ways to start it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

COLUMNS = (
    "Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,GPU_Free_Mem_MB,GPU_Used_Mem_MB,"
    "GPU_Total_Mem_MB,GPU_Temp_C"
)


def test_every_rank_and_epoch_has_a_row_in_metrics_csv(lab: Lab) -> None:
    """A rehearsal under mpirun passes, learns, and writes a row per rank and epoch to metrics.csv."""
    argv = ("--rehearse", "--launcher", "mpirun", "--json")
    result = lab.call("run", "vit", *argv, limit=1200).expect(0).json
    assert (result["verdict"], result["launcher"], result["world_size"]) == ("PASS", "mpirun", 2)
    assert result["metrics"]["loss"]["last"] < result["metrics"]["loss"]["first"]
    # Random guessing gives 0.1.
    assert result["metrics"]["accuracy"]["value"] > 0.3
    lines = (lab.path / "runs" / result["run_id"] / "metrics.csv").read_text().splitlines()
    assert lines[0] == COLUMNS
    rows = list(csv.DictReader(lines))
    assert [(row["Rank"], row["Epoch"]) for row in rows] == [("0", "1"), ("1", "1"), ("0", "2"), ("1", "2")]
    for row in rows:
        assert float(row["Computation_Time"]) > 0
        assert float(row["GPU_Total_Mem_MB"]) > float(row["GPU_Used_Mem_MB"]) > 0
        assert row["GPU_Name"]
        assert (row["GPU_ID"], row["GPU_Temp_C"]) == ("", "")


def write_cifar10(folder: Path, images: int) -> None:
    """Write CIFAR-10's six binary files, each with ``images`` images that cycle through the classes."""
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = (bytes([number % 10]) + bytes([25 * (number % 10)]) * 3072 for number in range(images))
        (folder / name).write_bytes(b"".join(records))


@pytest.mark.slow
def test_it_runs_on_cifar10s_files(lab: Lab) -> None:
    """A rehearsal under DeepSpeed's launcher reads CIFAR-10's files in the cache and uses a hundredth of them."""
    # The rehearsal uses a hundredth of the images, which must fill a batch on both ranks.
    write_cifar10(lab.path / "cache" / "cifar" / "cifar-10-batches-bin", 700)
    argv = ("--rehearse", "--set", "data-path=cifar", "--json")
    result = lab.call("run", "vit", *argv, limit=1200).expect(0).json
    assert (result["launcher"], result["world_size"]) == ("deepspeed", 2)
    log = (lab.path / "runs" / result["run_id"] / "ranks" / "rank-0.log").read_text()
    assert "CIFAR-10 in /workspace/.cache/cifar/cifar-10-batches-bin; 35 images to train on, 7 to test on" in log
