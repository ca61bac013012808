"""ssh access between the lab's nodes: keys, allowed and refused logins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.harness import Lab, free_port, wait_until

pytestmark = pytest.mark.docker


def private_keys(lab: Lab, node: str) -> set[str]:
    """List the files with a private key below /etc, /home, /root, /run, /tmp and /var/lib of a node."""
    search = "grep -rslF -- 'PRIVATE KEY-----' /etc /home /root /run /tmp /var/lib || true"
    return set(lab.inside(node, "sh", "-c", search).split())


def test_the_launcher_reaches_a_worker_by_its_name(lab: Lab) -> None:
    assert lab.call("exec", "--", "ssh", "worker-1", "hostname").expect(0).out == "worker-1\n"


def test_an_exit_code_comes_back_through_exec_and_ssh(lab: Lab) -> None:
    assert lab.call("exec", "--", "ssh", "worker-0", "exit 7").code == 7


def test_exec_in_a_node_runs_as_the_caller(lab: Lab) -> None:
    """`exec --node worker-1` runs on that node with the uid of the lab's user."""
    answer = lab.call("exec", "--node", "worker-1", "--", "sh", "-c", "hostname; id -u").expect(0)
    assert answer.out.split() == ["worker-1", lab.inside("worker-1", "id", "-u").strip()]


def test_host_keys_are_checked_strictly(lab: Lab) -> None:
    """ssh has StrictHostKeyChecking and the lab's key; with empty known_hosts it ends with 255."""
    options = dict(
        line.split(" ", 1) for line in lab.call("exec", "--", "ssh", "-G", "worker-1").expect(0).out.splitlines()
    )
    assert options["stricthostkeychecking"] in {"yes", "true"}
    assert options["batchmode"] == "yes"
    assert options["identityfile"].endswith("/.ssh/id_ed25519")
    unknown = lab.call("exec", "--", "ssh", "-o", "UserKnownHostsFile=/dev/null", "worker-1", "true")
    assert unknown.code == 255
    assert "Host key verification failed" in unknown.err


def test_the_identity_is_in_the_launcher_alone_and_host_keys_in_their_workers_alone(lab: Lab) -> None:
    """Each node has its own two key files only, and host keys differ."""
    assert private_keys(lab, "launcher") == {"/etc/lab/ssh/id_ed25519", "/home/lab/.ssh/id_ed25519"}
    for node in ("worker-0", "worker-1"):
        assert private_keys(lab, node) == {"/etc/lab/ssh/ssh_host_ed25519_key", "/run/lab/ssh_host_ed25519_key"}
    pinned = {lab.inside(node, "cat", "/run/lab/ssh_host_ed25519_key") for node in ("worker-0", "worker-1")}
    assert len(pinned) == 2


def test_a_worker_lets_nobody_in_without_the_key(lab: Lab) -> None:
    """ssh without public-key login ends with 255, `Permission denied (publickey)`."""
    answer = lab.call("exec", "--", "ssh", "-o", "PubkeyAuthentication=no", "-o", "BatchMode=no", "worker-1", "true")
    assert answer.code == 255
    assert "Permission denied (publickey)" in answer.err


def test_a_worker_does_not_reach_another_worker(lab: Lab) -> None:
    """ssh from worker-0 to worker-1 ends with 255, `Permission denied`."""
    answer = lab.call(
        "exec", "--node", "worker-0", "--",
        "ssh", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-p", "12345",
        "worker-1", "true",
    )  # fmt: skip
    assert answer.code == 255
    assert "Permission denied" in answer.err


def test_forwarding_is_refused(lab: Lab) -> None:
    """`ssh -W` to a port of worker-1 fails as prohibited."""
    answer = lab.call("exec", "--", "ssh", "-W", "127.0.0.1:12345", "worker-1")
    assert answer.code != 0
    assert "prohibited" in answer.err


def test_the_values_in_force_in_sshd(lab: Lab) -> None:
    """`sshd -T` shows public-key login of user lab alone, no forwarding, and 128 or more startups."""
    output = lab.inside("worker-1", "/usr/sbin/sshd", "-T", "-f", "/opt/lab/sshd_config", user="0:0")
    values = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    expected = {
        "passwordauthentication": "no",
        "kbdinteractiveauthentication": "no",
        "pubkeyauthentication": "yes",
        "authenticationmethods": "publickey",
        "allowusers": "lab",
        "disableforwarding": "yes",
        "permituserenvironment": "no",
        "strictmodes": "yes",
        "permitemptypasswords": "no",
    }
    assert {name: values[name] for name in expected} == expected
    assert int(values["maxstartups"].split(":")[0]) >= 128


