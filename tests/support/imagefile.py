"""Image archives made without an engine."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import tarfile
from collections.abc import Iterable
from pathlib import Path

from docker import DockerClient


class LoadedImage:
    """An image in this machine's engine, with two layers of random bytes; ``change`` replaces the upper layer."""

    def __init__(self, engine: DockerClient, name: str, path: Path, size: int) -> None:
        """Make and load the first version of the image, from an archive at ``path``."""
        self.name, self._engine, self._path, self._size = name, engine, path, size
        self._lower = layer("one", size)
        self.change()

    def change(self) -> None:
        """Remove the image and load one with the same lower and a new upper layer."""
        self.remove()
        image_archive(self._path, self.name, [self._lower, layer("two", self._size)], Entrypoint=["/none"])
        with self._path.open("rb") as archive:
            self._engine.images.load(archive)
        self._path.unlink()

    @property
    def id(self) -> str:
        return str(self._engine.images.get(self.name).id)

    def remove(self) -> None:
        """Remove all images of that name from the engine."""
        for image in self._engine.images.list(self.name):
            self._engine.images.remove(image.id or "", force=True)


def layer(name: str, size: int) -> bytes:
    """Return the tar of a layer with one file of random bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = size
        tar.addfile(member, io.BytesIO(secrets.token_bytes(size)))
    return stream.getvalue()


def image_archive(path: Path, name: str, layers: Iterable[bytes], **config: object) -> Path:
    """Write an archive of an image with these layers, in the format of `docker save`; return its path."""
    contents = list(layers)
    diffs = ["sha256:" + hashlib.sha256(content).hexdigest() for content in contents]
    rootfs = {"type": "layers", "diff_ids": diffs}
    platform = {"architecture": "amd64", "os": "linux"}
    configuration = json.dumps({**platform, "config": config, "rootfs": rootfs}).encode()
    members = [(_blob(content), content) for content in (*contents, configuration)]
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": _descriptor(configuration),
        "layers": [_descriptor(content) for content in contents],
    }
    described = json.dumps(manifest).encode()
    index = {"schemaVersion": 2, "manifests": [{**_descriptor(described), "mediaType": kind}]}
    listed = [{"Config": _blob(configuration), "RepoTags": [name], "Layers": [_blob(content) for content in contents]}]
    members += [(_blob(described), described), ("index.json", json.dumps(index).encode())]
    members.append(("manifest.json", json.dumps(listed).encode()))
    with tarfile.open(path, "w") as tar:
        for member, content in dict(members).items():
            information = tarfile.TarInfo(member)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    return path


def _blob(content: bytes) -> str:
    """Return a blob's path in an image archive."""
    return f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def _descriptor(content: bytes) -> dict[str, object]:
    """Return an OCI descriptor of a blob, without a media type."""
    return {"mediaType": "", "digest": _blob(content).replace("blobs/", "").replace("/", ":"), "size": len(content)}
