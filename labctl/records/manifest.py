"""Manifest of a directory: names, modes, sizes and digests, as it is here and as a host describes it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from labctl import model, naming
from labctl.errors import ConfigError, HostError

SKIPPED = "__pycache__"
RESERVED = (".versions", ".current")
"""Names that a pushed directory has on its host beside those of the tree."""
PIECE = 1 << 18
Keep = Callable[[os.DirEntry[str], str], bool]
"""Whether a name, by its path below the root, belongs to a manifest."""


class Entry(Struct, frozen=True):
    """One name in a tree."""

    path: str
    """Relative to the root, as ``os.fsdecode`` reads it."""
    kind: Literal["dir", "file", "link"]
    mode: int
    """Permission bits. A directory's owner may do all in it: else nobody could fill or remove it."""
    size: int
    """Bytes of a file; 0 for others."""
    content: str
    """SHA-256 of a file's content; where a link leads; nothing for a directory."""


class Manifest(Struct, frozen=True):
    """What lies below a root here; parents stand before what is in them."""

    root: Path
    entries: tuple[Entry, ...]


def scan(root: Path, only: Collection[str] | None = None) -> Manifest:
    """The manifest of a directory, or of these of its names alone, without compiled Python, sockets and devices.

    HostError for what cannot be read here, ConfigError for a name that is reserved on hosts.
    """
    return _read(root, lambda _, path: only is None or path.partition("/")[0] in only)


def pick(root: Path, names: Iterable[str]) -> Manifest:
    """The manifest of these files and links below a directory, as far as they are there. Errors as ``scan``."""
    wanted = frozenset(names)
    folders = {str(folder) for name in wanted for folder in PurePosixPath(name).parents}
    # Git still lists what was removed, and what was in a folder where now is a file or a link.
    return _read(root, lambda item, path: path in (folders if item.is_dir(follow_symlinks=False) else wanted))


def _read(root: Path, keep: Keep) -> Manifest:
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
    with os.scandir(root / folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        path = f"{folder}{item.name}"
        try:
            if item.name == SKIPPED or not keep(item, path):
                continue
            if item.is_symlink():
                yield Entry(path, "link", 0o777, 0, os.readlink(item.path))  # noqa: PTH115 - a Path would tidy what it says
            elif item.is_dir():
                yield Entry(path, "dir", item.stat().st_mode & 0o777 | 0o700, 0, "")
                yield from _scan(root, f"{path}/", keep)
            elif item.is_file():
                yield _file(path, item.path)
        except FileNotFoundError:
            continue  # As good as removed before it was listed: an editor's intermediate file.


def _file(path: str, place: str) -> Entry:
    digest = hashlib.sha256()
    size = 0
    with open(place, "rb", buffering=0) as stream:  # noqa: PTH123 - ten thousand times, and scandir gives no Path
        mode = os.fstat(stream.fileno()).st_mode & 0o777
        while piece := stream.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return Entry(path, "file", mode, size, digest.hexdigest())


def scan_nodes(directory: Path, nodes: Sequence[str], *, launcher: bool) -> dict[str, Manifest]:
    """What a host with these nodes of a lab gets for them, by where it lies below the lab's directory on both sides.

    The first node's directory holds the launcher's files and its private key; only the ``launcher``'s host gets them.
    They are pushed apart because the running launcher is to see new ones: a mount of something below a pushed
    directory shows for ever what lay there when its container started.
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
    """One directory of what a host described: names that lead to its version in force, and the entries of that.

    No names where there is no such directory; no entries where they cannot be read, as while they are being changed.
    """

    def paths() -> list[str]:
        names = iter(lambda: next(records, b""), b"")
        return [os.fsdecode(name).removeprefix(".current/") for name in names]

    if not (names := frozenset(paths())):
        return names, frozenset()
    dirs, files, links, targets = (paths() for _ in range(4))
    modes, facts, sums = (next(records, b"") for _ in range(3))
    sizes = [line.split() for line in facts.splitlines()]
    digests = re.findall(rb"(?m)^\\?([0-9a-f]{64}) ", sums)
    try:
        entries = (
            *(Entry(path, "dir", _mode(mode), 0, "") for path, mode in zip(dirs, modes.split(), strict=True)),
            *(
                Entry(path, "file", _mode(mode), int(size), digest.decode())
                for path, (mode, size), digest in zip(files, sizes, digests, strict=True)
            ),
            *(Entry(path, "link", 0o777, 0, to.removesuffix("\n")) for path, to in zip(links, targets, strict=True)),
        )
    except ValueError:
        entries = ()
    return names, frozenset(entries)


def _mode(text: bytes) -> int:
    return int(text, 16) & 0o7777