AUDIT = str(Path(sys.executable).with_name("ssh-audit"))


def address(lab: Lab, key: str) -> str:
    """Return a field of worker-1's network settings, such as IPAddress."""
    (network,) = lab.containers()["worker-1"].attrs["NetworkSettings"]["Networks"].values()
    return str(network[key])


def test_an_audit_of_a_workers_sshd_finds_nothing(lab: Lab) -> None:
    """ssh-audit of worker-1's sshd exits with 0."""
    done = subprocess.run(
        [AUDIT, "--no-colors", f"{address(lab, 'IPAddress')}:12345"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sntrup761x25519-sha512" in done.stdout


def test_an_audit_of_the_launchers_ssh_finds_nothing(lab: Lab) -> None:
    """ssh-audit, as a server to which the launcher's ssh connects, exits with 0."""
    port = str(free_port())
    with subprocess.Popen(
        [AUDIT, "--no-colors", "--client-audit", "--port", port, "--timeout", "120"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as audit:
        gateway = address(lab, "Gateway")
        ssh = ("exec", "--", "ssh", "-o", f"HostName={gateway}", "-p", port, "worker-1", "true")
        # Wait until the server listens.
        wait_until(lambda: lab.call(*ssh).code and audit.poll() is not None, 120, "an audit of what ssh offered")
        output = audit.communicate(timeout=120)[0]
    assert audit.returncode == 0, output
    assert "sntrup761x25519-sha512" in output


def test_rotated_keys_are_others_and_in_force(fresh_lab: Callable[..., Lab]) -> None:
    """`keys rotate` replaces both keys and all containers; on a lab that is down it starts none."""
    lab = fresh_lab(LAB_NODES="1")
    lab.call("up").expect(0)
    keys = {path: path.read_bytes() for path in (lab.path / ".lab/nodes").glob("worker-*/*/*_ed25519*")}
    assert len(keys) == 2
    before = {node: container.id for node, container in lab.containers().items()}
    lab.call("keys", "rotate").expect(0)
    assert all(path.read_bytes() != content for path, content in keys.items())
    assert set(before.values()).isdisjoint(container.id for container in lab.containers().values())
    lab.call("exec", "--all", "--", "true").expect(0)
    lab.call("down").expect(0)
    lab.call("keys", "rotate").expect(0)
    assert lab.containers() == {}


def is_refused(lab: Lab) -> bool:
    """Return True if ssh from the launcher refuses the host key of worker-1."""
    return "REMOTE HOST IDENTIFICATION HAS CHANGED" in lab.call("exec", "--", "ssh", "worker-1", "true").err


def test_a_host_key_that_changed_on_a_worker_is_refused_with_the_reason(lab: Lab) -> None:
    """Another host key on worker-1: `run` exits with 4, node-lost, and says so."""
    path = lab.path / ".lab/nodes/worker-1/ssh/ssh_host_ed25519_key"
    right = path.read_bytes()
    try:
        path.write_bytes(
            Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        )
        lab.containers()["worker-1"].restart(timeout=0)
        # A run begins only when every sshd answers in time.
        wait_until(lambda: is_refused(lab), 60, "sshd of worker-1 answers")
        result = lab.call("run", "hello", "--json").expect(4).json
        assert (result["cause"], result["ranks"]) == ("node-lost", [])
        assert "worker-1: host key is not the pinned one (REMOTE HOST IDENTIFICATION HAS CHANGED)" in result["message"]
    finally:
        path.write_bytes(right)
        lab.containers()["worker-1"].restart(timeout=0)
        lab.call("up").expect(0)
    assert lab.call("exec", "--", "ssh", "worker-1", "hostname").expect(0).out == "worker-1\n"


def test_keys_on_the_host_lie_apart_and_are_private(lab: Lab) -> None:
    """The lab's folder has three private keys, of mode 0600, each in its own directory."""
    output = subprocess.run(
        ["grep", "-rlF", "PRIVATE KEY-----", "."], cwd=lab.path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(output) == [
        "./.lab/nodes/worker-0/launcher/id_ed25519",
        "./.lab/nodes/worker-0/ssh/ssh_host_ed25519_key",
        "./.lab/nodes/worker-1/ssh/ssh_host_ed25519_key",
    ]
    assert all(Path(lab.path, path).stat().st_mode & 0o777 == 0o600 for path in output)
