"""`labctl devcontainer`, checked with the devcontainers CLI, which VS Code uses too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import LABCTL, Lab

pytestmark = pytest.mark.docker

PACKAGE = "@devcontainers/cli@0.89.0"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the devcontainer CLI's command, from PATH or installed by npm; skip the tests if there is none."""
    if path := shutil.which("devcontainer"):
        return (path,)
    npm, node = shutil.which("npm"), shutil.which("node")
    if not npm or not node:
        pytest.skip("there is neither devcontainer nor node with npm here")
    home = tmp_path_factory.mktemp("npm")
    quick = ("--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=30000")
    install = [npm, "install", "--prefix", str(home), *quick, PACKAGE]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE} here: {done.stderr.strip().splitlines()[-1:]}")
    return (node, str(home / "node_modules/@devcontainers/cli/devcontainer.js"))


def devcontainer(program: tuple[str, ...], lab: Lab, command: str, *arguments: str) -> str:
    """Run a command of the CLI on a lab's folder; return its stdout; assert that it exits with 0."""
    called = [*program, command, "--workspace-folder", str(lab.path), *arguments]
    done = subprocess.run(called, env=lab.environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cli_reads_it(program: tuple[str, ...], fresh_lab: Callable[..., Lab]) -> None:
    """The CLI reads service launcher and folder /workspace from the written devcontainer.json."""
    lab = fresh_lab(LAB_ENV_ODD='$a ${b} "c')
    lab.call("devcontainer").expect(0)
    document: dict[str, Any] = json.loads(devcontainer(program, lab, "read-configuration"))
    assert document["configuration"]["service"] == "launcher"
    assert document["workspace"]["workspaceFolder"] == "/workspace"


def test_it_attaches_to_the_lab_that_is_up_and_changes_nothing(program: tuple[str, ...], lab: Lab) -> None:
    """`devcontainer up` and `exec` use the launcher that is up, as the user."""
    lab.call("devcontainer").expect(0)
    before = lab.identities()
    answer: dict[str, Any] = json.loads(devcontainer(program, lab, "up"))
    assert (answer["outcome"], answer["containerId"]) == ("success", before["launcher"][0])
    assert (answer["remoteUser"], answer["remoteWorkspaceFolder"]) == ("lab", "/workspace")
    output = devcontainer(program, lab, "exec", "sh", "-c", "hostname; id -u; pwd; touch workloads/edited; ls -d ~")
    assert output.split() == ["launcher", str(os.getuid()), "/workspace", "/home/lab"]
    assert (lab.path / "workloads/edited").stat().st_uid == os.getuid()
    assert lab.identities() == before


@pytest.mark.slow
def test_it_brings_a_lab_up_that_is_down(program: tuple[str, ...], fresh_lab: Callable[..., Lab]) -> None:
    """`devcontainer up` starts a lab that is down, by labctl's full path."""
    lab = fresh_lab()
    lab.call("devcontainer").expect(0)
    assert LABCTL in (lab.path / ".devcontainer/devcontainer.json").read_text()
    answer: dict[str, Any] = json.loads(devcontainer(program, lab, "up"))
    assert answer["containerId"] == lab.containers()["launcher"].id
    assert lab.call("status", "--json").expect(0).json["state"] == "up"
