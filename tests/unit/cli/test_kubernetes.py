"""Commands of a lab on Kubernetes: those for Docker hosts are refused, others use the cluster of the kubeconfig."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commandline import Labctl

ROOT = Path(__file__).parents[3]
ENGINE = "LAB_ENGINE=kubernetes\n"
WORKLOAD = "description: hello\nlauncher: mpirun\nscript: hello.py\ntimeout: 60s\nrehearse: {}\n"


@pytest.fixture
def lab(labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Labctl:
    """Write a lab with LAB_ENGINE=kubernetes, all workloads and a hostfile, and no kubeconfig; return its labctl."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    labctl.env(ENGINE)
    labctl.workload(WORKLOAD)
    for folder in (ROOT / "workloads").iterdir():
        (labctl.directory / "workloads" / folder.name).symlink_to(folder)
    (labctl.directory / "set").mkdir()
    labctl.write("set/one", "worker-0 slots=1\n")
    return labctl


def files_in(directory: Path) -> set[Path]:
    """Return all paths below the directory."""
    return {*directory.rglob("*")}


PODS = "on Kubernetes each `labctl run` starts its own pods; for Docker hosts: -s LAB_ENGINE=docker"


@pytest.mark.parametrize(
    ("command", "refused", "hint"),
    [
        ("up", "up", PODS),
        ("up --dry-run", "up", PODS),
        ("build", "build", "LAB_IMAGE in .env"),
        ("render", "render", "labctl k8s render WORKLOAD"),
        ("keys rotate", "keys rotate", "each run has its own keys"),
        ("clean", "clean", "labctl down"),
        ("devcontainer", "devcontainer", PODS),
        ("jupyter", "jupyter", "kubectl port-forward"),
        ("fit hello", "fit", "-s LAB_ENGINE=docker"),
        ("cache hello --hosts", "cache --hosts", "labctl cache"),
        ("doctor --fix", "doctor --fix", "labctl doctor"),
        ("doctor -n worker-0", "doctor --node", "labctl doctor"),
        ("down --images", "down --images", "nodes remove images themselves"),
        ("down --images --dry-run", "down --images", "nodes remove images themselves"),
    ],
)
def test_a_command_of_docker_hosts_is_refused_and_says_what_to_do_instead(
    command: str, refused: str, hint: str, lab: Labctl
) -> None:
    """Run a command of Docker hosts: exit code 2 with a hint for Kubernetes, and no file changes."""
    before = files_in(lab.directory)
    answer = lab(*command.split())
    assert answer.code == 2, answer
    first, second = answer.err.splitlines()
    assert first == f"error: {refused} is not supported with LAB_ENGINE=kubernetes"
    assert second.startswith("hint: ")
    assert hint in second
    assert files_in(lab.directory) == before


@pytest.mark.parametrize(
    "command",
    ["status", "down", "doctor", "devices", "run hello", "run --wait --include n0 hello", "shell", "exec -- ls", "logs",
     "cache hello", "freeze", "bisect hello", "hostfiles --size 1", "top", "k8s submit hello", "k8s delete hello"],
)  # fmt: skip
def test_a_command_of_both_says_that_no_cluster_is_configured(
    command: str, lab: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a command of both engines: exit code 3 "no cluster is configured"."""
    monkeypatch.setattr("labctl.cli.exec.on_terminal", lambda: True)
    answer = lab(*command.split())
    assert answer.code == 3, answer
    assert "no cluster is configured" in answer.err
    assert "KUBECONFIG=FILE" in answer.err


@pytest.mark.parametrize("command", ["run hello", "run --dry-run hello", "cache hello", "down", "status"])
def test_a_directory_that_is_no_lab_is_refused(command: str, lab: Labctl) -> None:
    """Run in a directory without .env: exit code 2 "is not a lab directory".

    Its default name would be that of another lab.
    """
    (lab.directory / ".env").unlink()
    answer = lab(*command.split(), "-s", "LAB_ENGINE=kubernetes")
    assert answer.code == 2, answer
    assert "is not a lab directory (no .env)" in answer.err


def test_what_asks_nobody_works_without_a_cluster(lab: Labctl) -> None:
    """Run config, workloads, runs and k8s render without a cluster: exit code 0."""
    assert lab("config").code == 0
    assert lab("workloads").code == 0
    assert lab("runs").code == 0
    assert "kind: MPIJob" in lab("k8s", "render", "hello").out


def test_what_is_typed_next_applies_files_of_any_size(lab: Labctl) -> None:
    """Run k8s export: the command that it suggests is kubectl apply --server-side."""
    # Without it kubectl writes an object into its own annotation, which holds less than a ConfigMap.
    answer = lab("k8s", "export", "hello", "--kustomize", "out")
    assert answer.out.endswith(": kubectl apply --server-side -k out\n")
    assert "kubectl apply --server-side -f -" in " ".join(lab("k8s", "render", "--help").out.split())


def test_for_one_command_the_lab_can_be_on_hosts(lab: Labctl) -> None:
    """Run status with -s LAB_ENGINE=docker: exit code 3, of Docker."""
    answer = lab("status", "-s", "LAB_ENGINE=docker")
    assert answer.code == 3
    assert "Kubernetes" not in answer.err
