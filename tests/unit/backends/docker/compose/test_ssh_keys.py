from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders import lab

from labctl.backends.docker.compose import ssh_keys
from labctl.model import Lab

# Makes keys in one directory after the other, each time killed one system call later, until it is not any more.
KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from support.builders import lab
from labctl.backends.docker.compose import ssh_keys

def work(moment):
    calls = count()
    def hook(event, _):
        if event in ("open", "os.mkdir", "os.chmod", "os.rename", "os.link", "os.remove") and next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    of = lab(3, directory=Path(sys.argv[1], str(moment)))
    sys.addaudithook(hook)
    ssh_keys.ensure(of)
    os._exit(0)

# What is imported late is loaded now.
ssh_keys.ensure(lab(1, directory=Path(sys.argv[1], "first")))
for moment in count():
    child = os.fork() or work(moment)
    if not os.waitpid(child, 0)[1]:
        break
"""


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Return a lab of three nodes whose keys are made."""
    made = lab(3, directory=tmp_path, ssh_port=3022)
    ssh_keys.ensure(made)
    return made


def nodes(of: Lab) -> Path:
    """Return the folder of the nodes' files."""
    return of.directory / ".lab/nodes"


def content(of: Lab) -> dict[str, bytes]:
    """Return the content of each file of the nodes, by its path in the lab directory."""
    return {str(path.relative_to(of.directory)): path.read_bytes() for path in nodes(of).rglob("*") if path.is_file()}


def public(path: Path) -> str:
    """Return the public key of this private key file; fail if there is none."""
    key = ssh_keys.public_of(path)
    assert key is not None
    return key


def test_keys_are_made_once(of: Lab) -> None:
    """A second ensure() changes no file."""
    before = content(of)
    ssh_keys.ensure(of)
    assert content(of) == before


def test_each_node_has_its_own_key(of: Lab) -> None:
    """Three host keys and the launcher's identity are four different ed25519 keys."""
    keys = {public(path) for path in nodes(of).rglob("*") if path.name in {ssh_keys.HOST_KEY, ssh_keys.IDENTITY}}
    assert len(keys) == 3 + 1
    assert all(key.startswith("ssh-ed25519 ") for key in keys)


@pytest.mark.parametrize("broken", [b"", b"rubbish", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_a_broken_key_is_made_anew_and_the_others_stay(of: Lab, broken: bytes) -> None:
    """A broken host key of worker-1 is replaced, with its line in known_hosts; other files stay."""
    before = content(of)
    path = nodes(of) / "worker-1/ssh" / ssh_keys.HOST_KEY
    path.write_bytes(broken)
    ssh_keys.ensure(of)
    after = content(of)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f".lab/nodes/worker-1/ssh/{ssh_keys.HOST_KEY}", ".lab/nodes/worker-0/launcher/known_hosts"}
    assert public(path) in (nodes(of) / "worker-0/launcher/known_hosts").read_text()


def test_a_key_of_another_kind_is_made_anew(of: Lab) -> None:
    """An ECDSA identity is replaced by an ed25519 key."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = nodes(of) / "worker-0/launcher" / ssh_keys.IDENTITY
    other = generate_private_key(SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    ssh_keys.ensure(of)
    assert public(path).startswith("ssh-ed25519 ")


def test_a_new_identity_is_the_one_that_workers_accept(of: Lab) -> None:
    """A removed identity is made again, and each worker's authorized_keys has its public key alone."""
    (nodes(of) / "worker-0/launcher" / ssh_keys.IDENTITY).unlink()
    ssh_keys.ensure(of)
    identity = public(nodes(of) / "worker-0/launcher" / ssh_keys.IDENTITY)
    for node in of.nodes:
        assert (nodes(of) / node.name / "ssh/authorized_keys").read_text() == f"restrict,pty {identity} labctl-demo\n"


def test_everything_is_private_to_its_owner(of: Lab) -> None:
    """Below .lab each directory has mode 0700 and each file 0600."""
    for path in (of.directory / ".lab").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_private_identity_is_only_in_the_launchers_directory(of: Lab) -> None:
    """Private keys are the launcher's identity and each worker's host key; no other file has the identity."""
    holders = [path for path in nodes(of).rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert {path.relative_to(nodes(of)).as_posix() for path in holders} == {
        "worker-0/launcher/id_ed25519",
        *(f"worker-{index}/ssh/ssh_host_ed25519_key" for index in range(3)),
    }
    identity = (nodes(of) / "worker-0/launcher" / ssh_keys.IDENTITY).read_bytes()
    assert [path for path in holders if path.read_bytes() == identity] == [nodes(of) / "worker-0/launcher/id_ed25519"]


def test_known_hosts_pins_each_nodes_key_at_the_labs_port(of: Lab) -> None:
    """known_hosts has each worker's host key at port 3022."""
    assert (nodes(of) / "worker-0/launcher/known_hosts").read_text() == "".join(
        f"[{node.name}]:3022 {public(nodes(of) / node.name / 'ssh' / ssh_keys.HOST_KEY)}\n" for node in of.nodes
    )


def test_keys_whose_maker_was_killed_are_made_whole_by_the_next(tmp_path: Path) -> None:
    """ensure(), killed at each of more than 20 system calls, leaves nothing that the next ensure() does not mend."""
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, check=True)
    moments = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(moments) > 20, len(moments)
    for moment in moments:
        after = lab(3, directory=moment)
        ssh_keys.ensure(after)
        assert (ssh_keys.missing(after), ssh_keys.outdated(after), ssh_keys.unpinned(after)) == (
            frozenset(),
            (),
            frozenset(),
        )
        test_everything_is_private_to_its_owner(after)
