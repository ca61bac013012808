"""The lab's ssh keys: one identity for the launcher, one host key per worker, all ed25519, made once."""

from __future__ import annotations

from pathlib import Path

from labctl.files import write
from labctl.model import Lab
from labctl.render import LAUNCHER, node_directory

HOST_KEY = "ssh_host_ed25519_key"
IDENTITY = "id_ed25519"


def missing(lab: Lab) -> frozenset[str]:
    """Containers whose private key is not on disk; without the identity, all of them hold the wrong public one."""
    nodes = {node.name for node in lab.nodes}
    directory = lab.directory / ".lab/nodes"
    if not (directory / lab.nodes[0].name / LAUNCHER / IDENTITY).is_file():
        return frozenset((LAUNCHER, *nodes))
    return frozenset(name for name in nodes if not (directory / name / "ssh" / HOST_KEY).is_file())


def ensure(lab: Lab) -> None:
    """Make what is missing or broken, then write what follows from it: ``authorized_keys`` and ``known_hosts``.

    A worker's private host key lies only in that worker's directory, the identity only in the launcher's.
    """
    launcher = lab.directory / node_directory(lab.nodes[0].name) / LAUNCHER
    identity = ensure_pair(launcher / IDENTITY)
    known_hosts = []
    for node in lab.nodes:
        ssh = lab.directory / node_directory(node.name) / "ssh"
        public = ensure_pair(ssh / HOST_KEY)
        write(ssh / "authorized_keys", f"restrict,pty {identity} labctl-{lab.name}\n")
        known_hosts.append(f"[{node.name}]:{lab.ssh_port} {public}\n")
    write(launcher / "known_hosts", "".join(known_hosts))


def ensure_pair(path: Path) -> str:
    """The public key of the private key at this path, made now if there is none that can be read."""
    public = public_of(path)
    if public is None:
        private, public = generate()
        write(path, private)
    return public


def generate() -> tuple[str, str]:
    """A new ed25519 key: private in OpenSSH's format, public as one line without a comment."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private.decode(), _public_line(key)


def public_of(path: Path) -> str | None:
    """The public line of a private key file, or None where it is missing or broken."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return _public_line(key) if isinstance(key, Ed25519PrivateKey) else None


def _public_line(key: object) -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    assert isinstance(key, Ed25519PrivateKey)  # noqa: S101
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
