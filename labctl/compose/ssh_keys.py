"""The lab's ssh keys: one identity for the launcher, one host key per worker, all ed25519, made once."""

from __future__ import annotations

import base64
from pathlib import Path

from labctl.model import LAUNCHER, Lab
from labctl.naming import node_directory
from labctl.system.files import write

HOST_KEY = "ssh_host_ed25519_key"
IDENTITY = "id_ed25519"
ED25519 = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
"""What precedes the 32 bytes of a public key."""
HEADER = b"openssh-key-v1\0" + b"\0\0\0\4none" * 2 + b"\0\0\0\0" + b"\0\0\0\1" + b"\0\0\0\x33" + ED25519
"""What precedes the public key in a file without a passphrase: no cipher, no key derivation, one key."""


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
    launcher = launcher_directory(lab)
    identity = ensure_pair(launcher / IDENTITY)
    known_hosts = []
    for node in lab.nodes:
        ssh = ssh_directory(lab, node.name)
        public = ensure_pair(ssh / HOST_KEY)
        write(ssh / "authorized_keys", admitted(lab, identity))
        known_hosts.append(pin(lab, node.name, public))
    write(launcher / "known_hosts", "".join(known_hosts))


def outdated(lab: Lab) -> tuple[str, ...]:
    """The files that ``ensure`` would write, relative to the lab directory."""
    launcher, known_hosts, changed = launcher_directory(lab), "", []
    identity = public_of(launcher / IDENTITY)
    if identity is None:
        changed.append(launcher / IDENTITY)
    for node in lab.nodes:
        ssh = ssh_directory(lab, node.name)
        public = public_of(ssh / HOST_KEY)
        if public is None:
            changed.append(ssh / HOST_KEY)
        if identity is None or _text(ssh / "authorized_keys") != admitted(lab, identity):
            changed.append(ssh / "authorized_keys")
        known_hosts += pin(lab, node.name, public or "")
    if _text(launcher / "known_hosts") != known_hosts:
        changed.append(launcher / "known_hosts")
    return tuple(str(path.relative_to(lab.directory)) for path in changed)


def unpinned(lab: Lab) -> frozenset[str]:
    """Workers whose host key differs from the launcher's known_hosts, or that do not accept the launcher's key."""
    launcher = launcher_directory(lab)
    identity = admitted(lab, public_of(launcher / IDENTITY) or "")
    pins = set(_text(launcher / "known_hosts").splitlines(keepends=True))
    return frozenset(
        node.name
        for node in lab.nodes
        if pin(lab, node.name, public_of(ssh_directory(lab, node.name) / HOST_KEY) or "") not in pins
        or _text(ssh_directory(lab, node.name) / "authorized_keys") != identity
    )


def private(lab: Lab) -> tuple[Path, ...]:
    """The private keys that are on disk."""
    wanted = (launcher_directory(lab) / IDENTITY, *(ssh_directory(lab, node.name) / HOST_KEY for node in lab.nodes))
    return tuple(path for path in wanted if path.is_file())


def launcher_directory(lab: Lab) -> Path:
    return lab.directory / node_directory(lab.nodes[0].name) / LAUNCHER


def ssh_directory(lab: Lab, node: str) -> Path:
    return lab.directory / node_directory(node) / "ssh"


def pin(lab: Lab, node: str, public: str) -> str:
    """A worker's line in the launcher's ``known_hosts``."""
    return f"[{node}]:{lab.ssh_port} {public}\n"


def admitted(lab: Lab, identity: str) -> str:
    """What a worker's ``authorized_keys`` holds."""
    return f"restrict,pty {identity} labctl-{lab.name}\n"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


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
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private.decode(), public.decode()


def public_of(path: Path) -> str | None:
    """The public line of a private key file, or None where it is missing or broken.

    Such a file holds the public key in clear, before the private section (PROTOCOL.key of OpenSSH).
    """
    try:
        begin, *lines, end = path.read_text(encoding="utf-8").splitlines()
        blob = base64.b64decode("".join(lines), validate=True)
    except (FileNotFoundError, ValueError):
        return None
    public, private = blob[len(HEADER) : len(HEADER) + 32], blob[len(HEADER) + 36 :]
    marked = (begin, end) == tuple(f"-----{word} OPENSSH PRIVATE KEY-----" for word in ("BEGIN", "END"))
    whole = blob.startswith(HEADER) and blob[len(HEADER) + 32 :].startswith(len(private).to_bytes(4, "big"))
    return (
        f"ssh-ed25519 {base64.b64encode(ED25519 + public).decode()}" if marked and whole and public in private else None
    )
