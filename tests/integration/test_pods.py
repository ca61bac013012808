"""Jobs for Kubernetes in containers laid out as the operators lay their pods out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from conftest import FreshLab
from support.pods import laid_out

from docker import DockerClient

pytestmark = pytest.mark.docker
CANARY = "hf_canary_of_this_test"


@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed", "deepspeed:openmpi", "torchrun", "torchrun:elastic"])
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


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_trainjobs_pods_are_reached_by_their_own_names(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path, launcher: str
) -> None:
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SHM_SIZE="256m", LAB_K8S_JOB="trainjob")
    text = lab.call("k8s", "render", "hello", "--launcher", launcher).expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, said = pods.run()
        assert code == 0, f"{said}\n{pods.logs()}"
        assert ranks(said) == {f"rank {rank} of 2 on {pods.name}-node-0-{rank}" for rank in range(2)}


def test_horovod_starts_its_ranks_over_mpi(engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path) -> None:
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_IMAGE="labctl/horovod", LAB_SHM_SIZE="256m")
    text = lab.call("k8s", "render", "mnist-horovod", "--launcher", "horovod:mpi", "--rehearse").expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, said = pods.run()
        assert code == 0, f"{said}\n{pods.logs()}"
        assert {f"rank {rank} of 2 on {pods.name}-worker-{rank}" for rank in range(2)} <= ranks(said)


def test_training_in_pods_reads_its_configuration_and_trains(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path
) -> None:
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SHM_SIZE="256m", HF_TOKEN=CANARY)
    text = lab.call("k8s", "render", "opt-tiny", "--rehearse", "--launcher", "mpirun").expect(0).out
    manifests = list(yaml.safe_load_all(text))
    secret = next(one for one in manifests if one["kind"] == "Secret")
    assert secret["stringData"]["hf_token"] == CANARY
    assert text.count(CANARY) == 1
    with laid_out(engine, manifests, tmp_path) as pods:
        code, said = pods.run()
        assert code == 0, f"{said}\n{pods.logs()}"
        assert "Throughput: " in said
        assert CANARY not in said


def ranks(said: str) -> set[str]:
    return set(re.findall(r"labctl: (rank \d+ of \d+ on \S+)", said))
