from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from labctl import launchers
from labctl.config import dotenv
from labctl.errors import ConfigError
from labctl.k8s import importing
from labctl.workloads import loader

MANIFEST = Path(__file__).with_name("mpijob.yaml")


def test_what_a_lab_has_settings_for_is_read() -> None:
    assert dict(importing.read(MANIFEST).settings) == {
        "LAB_K8S_NAMESPACE": "workloads",
        "LAB_NODES": "1",
        "LAB_ACCELERATOR": "habana",
        "LAB_SLOTS": "8",
        "LAB_MEMORY": "250g",
        "LAB_K8S_HUGEPAGES": "312600m",
        "LAB_IMAGE": "registry.example.com/gaudi/pytorch:1.18",
        "LAB_K8S_HOST_IPC": "true",
        "LAB_K8S_NODE_SELECTOR": "example.com/rack=7",
        "LAB_K8S_TOLERATIONS": "reserved=lab:NoSchedule",
        "HTTP_PROXY": "http://proxy:3128",
    }


def test_its_lines_are_those_of_an_env_file() -> None:
    found = importing.read(MANIFEST)
    assert {one.key: one.value for one in dotenv.parse(found.env, ".env")} == dict(found.settings)


def test_its_launcher_is_a_workload(tmp_path: Path) -> None:
    found = importing.read(MANIFEST)
    for one in found.files:
        path = tmp_path / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.content)
        path.chmod(one.mode)
    workload = loader.load(tmp_path / "workloads", "gaudi-llm-ds-ft", launchers.known())
    assert (workload.launcher, workload.script) == ("script", "start.sh")
    assert workload.environment == (("LLM_MODEL", "meta-llama/Meta-Llama-3.1-8B-Instruct"), ("NUM_HPU", "8"))
    script = (tmp_path / "workloads/gaudi-llm-ds-ft/start.sh").read_text()
    assert script.endswith("--use_deepspeed run.py --model $LLM_MODEL\n")


def test_what_is_left_out_is_said_and_a_token_is_copied_nowhere() -> None:
    found = importing.read(MANIFEST)
    assert found.left_out == (
        "PersistentVolumeClaim shared-model: not part of the job",
        "resource example.com/nic: 1",
        "HUGGING_FACE_HUB_TOKEN: set HF_TOKEN in .env; it is not copied",
        "WANDB_API_KEY: its value is elsewhere in the cluster; LAB_ENV_WANDB_API_KEY= in .env sets it",
        "spec.runPolicy.cleanPodPolicy: Running",
        "spec.mpiReplicaSpecs.Launcher.template.spec.hostIPC: True",
        "spec.mpiReplicaSpecs.Launcher.template.spec.volumes[0].name: workspace",
        "spec.mpiReplicaSpecs.Launcher.template.spec.volumes[0].persistentVolumeClaim.claimName: shared-model",
        "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].volumeMounts[0].name: workspace",
        "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].volumeMounts[0].mountPath: /storage",
    )
    assert "hf_in_clear_text" not in str((found.env, [one.content for one in found.files]))


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["mpirun", "-n", "2", "a b"], "exec mpirun -n 2 'a b'"),
        (["sh", "-c", "echo $1", "name", "x y"], "set -- 'x y'\necho $1"),
        (["bash", "-lc", "true"], "true"),
    ],
)
def test_a_command_is_a_script(tmp_path: Path, command: list[str], script: str) -> None:
    job = yaml.safe_load_all(MANIFEST.read_text())
    _, job = job
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    container["command"], container["args"] = command, []
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert importing.read(tmp_path / "job.yaml").files[1].content.endswith(f"\n{script}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are 0 MPIJobs in it, not one"),
        ("kind: Pod\n", "there are 0 MPIJobs in it, not one"),
        ("{kind: MPIJob, apiVersion: kubeflow.org/v1}\n", "its MPIJob is of kubeflow.org/v1"),
        ("a: [\n", "cannot be read"),
        ("{kind: MPIJob, apiVersion: kubeflow.org/v2beta1}\n", "the launcher has no command"),
    ],
)
def test_a_file_without_a_job_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        importing.read(tmp_path / "job.yaml")
