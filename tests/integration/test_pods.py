"""Kubernetes jobs in containers laid out as the operators lay out pods."""

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
    """`hello` of rendered manifests starts two ranks per pod under each launcher."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SLOTS="2", LAB_SHM_SIZE="256m")
    text = lab.call("k8s", "render", "hello", "--launcher", launcher).expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, output = pods.run()
        assert code == 0, f"{output}\n{pods.logs()}"
        for rank in range(4):
            assert f"labctl: rank {rank} of 4 on {pods.name}-worker-{rank // 2}" in output


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_trainjobs_pods_are_reached_by_their_own_names(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path, launcher: str
) -> None:
    """`hello` of a TrainJob's manifests starts rank N in the pod node-0-N."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SHM_SIZE="256m", LAB_K8S_JOB="trainjob")
    text = lab.call("k8s", "render", "hello", "--launcher", launcher).expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, output = pods.run()
        assert code == 0, f"{output}\n{pods.logs()}"
        assert ranks(output) == {f"rank {rank} of 2 on {pods.name}-node-0-{rank}" for rank in range(2)}


def test_horovod_starts_its_ranks_over_mpi(engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path) -> None:
    """mnist-horovod of rendered manifests starts a rank in each of two pods."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_IMAGE="labctl/horovod", LAB_SHM_SIZE="256m")
    text = lab.call("k8s", "render", "mnist-horovod", "--launcher", "horovod:mpi", "--rehearse").expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, output = pods.run()
        assert code == 0, f"{output}\n{pods.logs()}"
        assert {f"rank {rank} of 2 on {pods.name}-worker-{rank}" for rank in range(2)} <= ranks(output)


def test_training_in_pods_reads_its_configuration_and_trains(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path
) -> None:
    """opt-tiny prints a throughput; the token is in the Secret alone and not in the output."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SHM_SIZE="256m", HF_TOKEN=CANARY)
    text = lab.call("k8s", "render", "opt-tiny", "--rehearse", "--launcher", "mpirun").expect(0).out
    manifests = list(yaml.safe_load_all(text))
    secret = next(manifest for manifest in manifests if manifest["kind"] == "Secret")
    assert secret["stringData"]["hf_token"] == CANARY
    assert text.count(CANARY) == 1
    with laid_out(engine, manifests, tmp_path) as pods:
        code, output = pods.run()
        assert code == 0, f"{output}\n{pods.logs()}"
        assert "Throughput: " in output
        assert CANARY not in output


STALLS = """import time
for step in range(1, 6):
    print(f"step {step}/9", flush=True)
    time.sleep(0.1)
time.sleep(600)
"""


def test_the_agent_in_the_launcher_ends_a_stalled_run_on_every_worker(
    engine: DockerClient, fresh_lab: FreshLab, tmp_path: Path
) -> None:
    """Steps stop: the agent says `stalled`, ends the ranks and leaves stacks in each pod."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu", LAB_SHM_SIZE="256m", LAB_STALL_SECONDS="3")
    folder = lab.path / "workloads/stalls"
    folder.mkdir(parents=True)
    (folder / "workload.yml").write_text("description: stalls\nlauncher: mpirun\nscript: stalls.py\ntimeout: 5m\n")
    (folder / "stalls.py").write_text(STALLS)
    text = lab.call("k8s", "render", "stalls").expect(0).out
    with laid_out(engine, list(yaml.safe_load_all(text)), tmp_path) as pods:
        code, output = pods.run()
        assert code, f"{output}\n{pods.logs()}"
        last = output.splitlines()[-1]
        stalled = r"ended with exit code \d+ after [\d.]+ s; stalled: .*the last was step 5/9; .* ranks 0, 1 are at"
        assert re.search(stalled, last), output
        for worker in pods.containers[:-1]:
            worker.reload()
            assert worker.status == "running"
            assert worker.exec_run(["pgrep", "-f", "stalls.py"]).exit_code == 1
            assert worker.exec_run(["sh", "-c", "ls outputs/*/stacks"]).exit_code == 0


def ranks(output: str) -> set[str]:
    """Return the `rank N of M on NODE` that labctl's lines in the output name."""
    return set(re.findall(r"labctl: (rank \d+ of \d+ on \S+)", output))
