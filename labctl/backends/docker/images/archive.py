"""Reads an image archive of `docker save`, and streams it without the layers that an engine has already.

An engine loads an archive without the layers that any of its images begins with (sources: moby/moby #18727 for the
classic store, containerd/containerd #9554 for containerd's).
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.errors import HostError
from labctl.system.progress import Progress
from labctl.system.tar import BROKEN, END, member_header, padding

PIECE = 1 << 20
"""Bytes per read."""
LARGEST_DOCUMENT = 32 << 20
"""Bytes of a manifest or configuration."""
_LEADING = ("image.manifest.v1+json", "image.index.v1+json", "manifest.v2+json", "manifest.list.v2+json")
"""Suffixes of the media types of documents that refer to others."""
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class Range(Struct, frozen=True):
    """A run of bytes of a file."""

    path: Path
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """The bytes, from an offset in the range on."""
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
    """A tar stream of bytes in memory and ranges of a file; it can be read from any offset on."""

    parts: tuple[bytes | Range, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    @property
    def key(self) -> str:
        """Identifies the stream: the bytes before a range name it by its digest."""
        return sha256(part if isinstance(part, bytes) else part.size.to_bytes(8, "big") for part in self.parts)

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """The bytes from an offset on."""
        for part in self.parts:
            skipped = min(start, len(part))
            start -= skipped
            if isinstance(part, bytes):
                yield part[skipped:]
            else:
                yield from part.chunks(skipped)


class Image(Struct, frozen=True, kw_only=True):
    """An image of an archive, its layers from the lowest up."""

    name: str
    ids: frozenset[str]
    """Its id in an engine: the digest of its configuration or, with containerd's store, of its manifest."""
    diffs: tuple[str, ...]
    """The digest of each layer, unpacked."""
    layers: tuple[str, ...]
    """The member that holds each."""
    documents: tuple[tuple[str, bytes], ...]
    """Its small members, with what they hold."""


class Archive:
    """An image archive in a file. HostError if the file is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path):
            with tarfile.open(path, "r:") as tar:
                self._members = _located(path, tar)
            self._manifest = json.loads(self._read("manifest.json"))
            self._index = json.loads(self._read("index.json")) if "index.json" in self._members else {}

    def image(self, name: str) -> Image:
        """An image by its name. HostError if the archive does not have it."""
        with _reading(self.path):
            return self._image(name)

    def _image(self, name: str) -> Image:
        wanted = tagged(name)
        entries = {tag: entry for entry in self._manifest for tag in entry["RepoTags"] or ()}
        if wanted not in entries:
            raise HostError(f"{self.path} has no image {name}", hint=f"it has {', '.join(entries) or 'none'}")
        entry = entries[wanted]
        config, layers = self._read(entry["Config"]), entry["Layers"]
        described = [one for one in self._index.get("manifests", ()) if entry["Config"] in self._below(one)]
        blobs = dict.fromkeys(blob for one in described for blob in self._below(one))
        own = {"manifest.json": _json([{"Config": entry["Config"], "RepoTags": [wanted], "Layers": layers}])}
        if described:
            own |= {"oci-layout": _LAYOUT, "index.json": _json({**self._index, "manifests": described})}
        small = dict.fromkeys(blob for blob in (entry["Config"], *blobs) if blob not in layers)
        return Image(
            name=name,
            ids=frozenset((f"sha256:{sha256([config])}", *(one["digest"] for one in described))),
            diffs=tuple(json.loads(config)["rootfs"]["diff_ids"]),
            layers=tuple(layers),
            documents=(*own.items(), *((blob, self._read(blob)) for blob in small)),
        )

    def stream(self, image: Image, held: int = 0) -> ArchiveStream:
        """An archive of one image without its ``held`` lowest layers; the same bytes every time."""
        parts: list[bytes | Range] = [member_header("blobs/"), member_header("blobs/sha256/")]
        for name, content in image.documents:
            parts.append(member_header(name, len(content)) + content + padding(len(content)))
        for name in dict.fromkeys(image.layers[held:]):
            where = self._members.get(name)
            if where is None:
                raise HostError(f"{self.path}: a layer of {image.name} is missing", hint=f"docker pull {image.name}")
            parts += [member_header(name, where.size), where, padding(where.size)]
        return ArchiveStream(parts=(*parts, END))

    def _below(self, descriptor: Mapping[str, Any]) -> tuple[str, ...]:
        """The members that a descriptor refers to: a manifest with its configuration and layers, or several of them."""
        found: dict[str, None] = {}
        left = [descriptor]
        while left:
            one = left.pop()
            name = "blobs/" + one["digest"].replace(":", "/")
            # One that is not there is of another platform.
            if name in found or name not in self._members:
                continue
            found[name] = None
            said = json.loads(self._read(name)) if one["mediaType"].endswith(_LEADING) else {}
            config = [said["config"]] if "config" in said else []
            left += reversed([*config, *said.get("layers", ()), *said.get("manifests", ())])
        return tuple(found)

    def _read(self, name: str) -> bytes:
        if len(self._members[name]) > LARGEST_DOCUMENT:
            raise ValueError(f"{name} is larger than {LARGEST_DOCUMENT >> 20} MiB")
        return b"".join(self._members[name].chunks())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """HostError for what an archive of another program, or a broken one, raises when it is read."""
    try:
        yield
    except (*BROKEN, OSError, LookupError, TypeError, AttributeError) as error:
        raise HostError(f"{path} is not an image archive of Docker: {error}") from error


def sha256(chunks: Iterable[bytes]) -> str:
    """Their hexadecimal digest."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def tagged(name: str) -> str:
    """An image's name with its tag, as engines and archives spell it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def report(chunks: Iterable[bytes], progress: Progress) -> Iterator[bytes]:
    """Yield the chunks and advance the progress by each."""
    for chunk in chunks:
        yield chunk
        progress.advance(len(chunk))


def common(layers: Sequence[str], held: Iterable[Sequence[str]]) -> int:
    """How many of the lowest layers some image begins with too."""
    most = 0
    for others in held:
        while most < min(len(layers), len(others)) and tuple(others[: most + 1]) == tuple(layers[: most + 1]):
            most += 1
    return most


def _located(path: Path, tar: tarfile.TarFile) -> dict[str, Range]:
    """The range of each file; engines before 25 link a layer that occurs twice."""
    found: dict[str, Range] = {}
    for member in tar:
        if member.isfile():
            found[member.name] = Range(path, member.offset_data, member.size)
        elif member.issym() or member.islnk():
            base = posixpath.dirname(member.name) if member.issym() else ""
            target = posixpath.normpath(posixpath.join(base, member.linkname))
            if target in found:
                found[member.name] = found[target]
    return found


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
