"""Image archives of `docker save`: read, and streamed without the layers that an engine already has.

An engine can load an archive that lacks the lowest layers of an image, if an image that it has begins with them
(sources: moby/moby #18727 for the classic store, containerd/containerd #9554 for containerd's).
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.errors import HostError
from labctl.system import human
from labctl.system.progress import Progress
from labctl.system.tar import BROKEN, END, member_header, padding

PIECE = 1 << 20
"""Bytes per read."""
LARGEST_DOCUMENT = 32 << 20
"""Maximum bytes of a manifest or configuration."""
_LEADING = ("image.manifest.v1+json", "image.index.v1+json", "manifest.v2+json", "manifest.list.v2+json")
"""Suffixes of the media types of documents that refer to other documents."""
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class Range(Struct, frozen=True):
    """A range of bytes of a file."""

    path: Path
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes from offset ``start`` in the range. HostError if the file was truncated."""
        left = self.size - start
        with self.path.open("rb") as file:
            file.seek(self.offset + start)
            while left:
                piece = file.read(min(PIECE, left))
                if not piece:
                    raise HostError(f"{self.path} was truncated while it was read")
                left -= len(piece)
                yield piece


class ArchiveStream(Struct, frozen=True, kw_only=True):
    """A tar stream of bytes in memory and ranges of a file; it can be read from any offset."""

    parts: tuple[bytes | Range, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    @property
    def key(self) -> str:
        """Digest that identifies the stream, of its bytes in memory and the sizes of its ranges."""
        return sha256(part if isinstance(part, bytes) else part.size.to_bytes(8, "big") for part in self.parts)

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes from offset ``start``."""
        for part in self.parts:
            skipped = min(start, len(part))
            start -= skipped
            if isinstance(part, bytes):
                yield part[skipped:]
            else:
                yield from part.chunks(skipped)


class Image(Struct, frozen=True, kw_only=True):
    """An image in an archive, with its layers from the lowest up."""

    name: str
    ids: frozenset[str]
    """Possible ids in an engine: the digest of its configuration or, in containerd's store, of its manifest."""
    diffs: tuple[str, ...]
    """Digest of each uncompressed layer."""
    layers: tuple[str, ...]
    """Archive member of each layer."""
    documents: tuple[tuple[str, bytes], ...]
    """Small archive members and their contents."""


class Archive:
    """An image archive in a file. HostError if the file is not an image archive."""

    def __init__(self, path: Path) -> None:
        """Open the archive, index its members, and read its manifests. HostError if it is not one."""
        self.path = path
        with _reading(path):
            with tarfile.open(path, "r:") as tar:
                self._members = _located(path, tar)
            self._manifest = json.loads(self._read("manifest.json"))
            self._index = json.loads(self._read("index.json")) if "index.json" in self._members else {}

    def image(self, name: str) -> Image:
        """Return an image of the archive by its name. HostError if it has none of that name or is broken."""
        with _reading(self.path):
            return self._image(name)

    def _image(self, name: str) -> Image:
        """Return an image by its name. HostError if there is none; errors of a broken archive are not caught."""
        tag = tagged(name)
        entries = {tag: entry for entry in self._manifest for tag in entry["RepoTags"] or ()}
        if tag not in entries:
            raise HostError(f"{self.path} has no image {name}", hint=f"it has {', '.join(entries) or 'none'}")
        entry = entries[tag]
        config, layers = self._read(entry["Config"]), entry["Layers"]
        listed = self._index.get("manifests", ())
        manifests = [manifest for manifest in listed if entry["Config"] in self._below(manifest)]
        digests = [manifest["digest"] for manifest in manifests]
        return Image(
            name=name,
            ids=frozenset((f"sha256:{sha256([config])}", *digests)),
            diffs=tuple(json.loads(config)["rootfs"]["diff_ids"]),
            layers=tuple(layers),
            documents=tuple(self._documents(tag, entry, manifests).items()),
        )

    def _documents(self, tag: str, entry: Mapping[str, Any], manifests: list[Any]) -> dict[str, bytes]:
        """Return manifest, index and other blobs, without layers, of an archive of this image alone."""
        config, layers = entry["Config"], entry["Layers"]
        documents = {"manifest.json": _json([{"Config": config, "RepoTags": [tag], "Layers": layers}])}
        if manifests:
            documents |= {"oci-layout": _LAYOUT, "index.json": _json({**self._index, "manifests": manifests})}
        blobs = dict.fromkeys([config, *chain.from_iterable(map(self._below, manifests))])
        return documents | {blob: self._read(blob) for blob in blobs if blob not in layers}

    def stream(self, image: Image, held: int = 0) -> ArchiveStream:
        """Return an archive of an image without its ``held`` lowest layers, always the same. HostError if broken."""
        parts: list[bytes | Range] = [member_header("blobs/"), member_header("blobs/sha256/")]
        for name, content in image.documents:
            parts.append(member_header(name, len(content)) + content + padding(len(content)))
        for name in dict.fromkeys(image.layers[held:]):
            layer = self._members.get(name)
            if layer is None:
                raise HostError(f"{self.path}: a layer of {image.name} is missing", hint=f"docker pull {image.name}")
            parts += [member_header(name, layer.size), layer, padding(layer.size)]
        return ArchiveStream(parts=(*parts, END))

    def _below(self, descriptor: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the members that a descriptor refers to, directly or by manifests; missing ones are skipped."""
        names: dict[str, None] = {}
        pending = [descriptor]
        while pending:
            current = pending.pop()
            name = "blobs/" + current["digest"].replace(":", "/")
            # A missing member belongs to another platform.
            if name in names or name not in self._members:
                continue
            names[name] = None
            document = json.loads(self._read(name)) if current["mediaType"].endswith(_LEADING) else {}
            config = [document["config"]] if "config" in document else []
            pending += reversed([*config, *document.get("layers", ()), *document.get("manifests", ())])
        return tuple(names)

    def _read(self, name: str) -> bytes:
        """Return the content of a member; ValueError if it is too large for a document."""
        if len(self._members[name]) > LARGEST_DOCUMENT:
            raise ValueError(f"{name} is larger than {human.memory(LARGEST_DOCUMENT)}")
        return b"".join(self._members[name].chunks())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise errors in the block, as from a broken archive, again as HostError on the file."""
    try:
        yield
    except (*BROKEN, OSError, LookupError, TypeError, AttributeError) as error:
        raise HostError(f"{path} is not an image archive of Docker: {error}") from error


def sha256(chunks: Iterable[bytes]) -> str:
    """Return the hexadecimal digest of the chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def tagged(name: str) -> str:
    """Return an image's name with its tag, as engines and archives write it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def report(chunks: Iterable[bytes], progress: Progress) -> Iterator[bytes]:
    """Yield the chunks; advance the progress by the size of each after it."""
    for chunk in chunks:
        yield chunk
        progress.advance(len(chunk))


def common(layers: Sequence[str], held: Iterable[Sequence[str]]) -> int:
    """Return how many of its lowest layers an image has in common with the best match among the ``held`` ones."""
    most = 0
    for others in held:
        while most < min(len(layers), len(others)) and tuple(others[: most + 1]) == tuple(layers[: most + 1]):
            most += 1
    return most


def _located(path: Path, tar: tarfile.TarFile) -> dict[str, Range]:
    """Return each member's byte range by name; a link, as in engines before 25 for repeated layers, is resolved."""
    ranges: dict[str, Range] = {}
    for member in tar:
        if member.isfile():
            ranges[member.name] = Range(path, member.offset_data, member.size)
        elif member.issym() or member.islnk():
            base = posixpath.dirname(member.name) if member.issym() else ""
            target = posixpath.normpath(posixpath.join(base, member.linkname))
            if target in ranges:
                ranges[member.name] = ranges[target]
    return ranges


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
