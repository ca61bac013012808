"""The image contains no key and no credential, in any layer, deleted files included; its packages can be listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from docker import DockerClient
from labctl.backends.docker.images import sbom
from labctl.backends.docker.images.package_sources import pins
from labctl.system import files

pytestmark = pytest.mark.docker

KEYS = re.compile(
    rb"-----BEGIN (?:OPENSSH |RSA |EC |DSA |ENCRYPTED )?PRIVATE KEY-----\r?\n(?:[\w+/=: ,-]+\r?\n){2}", re.ASCII
)
NAMES = re.compile(
    r"(^|/)(ssh_host_[a-z0-9]+_key(\.pub)?|id_(rsa|ed25519|ecdsa|dsa)|\.netrc|\.pypirc|pip\.conf|authorized_keys"
    r"|auth\.conf|\.docker/config\.json|\.git-credentials)$"
)
# Only in configuration: the documentation of packages is full of https://user:password@example.com.
CONFIGURATION = re.compile(r"^(etc|root|home|run|tmp|var/lib/apt)/")
USER_IN_URL = re.compile(rb"https?://[^\s/:@]+:[^\s/@]+@")
BIGGEST = 64 * 2**20
"""Size of the largest file to read; larger files are shared libraries, which hold no keys."""
BLOCK = 2**16
"""Bytes per read, here and in tarfile, whose readers copy their buffer at each read."""
LIBRARY = b"\x7fELF"
"""Prefix of files that may contain keys of their own self-test, as GnuTLS does."""


def layers(engine: DockerClient, image: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield layer, path and content of each entry in the image's layers; the content of big files is empty."""
    with (
        closing(engine.api.get_image(image, chunk_size=BLOCK)) as response,
        tarfile.open(fileobj=cast(IO[bytes], Chunks(response)), mode="r|", bufsize=BLOCK) as saved,
    ):
        for member in saved:
            blob = saved.extractfile(member) if member.isfile() else None
            if blob is None:
                continue
            # Other files are descriptions of layers, in JSON.
            with suppress(tarfile.ReadError), tarfile.open(fileobj=blob, mode="r|*", bufsize=BLOCK) as layer:
                for file in layer:
                    content = layer.extractfile(file) if file.isfile() and file.size <= BIGGEST else None
                    yield member.name, file.name.removeprefix("./"), content.read() if content else b""


class Chunks:
    """A file-like reader of a stream of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), b""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes of the stream, fewer at its end."""
        parts, have = [self._rest], len(self._rest)
        while have < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]


def credentials_of_this_host() -> set[bytes]:
    """Return the passwords in URLs of pip's configuration and of the environment."""
    pip = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    addresses = re.findall(r"https?://[^\s'\"]+", " ".join((pip, *os.environ.values())))
    return {password.encode() for word in addresses if (password := urlsplit(word).password)}


def test_the_search_knows_a_key_when_it_sees_one() -> None:
    """The pattern KEYS finds a new private key in OpenSSH and PKCS8 form."""
    for form in (PrivateFormat.OpenSSH, PrivateFormat.PKCS8):
        assert KEYS.search(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, form, NoEncryption()))


def test_no_layer_holds_a_key_or_a_credential(engine: DockerClient, image: str) -> None:
    """No file of any layer has a credential's name, a private key, or a password in a URL or of this host."""
    passwords = credentials_of_this_host()
    findings, files, members = [], 0, set()
    for layer, name, content in layers(engine, image):
        members.add(layer)
        files += 1
        if NAMES.search(name):
            findings.append(f"{name}: by its name")
        if KEYS.search(content) and not content.startswith(LIBRARY):
            findings.append(f"{name}: a private key")
        if CONFIGURATION.search(name) and USER_IN_URL.search(content):
            findings.append(f"{name}: a password in an address")
        findings += [f"{name}: a password of this host" for password in passwords if password in content]
    assert len(members) >= 3
    assert files > 10_000
    assert findings == []


def test_the_history_and_the_configuration_hold_no_credential(engine: DockerClient, image: str) -> None:
    """No password in a URL or of this host is in the image's history and attributes."""
    built = engine.images.get(image)
    shown = json.dumps([built.history(), built.attrs]).encode()
    assert not USER_IN_URL.search(shown)
    assert not [password for password in credentials_of_this_host() if password in shown]


def test_the_bill_of_materials_has_what_the_lock_pins_and_what_debian_installed(image: str, tmp_path: Path) -> None:
    """The SBOM of labctl/cpu lists the lock's packages and Debian's, each once."""
    if image != "labctl/cpu":
        pytest.skip("LAB_IMAGE is installed from another lock")
    count = sbom.write(image, tmp_path / "sbom.json")
    listed = [component["purl"] for component in json.loads((tmp_path / "sbom.json").read_text())["components"]]
    assert len(listed) == count == len(set(listed))
    expected = pins(files.path("docker", "cpu.lock").read_text())
    assert {f"pkg:pypi/{name}@{version}".replace("+", "%2B") for name, version in expected.items()} <= set(listed)
    assert any(purl.startswith("pkg:deb/debian/openssh-server@") for purl in listed)
