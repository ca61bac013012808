"""Jobs for Kubernetes in containers laid out as the mpi-operator lays its pods out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import FreshLab
from support.pods import laid_out

from docker import DockerClient

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed", "deepspeed:openmpi", "torchrun"])
def test_each_launcher_reads_the_operators_hostfile_and_reaches_every_worker(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path, launcher: str
) -> None:
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SLOTS="2", LAB_SHM_SIZE="256m")
    text = lab.call("k8s", "render", "hello", "--launcher", launcher).expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, said = pods.run()
        assert code == 0, f"{said}\n{pods.logs()}"
        for rank in range(4):
            assert f"labctl: rank {rank} of 4 on {pods.name}-worker-{rank // 2}" in said
