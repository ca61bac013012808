"""Merge the files that several nodes wrote of a run into one directory; nothing is overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import IO, Any

from msgspec import Struct, field

from labctl.records.manifest import PIECE, Manifest
from labctl.system.files import is_below, leads_out
from labctl.system.tar import BROKEN

ASIDE = "hosts"
"""Folder for files whose place is taken by another, in a folder per host."""
LOG = ".log"
LATEST = 1 << 33
"""Latest mtime in seconds that is restored, of the year 2242; some tar streams hold later ones."""
MOST_MEMBERS = 200_000
LARGEST_HEADER = 4 << 20
"""Bytes before a member's content at most: long names, extended headers."""


class PullResult(Struct):
    """New files that a host sent."""

    files: int = 0
    aside: list[str] = field(default_factory=list)
    """Paths, below the directory here, of the files whose place was taken."""
    refused: list[str] = field(default_factory=list)
    """Paths on the host of entries that are no files, or would lead out of the directory here."""
    complete: bool = False
    """True if all of the host's files are here: none was refused, and none changed during the transfer."""


class _Stream:
    """A stream of which at most ``left`` bytes may be read before the next member; None for no limit."""

    def __init__(self, source: IO[bytes]) -> None:
        self.left: int | None = LARGEST_HEADER
        self._source = source

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes. ReadError once a header's limit is used up."""
        data = self._source.read(size)
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise tarfile.ReadError("a header is too long")
        return data


