"""Commands of a lab on Kubernetes: those of Docker hosts are refused, others ask the cluster of the kubeconfig."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commandline import Labctl

ROOT = Path(__file__).parents[3]
ENGINE = "LAB_ENGINE=kubernetes\n"
WORKLOAD = "description: hello\nlauncher: mpirun\nscript: hello.py\ntimeout: 60s\nrehearse: {}\n"


@pytest.fixture
def lab(labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Labctl:
    """A lab on Kubernetes where no cluster is configured."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    labctl.env(ENGINE)
    labctl.workload(WORKLOAD)
    for folder in (ROOT / "workloads").iterdir():
        (labctl.directory / "workloads" / folder.name).symlink_to(folder)
    (labctl.directory / "set").mkdir()
    labctl.write("set/one", "worker-0 slots=1\n")
    return labctl


def files_in(directory: Path) -> set[Path]:
    return {*directory.rglob("*")}


@pytest.mark.parametrize(
    "command",
    [
        "up", "up --dry-run", "build", "render", "keys rotate", "clean", "devcontainer", "jupyter", "fit hello",
        "batch hello set", "bisect hello", "validate", "cache hello --hosts", "doctor --fix", "doctor -n worker-0",
        "down --images", "top",
    ],
)  # fmt: skip
def test_a_command_of_docker_hosts_is_refused_and_says_why(command: str, lab: Labctl) -> None:
    before = files_in(lab.directory)
    said = lab(*command.split())
    assert said.code == 2, said
    assert "for Docker hosts, and the lab is on Kubernetes (LAB_ENGINE)" in said.err
    assert "`labctl run`; -s LAB_ENGINE=docker" in said.err
    assert files_in(lab.directory) == before


@pytest.mark.parametrize(
    "command",
    ["status", "down", "doctor", "devices", "run hello", "shell", "exec -- ls", "logs", "cache hello",
     "k8s submit hello", "k8s delete hello"],
)  # fmt: skip
def test_a_command_of_both_says_that_no_cluster_is_configured(command: str, lab: Labctl) -> None:
    said = lab(*command.split())
    assert said.code == 3, said
    assert "no cluster is configured" in said.err
    assert "KUBECONFIG=FILE" in said.err


@pytest.mark.parametrize(
    "option", ["--hostfile all", "--include worker-0", "--exclude worker-0", "--wait", "--retries 2"]
)
def test_an_option_of_docker_hosts_is_refused(option: str, lab: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labctl.backends.kubernetes.api.Api.__init__", lambda *_: None)
    said = lab("run", "hello", *option.split())
    assert said.code == 2, said
    assert f"{option.split(maxsplit=1)[0]} is for Docker hosts" in said.err


def test_what_asks_nobody_works_without_a_cluster(lab: Labctl) -> None:
    assert lab("config").code == 0
    assert lab("workloads").code == 0
    assert lab("runs").code == 0
    assert "kind: MPIJob" in lab("k8s", "render", "hello").out


def test_what_is_typed_next_applies_files_of_any_size(lab: Labctl) -> None:
    # Without it kubectl writes an object into its own annotation, which holds less than a ConfigMap.
    said = lab("k8s", "export", "hello", "--kustomize", "out")
    assert said.out.endswith(": kubectl apply --server-side -k out\n")
    assert "kubectl apply --server-side -f -" in " ".join(lab("k8s", "render", "--help").out.split())


def test_for_one_command_the_lab_can_be_on_hosts(lab: Labctl) -> None:
    said = lab("status", "-s", "LAB_ENGINE=docker")
    assert said.code == 3
    assert "Kubernetes" not in said.err
