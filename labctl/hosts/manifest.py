"""A directory of this machine as it is to lie on a host: names, modes and contents, and one digest of all that."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from labctl import model, naming
from labctl.errors import ConfigError, HostError

Kind = Literal["dir", "file", "link"]
KINDS: tuple[tuple[Kind, int], ...] = (("dir", stat.S_IFDIR), ("file", stat.S_IFREG), ("link", stat.S_IFLNK))
SKIPPED = "__pycache__"
RESERVED = (".sent", ".now")
"""Names that a sent directory has on its host beside those of the tree."""
PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a tree."""

    path: str
    """Relative to the root, as ``os.fsdecode`` reads it."""
    kind: Kind
    mode: int
    """Permission bits. A directory's owner may do all in it: else nobody could fill or remove it."""
    size: int
    """Bytes of a file; 0 for others."""
    content: str
    """SHA-256 of a file's content; where a link leads; nothing for a directory."""


@dataclass(frozen=True)
class Tree:
    """What lies below a root, in the order that the host is told of it; parents stand before what is in them."""

    root: Path
    entries: tuple[Entry, ...]

    @cached_property
    def names(self) -> dict[Kind, bytes]:
        """The paths of each kind as lists that end each path with NUL; they begin with ``./``, never with a dash."""
        return {
            kind: b"".join(b"./" + os.fsencode(entry.path) + b"\0" for entry in self.entries if entry.kind == kind)
            for kind, _ in KINDS
        }

    @cached_property
    def description(self) -> bytes:
        """The tree in the words of ``stat``, ``sha256sum`` and ``readlink``: a host that has it says the same of it."""
        dirs, files, links = (tuple(entry for entry in self.entries if entry.kind == kind) for kind, _ in KINDS)
        lines = (
            *(f"{stat.S_IFDIR | entry.mode:x}" for entry in dirs),
            *(f"{stat.S_IFREG | entry.mode:x} {entry.size}" for entry in files),
            *(entry.content for entry in files),
            # Their lengths first: where one leads may hold line ends.
            *(str(len(os.fsencode(entry.content))) for entry in links),
            *(entry.content for entry in links),
        )
        return b"".join(names + b"\0" for names in self.names.values()) + b"".join(
            os.fsencode(line) + b"\n" for line in lines
        )

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.description).hexdigest()


def parse(description: bytes) -> frozenset[Entry]:
    """The entries that a description tells of; none where it is not whole, as after a file was removed."""
    names: list[tuple[str, ...]] = []
    for _ in KINDS:
        # Each list ends with an empty name; an empty list is that alone.
        listed, found, description = description.partition(b"\0\0") if description[:1] != b"\0" else _empty(description)
        if not found:
            return frozenset()
        names.append(tuple(os.fsdecode(name[2:]) for name in listed.split(b"\0") if name))
    dirs, files, links = names
    lines = [os.fsdecode(line) for line in description.split(b"\n")[:-1]]
    if len(lines) != len(dirs) + 2 * len(files) + 2 * len(links):
        return frozenset()
    told = iter(lines)
    modes = {path: int(next(told), 16) & 0o7777 for path in dirs}
    facts = {path: next(told).split() for path in files}
    targets = lines[len(lines) - len(links) :]
    return frozenset(
        (
            *(Entry(path, "dir", mode, 0, "") for path, mode in modes.items()),
            *(Entry(path, "file", int(facts[path][0], 16) & 0o7777, int(facts[path][1]), next(told)) for path in files),
            *(Entry(path, "link", 0o777, 0, target) for path, target in zip(links, targets, strict=True)),
        )
    )


def _empty(description: bytes) -> tuple[bytes, bytes, bytes]:
    return b"", b"\0", description[1:]


def of(root: Path, only: Collection[str] | None = None) -> Tree:
    """The tree of a directory, or of these of its names alone, without compiled Python, sockets and other devices.

    HostError for what cannot be read here, ConfigError for a name that hosts keep for labctl.
    """
    root = root.resolve()
    try:
        entries = tuple(_entries(root, "", only))
    except OSError as error:
        raise HostError(f"cannot read {error.filename}: {error.strerror}", hint=f"ls -ld {error.filename}") from error
    for entry in entries:
        if entry.path in RESERVED:
            raise ConfigError(f"{root / entry.path} cannot be sent: hosts keep that name for labctl", hint="rename it")
    return Tree(root, entries)


def _entries(root: Path, folder: str, only: Collection[str] | None = None) -> Iterator[Entry]:
    with os.scandir(root / folder) as scan:
        found = sorted(scan, key=lambda item: item.name)
    for item in found:
        if item.name == SKIPPED or (only is not None and item.name not in only):
            continue
        path = f"{folder}{item.name}"
        try:
            if item.is_symlink():
                yield Entry(path, "link", 0o777, 0, os.readlink(item.path))  # noqa: PTH115 - a Path would tidy what it says
            elif item.is_dir():
                yield Entry(path, "dir", item.stat().st_mode & 0o777 | 0o700, 0, "")
                yield from _entries(root, f"{path}/")
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


def of_nodes(directory: Path, nodes: Sequence[str], *, launcher: bool) -> dict[str, Tree]:
    """What a host with these nodes of a lab gets for them, by where it lies below the lab's directory on both sides.

    The first node's directory holds the launcher's files and its private key; only the ``launcher``'s host gets them.
    They are a tree of their own because the running launcher is to see new ones: a mount that is below a tree's
    directory shows for ever what lay there when its container started.
    """
    trees = {}
    for node in nodes:
        folder = naming.node_directory(node)
        names = {path.name for path in (directory / folder).iterdir()}
        trees[folder] = of(directory / folder, names - {model.LAUNCHER})
    if launcher:
        folder = f"{naming.node_directory(nodes[0])}/{model.LAUNCHER}"
        trees[folder] = of(directory / folder)
    return trees
