"""The lab's ssh keys: an identity for the launcher and a host key per worker, all ed25519, created once."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

from labctl.model import LAUNCHER, Lab
from labctl.naming import node_directory
from labctl.system.files import write

HOST_KEY = "ssh_host_ed25519_key"
IDENTITY = "id_ed25519"
BEGIN, END = (f"-----{word} OPENSSH PRIVATE KEY-----" for word in ("BEGIN", "END"))
ED25519 = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
"""Bytes before the 32 bytes of a public key."""
HEADER = b"openssh-key-v1\0" + b"\0\0\0\4none" * 2 + b"\0\0\0\0" + b"\0\0\0\1" + b"\0\0\0\x33" + ED25519
"""Bytes before the public key in a file without a passphrase: no cipher, no key derivation, a single key."""


def missing(lab: Lab) -> frozenset[str]:
    """Return the nodes without a private host key; launcher and all nodes if the launcher's own key is missing."""
    nodes = {node.name for node in lab.nodes}
    if not (launcher_directory(lab) / IDENTITY).is_file():
        return frozenset((LAUNCHER, *nodes))
    return frozenset(name for name in nodes if not (ssh_directory(lab, name) / HOST_KEY).is_file())


def ensure(lab: Lab) -> None:
    """Create missing or broken keys, then write ``authorized_keys`` and ``known_hosts`` to match.

    A worker's private host key is only in that worker's directory, the identity only in the launcher's.
    """
    for path, content in public_files(lab, ensure_pair):
        write(path, content)


def outdated(lab: Lab) -> tuple[str, ...]:
    """Return the files that ``ensure`` would write, relative to the lab directory."""
    changed = []

    def public(path: Path) -> str:
        """Return the public key of a private key; if there is none, list the path in ``changed``, return empty."""
        line = public_of(path)
        if line is None:
            changed.append(path)
        return line or ""

    for path, content in public_files(lab, public):
        if _text(path) != content:
            changed.append(path)
    return tuple(str(path.relative_to(lab.directory)) for path in changed)


def public_files(lab: Lab, public: Callable[[Path], str]) -> Iterator[tuple[Path, str]]:
    """Yield path and content of each ``authorized_keys`` and of ``known_hosts``; ``public`` gives public keys."""
    launcher, known_hosts = launcher_directory(lab), ""
    identity = public(launcher / IDENTITY)
    for node in lab.nodes:
        ssh = ssh_directory(lab, node.name)
        known_hosts += pin(lab, node.name, public(ssh / HOST_KEY))
        yield ssh / "authorized_keys", admitted(lab, identity)
    yield launcher / "known_hosts", known_hosts


def unpinned(lab: Lab) -> frozenset[str]:
    """Return the workers whose host key the launcher does not know, or whose sshd does not accept its key."""
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
    """Return the paths of the existing private keys: the launcher's identity and each worker's host key."""
    keys = (launcher_directory(lab) / IDENTITY, *(ssh_directory(lab, node.name) / HOST_KEY for node in lab.nodes))
    return tuple(path for path in keys if path.is_file())


def launcher_directory(lab: Lab) -> Path:
    return lab.directory / node_directory(lab.nodes[0].name) / LAUNCHER


def ssh_directory(lab: Lab, node: str) -> Path:
    return lab.directory / node_directory(node) / "ssh"


def pin(lab: Lab, node: str, public: str) -> str:
    """Return a worker's line in the launcher's ``known_hosts``."""
    return f"[{node}]:{lab.ssh_port} {public}\n"


def admitted(lab: Lab, identity: str) -> str:
    """Return the content of a worker's ``authorized_keys``."""
    return f"restrict,pty {identity} labctl-{lab.name}\n"


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def ensure_pair(path: Path) -> str:
    """Return the public key of a private key file, which is created if it is missing or broken."""
    public = public_of(path)
    if public is None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

        key = Ed25519PrivateKey.generate()
        write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return public


def public_of(path: Path) -> str | None:
    """Return the public line of a private key file; None if it is missing or broken.

    The file has the public key in clear before the private section, which repeats it (PROTOCOL.key of OpenSSH).
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        blob = base64.b64decode("".join(text.removeprefix(BEGIN).removesuffix(END).split()), validate=True)
    except (FileNotFoundError, ValueError):
        return None
    start = len(HEADER)
    public, size, private = blob[start : start + 32], blob[start + 32 : start + 36], blob[start + 36 :]
    if not blob.startswith(HEADER) or int.from_bytes(size, "big") != len(private) or public not in private:
        return None
    return f"ssh-ed25519 {base64.b64encode(ED25519 + public).decode()}"
