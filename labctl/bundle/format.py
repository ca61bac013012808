"""Bundle file format: a Docker image archive, then labctl's members, then a JSON member with all checksums.

``docker load`` accepts it. The checksums detect damage and truncation, not tampering.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from msgspec import Struct

from labctl.backends.docker.images.archive import Range, report, sha256
from labctl.errors import ConfigError, HostError
from labctl.system.files import is_below, leads_out
from labctl.system.progress import Progress
from labctl.system.tar import BROKEN

OURS = "labctl/"
"""Prefix of labctl's members; the others belong to the image archive."""
SEAL = "labctl/bundle.json"
"""Last member: metadata and checksums."""
SCHEMA = 1
AGAIN = "copy the bundle again or re-create it"
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")


class BundleEntry(Struct, frozen=True, kw_only=True):
    """A file of a bundle, or a symbolic link if ``target`` is set."""

    content: Range
    mode: int
    target: str = ""


class BundleWriter:
    """Context manager that appends members to an image archive, and the checksums if the block succeeds."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Open an image archive to append to, and compute its members' checksums; ``about`` is stored as metadata."""
        self._about = about
        self._sums: dict[str, str] = {}
        self._links: dict[str, str] = {}
        for name, member in _members(path).items():
            if member.target:
                self._links[name] = member.target
            else:
                # Docker's blobs are named by their digest.
                blob = _BLOB.fullmatch(name)
                self._sums[name] = blob[1] if blob else sha256(member.content.chunks())
        self._tar = tarfile.open(path, "a", format=tarfile.GNU_FORMAT)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Append the checksums unless the block failed, and close the file."""
        if kind is None:
            metadata = {"schema": SCHEMA, **self._about, "sha256": dict(self._sums), "links": self._links}
            self.add(SEAL.removeprefix(OURS), _sealed(metadata))
        self._tar.close()

    def add(self, name: str, source: Path | bytes = b"", mode: int = 0o644, target: str = "") -> None:
        """Append a file, by path or content, or a symbolic link if ``target`` is set; remember its checksum."""
        member = tarfile.TarInfo(OURS + name)
        member.mode = mode
        if target:
            member.type, member.linkname = tarfile.SYMTYPE, target
            self._tar.addfile(member)
            self._links[member.name] = target
            return
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as stream:
            member.size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            reading = _Summing(stream)
            self._tar.addfile(member, reading)  # type: ignore[arg-type]
        self._sums[member.name] = reading.digest.hexdigest()


class _Summing:
    """Stream that computes the SHA-256 of the bytes read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes and add them to the checksum."""
        piece = self._stream.read(size)
        self.digest.update(piece)
        return piece


class Bundle:
    """A bundle opened for reading. ConfigError if it cannot be read, HostError if it is damaged."""

    def __init__(self, path: Path) -> None:
        """Read metadata and list members. ConfigError if unreadable or of another labctl, HostError if damaged."""
        self.path = path
        self.members = _members(path)
        seal = self.members.pop(SEAL, None)
        if seal is None:
            raise HostError(f"{path} is truncated or not a bundle: no {SEAL} at its end", hint=AGAIN)
        text = b"".join(seal.content.chunks())
        try:
            self.about: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise HostError(f"{path} is damaged: {SEAL} cannot be read", hint=AGAIN) from error
        if not isinstance(self.about, dict) or text != _sealed(self.about):
            raise HostError(f"{path} is damaged: {SEAL} does not match its checksum", hint=AGAIN)
        if self.about.get("schema") != SCHEMA:
            writer = self.about.get("labctl", "unknown version")
            raise ConfigError(f"{path} was written by another labctl ({writer})", hint="use that one")
        if not all(isinstance(self.about.get(key), dict) for key in ("sha256", "links")):
            raise HostError(f"{path} has no checksums", hint=AGAIN)

    def below(self, folder: str) -> dict[str, BundleEntry]:
        """Return the members of one of labctl's directories, by path relative to it."""
        start = f"{OURS}{folder}/"
        return {name.removeprefix(start): member for name, member in self.members.items() if name.startswith(start)}

    def check(self, notice: Callable[[str], None]) -> None:
        """Raise HostError if members or checksums do not match, or a path is unsafe."""
        sums, links = self.about["sha256"], self.about["links"]
        odd = sorted(set(self.members) ^ {*sums, *links})
        if odd:
            raise HostError(f"{self.path} is damaged: {odd[0]} is missing, or was added", hint=AGAIN)
        total = sum(len(member.content) for member in self.members.values())
        progress = Progress(f"checking {self.path.name}", total, 0, notice)
        for name, member in self.members.items():
            through_link = any(str(parent) in links for parent in PurePosixPath(name).parents)
            if through_link or not _is_inside(name, member.target):
                raise HostError(f"{self.path}: unsafe path in bundle: {name!a}", hint="do not use this file")
            if name in links:
                if member.target != links[name]:
                    raise HostError(f"{self.path} is damaged: {name}", hint=AGAIN)
            elif sha256(report(member.content.chunks(), progress)) != sums[name]:
                raise HostError(f"{self.path} is damaged: {name} does not match its checksum", hint=AGAIN)


def _members(path: Path) -> dict[str, BundleEntry]:
    """Read the files and links of a bundle, by name. ConfigError if it cannot be read, HostError if it is damaged."""
    try:
        with tarfile.open(path, "r:") as tar:
            return {
                member.name: BundleEntry(
                    content=Range(path, member.offset_data, member.size), mode=member.mode, target=member.linkname
                )
                for member in tar
                if member.isfile() or member.issym()
            }
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except BROKEN as error:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        hint = "gunzip it first" if packed else AGAIN
        raise HostError(f"{path} is damaged or not a bundle: {error}", hint=hint) from error


def _sealed(metadata: Mapping[str, Any]) -> bytes:
    """Render the last member: metadata as JSON, with its own checksum under ``seal``."""
    metadata = {key: value for key, value in metadata.items() if key != "seal"}
    text = json.dumps(metadata, indent=1, sort_keys=True)
    return json.dumps({**metadata, "seal": sha256([text.encode()])}, indent=1, sort_keys=True).encode()


def _is_inside(name: str, target: str) -> bool:
    """Tell if a name, and the target of a link of that name, stay below the member's folder of the bundle.

    Names with control characters do not: terminals would obey them.
    """
    _, _, path = name.removeprefix(OURS).partition("/")
    leaves = name.startswith(OURS) and leads_out(path, target)
    return is_below(name) and name.isprintable() and posixpath.normpath(name) == name and not leaves
