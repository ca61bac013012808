"""Trees as they travel: one tar stream, or a directory for rsync to read; lists of names go with the files."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from labctl.errors import HostError
from labctl.tree import PIECE, Entry, Kind, Tree

LISTS: tuple[tuple[str, Kind], ...] = (("dirs", "dir"), ("files", "file"), ("links", "link"))
NAMES = "names"
END = bytes(2 * tarfile.BLOCKSIZE)
"""Of a tar archive."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tree on its way, and what the host shows in its place."""

    name: str
    tree: Tree
    there: frozenset[Entry] = frozenset()

    @property
    def new(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.tree.entries if entry not in self.there)


def stream(parts: Iterable[Part]) -> Iterator[bytes]:
    """A tar stream of the trees, each below its number; what is there comes as hard links into ``before/<number>``.

    HostError for a file that cannot be read any more.
    """
    for number, part in enumerate(parts):
        for name, kind in LISTS:
            names = part.tree.names[kind]
            yield header(f"{number}/{name}", tarfile.REGTYPE, 0o600, size=len(names))
            yield names + padding(len(names))
        yield header(f"{number}/tree", tarfile.DIRTYPE, 0o700)
        for entry in part.tree.entries:
            yield from _member(part, entry, f"{number}/tree/{entry.path}")
    yield END


def _member(part: Part, entry: Entry, name: str) -> Iterator[bytes]:
    if entry.kind == "dir":
        yield header(name, tarfile.DIRTYPE, entry.mode)
    elif entry.kind == "link":
        yield header(name, tarfile.SYMTYPE, entry.mode, link=entry.content)
    elif entry in part.there:
        yield header(name, tarfile.LNKTYPE, entry.mode, link=f"before/{name}")
    else:
        yield from _file(part.tree.root / entry.path, entry, name)


def _file(path: Path, entry: Entry, name: str) -> Iterator[bytes]:
    """As many bytes as the entry says: of a file that has changed since, the host finds that they are not its own."""
    left = entry.size
    try:
        with path.open("rb", buffering=0) as source:
            yield header(name, tarfile.REGTYPE, entry.mode, size=left, time=os.fstat(source.fileno()).st_mtime)
            while left and (piece := source.read(min(left, PIECE))):
                left -= len(piece)
                yield piece
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}", hint="the same command again") from error
    yield bytes(left)
    yield padding(entry.size)


def padding(size: int) -> bytes:
    """What comes after a file of so many bytes in a tar archive."""
    return bytes(-size % tarfile.BLOCKSIZE)


def header(name: str, kind: bytes, mode: int, *, size: int = 0, link: str = "", time: float = 0) -> bytes:
    """What comes before a member, in GNU's format, which holds a name of any length as the bytes that it is."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname, member.mtime = kind, mode, size, link, int(time)
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def lay_out(stage: Path, parts: Iterable[Part]) -> None:
    """Lay out the same in an empty directory for rsync, with the list of all that it is to take, each ended by NUL."""
    taken = b""
    for number, part in enumerate(parts):
        folder = stage / str(number)
        folder.mkdir()
        (folder / "tree").symlink_to(part.tree.root)
        for name, kind in LISTS:
            (folder / name).write_bytes(part.tree.names[kind])
            taken += os.fsencode(f"{number}/{name}\0")
        taken += b"".join(os.fsencode(f"{number}/tree/{entry.path}\0") for entry in part.tree.entries)
    (stage / NAMES).write_bytes(taken)
