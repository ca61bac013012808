"""A user other than root owns the containers' processes and the results."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import LABCTL, Lab

from docker import DockerClient

pytestmark = pytest.mark.docker

UID = 1234


@pytest.fixture(scope="module")
def theirs(engine: DockerClient, family: str, image: str) -> Iterator[Lab]:
    """Yield a lab, up, of a user who is not in /etc/passwd but may use the engine; skip if that is impossible."""
    socket = Path("/var/run/docker.sock")
    if os.geteuid() != 0 or not shutil.which("setpriv") or not socket.exists():
        pytest.skip("to act as another person takes root, setpriv and the engine's socket")
    group = socket.stat().st_gid
    prefix = ("setpriv", f"--reuid={UID}", f"--regid={UID}", f"--groups={group}")
    allowed = subprocess.run([*prefix, "docker", "version"], capture_output=True, text=True, check=False)
    started = subprocess.run([*prefix, LABCTL, "--version"], capture_output=True, text=True, check=False)
    if allowed.returncode or started.returncode:
        pytest.skip(f"another person cannot use the engine or labctl here: {allowed.stderr}{started.stderr}")
    home = Path(tempfile.mkdtemp(prefix="labctl-theirs-"))
    os.chown(home, UID, UID)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        lab = Lab.make(home / "lab", f"{family}-theirs", engine, {"LAB_IMAGE": image}, prefix=prefix)
    for path in (lab.path, *lab.path.rglob("*")):
        os.chown(path, UID, UID)
    try:
        lab.call("up").expect(0)
        yield lab
    finally:
        lab.destroy()
        shutil.rmtree(home)


def test_a_person_without_root_brings_a_lab_up_and_runs(theirs: Lab) -> None:
    """Ranks run with the user's uid, and all files of runs and .lab belong to it."""
    result = theirs.call("run", "hello", "--json").expect(0).json
    for rank in (0, 1):
        log = theirs.path / "runs" / result["run_id"] / f"ranks/rank-{rank}.log"
        assert f"uid {UID}" in log.read_text()
    assert {path.stat().st_uid for path in (theirs.path / "runs").rglob("*")} == {UID}
    assert {path.stat().st_uid for path in (theirs.path / ".lab").rglob("*")} == {UID}


@pytest.mark.parametrize("node", ["launcher", "worker-0"])
def test_they_are_themselves_in_every_container(theirs: Lab, node: str) -> None:
    """exec in launcher and worker has the user's uid and the name lab."""
    assert theirs.call("exec", "--node", node, "--", "sh", "-c", "id -u; whoami").expect(0).out.split() == [
        str(UID),
        "lab",
    ]


def test_they_are_themselves_over_ssh(theirs: Lab) -> None:
    """ssh from the launcher to worker-1 has the user's uid."""
    assert theirs.call("exec", "--", "ssh", "worker-1", "id", "-u").expect(0).out == f"{UID}\n"


def test_what_runs_in_a_worker_cannot_read_its_host_key(theirs: Lab) -> None:
    """After a restart the user finds no private key in worker-1, by exec or ssh; root does."""
    theirs.containers()["worker-1"].restart(timeout=1)
    theirs.call("up").expect(0)
    search = "grep -rslF -- 'PRIVATE KEY-----' /etc /home /root /run /tmp /var/lib /proc/1/root/etc /proc/1/root/run; :"
    assert theirs.call("exec", "--node", "worker-1", "--", "sh", "-c", search).expect(0).out == ""
    assert theirs.call("exec", "--", "ssh", "worker-1", search).expect(0).out == ""
    assert "PRIVATE KEY" in theirs.inside("worker-1", "cat", "/run/lab/ssh_host_ed25519_key", user="0:0")