class Merge(Struct, dict=True):
    """Puts one host's files into a directory, while others may do so with theirs; no link is followed."""

    into: Path
    host: str
    pushed: Manifest | None = None
    """Files that the host was sent, which are left out unless they changed."""
    reserved: tuple[str, ...] = ()
    """Names at the top that no file gets."""
    turn: Callable[[], object] = lambda: None
    """Blocks until the files may take their places: when the hosts that come before have placed theirs."""
    found: PullResult = field(default_factory=PullResult)

    def __post_init__(self) -> None:
        """Resolve the directory, and map pushed files to size and digest."""
        # Links are judged by their final target.
        self.into = self.into.resolve()
        entries = self.pushed.entries if self.pushed else ()
        self._known = {entry.path: (entry.size, entry.content) for entry in entries if entry.kind == "file"}
        self._came: dict[str, Path] = {}
        self._waiting: list[Callable[[], object]] = []

    def unpack(self, source: IO[bytes]) -> str:
        """Unpack a tar stream, as far as it goes, into the directory; return why it broke off, or empty.

        Files wait in a directory of their own until ``turn`` returns. OSError if a file cannot be written here.
        """
        for killed in self.into.glob(f".incoming-????????.{self.host}"):
            shutil.rmtree(killed, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.into, prefix=".incoming-", suffix=f".{self.host}") as apart:
            stream: Any = _Stream(source)
            try:
                with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
                    for number, member in enumerate(archive):
                        if number == MOST_MEMBERS:
                            raise tarfile.ReadError(f"more than {MOST_MEMBERS} files")
                        stream.left = None
                        self._take(archive, member, apart)
                        archive.members = []  # type: ignore[attr-defined] # it would keep them all
                        stream.left = LARGEST_HEADER
                stream.left = None
                while stream.read(PIECE):
                    pass
            except BROKEN as error:
                return f"the stream broke off: {error}"
            finally:
                self.turn()
                for place in self._waiting:
                    place()
        return ""

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo, apart: str) -> None:
        """Write a file apart, queue a folder or link, or note the member as refused."""
        path = _inside(member.name)
        if path is None:
            self.found.refused.append(member.name)
        elif member.isdir():
            self._waiting.append(partial(self._folder, self._place_of(path)))
        elif member.issym() and (to := member.linkname) and "\0" not in to and not leads_out(path, to):
            self._waiting.append(partial(self._link, path, to))
        elif member.isreg() and not member.issparse() and (content := archive.extractfile(member)):
            self._file(path, content, member, apart)
        elif member.islnk() and (first := self._came.get(_inside(member.linkname) or "")):
            with first.open("rb") as source:
                self._file(path, source, member, apart)
        else:
            self.found.refused.append(path)

    def _place_of(self, path: str) -> str:
        """Return a path, or below ``hosts/HOST/`` if its first part is reserved."""
        return self._aside(path) if path.partition("/")[0] in self.reserved else path

    def _aside(self, path: str) -> str:
        """Return a path below the host's folder aside."""
        return f"{ASIDE}/{self.host}/{path}"

    def _folder(self, path: str) -> bool:
        """Create a directory and its parents in the target; return False if another kind of entry is in the way."""
        folder = self.into
        for part in PurePosixPath(path).parts:
            folder /= part
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    return False
        return True

    def _file(self, path: str, source: IO[bytes], member: tarfile.TarInfo, apart: str) -> None:
        """Write a file apart; queue it unless it is as pushed. TarError if it breaks off; only a log is kept then."""
        digest, size, broken = hashlib.sha256(), 0, None
        handle, name = tempfile.mkstemp(dir=apart)
        new = Path(name)
        with os.fdopen(handle, "wb") as sink:
            try:
                while piece := source.read(PIECE):
                    digest.update(piece)
                    size += sink.write(piece)
            except tarfile.TarError as error:
                broken = error
            os.fchmod(handle, 0o600 | member.mode & 0o100)
        when = member.mtime if 0 <= member.mtime <= LATEST else 0
        os.utime(new, (when, when))
        self._came[path] = new
        if self._known.get(path) != (size, digest.hexdigest()) and (not broken or path.endswith(LOG)):
            self._waiting.append(partial(self._place, new, path, size))
        if broken:
            raise broken

    def _place(self, new: Path, path: str, size: int) -> None:
        """Move a file to its place, else aside under a free name; refuse it if no folder can be made there."""
        place, aside = self._place_of(path), self._aside(path)
        if place != aside and self._folder(posixpath.dirname(place)) and self._put(new, path, place, size):
            return
        if not self._folder(posixpath.dirname(aside)):
            self.found.refused.append(path)
            return
        names = chain([aside], (f"{aside}.{number}" for number in count(2)))
        self.found.aside.append(next(name for name in names if self._put(new, path, name, size)))

    def _put(self, new: Path, path: str, place: str, size: int) -> bool:
        """Link a file at a place, or keep the longer of two parts of a log; return False if another file has it."""
        final = self.into / place
        try:
            os.link(new, final)
        except FileExistsError:
            placed = final.lstat()
            # The beginning of a log is the same log.
            alike = stat.S_ISREG(placed.st_mode) and (path.endswith(LOG) or size == placed.st_size)
            if not alike or not _begin_alike(new, final):
                return False
            if size > placed.st_size:
                new.replace(final)
        else:
            self.found.files += 1
        return True

    def _link(self, path: str, target: str) -> None:
        """Create a link at its place, else aside; refuse it if both are taken or it would lead out."""
        for place in (self._place_of(path), self._aside(path)):
            link = self.into / place
            if not Path(os.path.realpath(link.parent / target)).is_relative_to(self.into):
                break
            if self._folder(posixpath.dirname(place)):
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(target)
                if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 - a Path would normalize the target
                    return
        self.found.refused.append(path)


def _inside(name: str) -> str | None:
    """Return a stream's name as a path below the directory; None if it leads out or has a NUL."""
    return str(PurePosixPath(name)) if is_below(name) and "\0" not in name else None


def _begin_alike(path: Path, other: Path) -> bool:
    """Tell if two files have the same bytes, up to the length of the shorter one."""
    with path.open("rb") as first, other.open("rb") as second:
        while (piece := first.read(PIECE)) and (against := second.read(PIECE)):
            length = min(len(piece), len(against))
            if piece[:length] != against[:length]:
                return False
    return True
