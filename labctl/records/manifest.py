"""Manifest of a directory: names, modes, sizes and digests, on this machine or as a host describes it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from labctl import model, naming
from labctl.errors import ConfigError, HostError

SKIPPED = "__pycache__"
RESERVED = (".versions", ".current")
"""Names in a pushed directory on its host that are not of the tree."""
PIECE = 1 << 18
Keep = Callable[[os.DirEntry[str], str], bool]
"""Tells if an entry, by its path below the root, belongs to a manifest."""


class Entry(Struct, frozen=True):
    """An entry of a tree."""

    path: str
    """Relative to the root, as ``os.fsdecode`` reads it."""
    kind: Literal["dir", "file", "link"]
    mode: int
    """Permission bits. A directory's owner has all, or it could not be filled or removed."""
    size: int
    """Bytes of a file; 0 for others."""
    content: str
    """SHA-256 of a file's content; target of a link; empty for a directory."""


class Manifest(Struct, frozen=True):
    """Entries below a directory of this machine; parents come before their entries."""

    root: Path
    entries: tuple[Entry, ...]


def scan(root: Path, only: Collection[str] | None = None) -> Manifest:
    """Return a directory's manifest, no compiled Python or sockets. HostError if unreadable, ConfigError if reserved.

    ``only``: the names at the top to include; None for all.
    """
    return _read(root, lambda _, path: only is None or path.partition("/")[0] in only)


def pick(root: Path, names: Iterable[str]) -> Manifest:
    """Return the manifest of these files and links below a directory, missing ones left out. Errors as ``scan``."""
    leaves = frozenset(names)
    parents = chain.from_iterable(PurePosixPath(name).parents for name in leaves)
    folders = frozenset(map(str, parents))
    # Git also lists removed files, and files in a folder that was replaced by a file or a link.
    return _read(root, lambda item, path: path in (folders if item.is_dir(follow_symlinks=False) else leaves))


def _read(root: Path, keep: Keep) -> Manifest:
    """Return the manifest of entries that ``keep`` accepts. HostError if unreadable, ConfigError if reserved."""
    root = root.resolve()
    try:
        entries = tuple(_scan(root, "", keep))
    except OSError as error:
        raise HostError(f"cannot read {error.filename}: {error.strerror}", hint=f"ls -ld {error.filename}") from error
    for entry in entries:
        if entry.path in RESERVED:
            raise ConfigError(f"{root / entry.path} cannot be sent: hosts keep that name for labctl", hint="rename it")
    return Manifest(root, entries)


def _scan(root: Path, folder: str, keep: Keep) -> Iterator[Entry]:
    """Yield entries that ``keep`` accepts below a folder, sorted, each folder first. OSError if unreadable."""
    with os.scandir(root / folder) as entries:
        items = sorted(entries, key=lambda item: item.name)
    for item in items:
        path = f"{folder}{item.name}"
        try:
            if item.name == SKIPPED or not keep(item, path):
                continue
            if item.is_symlink():
                yield Entry(path, "link", 0o777, 0, os.readlink(item.path))  # noqa: PTH115 - a Path would normalize the target
            elif item.is_dir():
                yield Entry(path, "dir", item.stat().st_mode & 0o777 | 0o700, 0, "")
                yield from _scan(root, f"{path}/", keep)
            elif item.is_file():
                yield _file(path, item.path)
        except FileNotFoundError:
            continue  # Removed since it was listed, as an editor's intermediate file.


def _file(path: str, place: str) -> Entry:
    """Return a file's entry with mode, size and SHA-256."""
    digest = hashlib.sha256()
    size = 0
    with open(place, "rb", buffering=0) as stream:  # noqa: PTH123 - ten thousand times, and scandir gives no Path
        mode = os.fstat(stream.fileno()).st_mode & 0o777
        while piece := stream.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return Entry(path, "file", mode, size, digest.hexdigest())


def scan_nodes(directory: Path, nodes: Sequence[str], *, launcher: bool) -> dict[str, Manifest]:
    """Map a node's folder to its manifest for a host, without the launcher's, which only ``launcher`` adds.

    The first node's directory holds the launcher's files and its private key; only the ``launcher``'s host gets them.
    Each is pushed by itself so that the running launcher sees new files: a mount of something below a pushed directory
    keeps the content that it had when its container started.
    """
    manifests = {}
    for node in nodes:
        folder = naming.node_directory(node)
        names = {path.name for path in (directory / folder).iterdir()}
        manifests[folder] = scan(directory / folder, names - {model.LAUNCHER})
    if launcher:
        folder = f"{naming.node_directory(nodes[0])}/{model.LAUNCHER}"
        manifests[folder] = scan(directory / folder)
    return manifests


def parse(records: Iterator[bytes]) -> tuple[frozenset[str], frozenset[Entry]]:
    """Parse a host's listing: names of its current version, and its entries; either is empty if there is none.

    No names if the directory does not exist; no entries if they cannot be read, as while they are being changed.
    """

    def paths() -> list[str]:
        """Return the paths up to the next empty record, without ``.current/``."""
        names = iter(lambda: next(records, b""), b"")
        return [os.fsdecode(name).removeprefix(".current/") for name in names]

    if not (names := frozenset(paths())):
        return names, frozenset()
    dirs, files, links, targets = (paths() for _ in range(4))
    modes, facts, sums = (next(records, b"") for _ in range(3))
    sizes = [line.split() for line in facts.splitlines()]
    digests = re.findall(rb"(?m)^\\?([0-9a-f]{64}) ", sums)
    entries: set[Entry] = set()
    try:
        for path, mode in zip(dirs, modes.split(), strict=True):
            entries.add(Entry(path, "dir", _mode(mode), 0, ""))
        for path, (mode, size), digest in zip(files, sizes, digests, strict=True):
            entries.add(Entry(path, "file", _mode(mode), int(size), digest.decode()))
        for path, target in zip(links, targets, strict=True):
            entries.add(Entry(path, "link", 0o777, 0, target.removesuffix("\n")))
    except ValueError:
        return names, frozenset()
    return names, frozenset(entries)


def _mode(text: bytes) -> int:
    """Return the permission bits in a hexadecimal mode."""
    return int(text, 16) & 0o7777
