"""Tar streams of several hosts into one directory here: nothing is lost, and nothing lands outside of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import IO

from labctl.errors import HostError
from labctl.hosts import ssh_errors
from labctl.hosts.manifest import PIECE, Entry, Tree
from labctl.hosts.push import FETCH, reason
from labctl.hosts.ssh import Connection
from labctl.system.files import is_below, leads_out, make_private

ASIDE = "hosts"
"""Below it, and the name of its host, lies a file whose place is taken by another."""
LOG = ".log"
# What tarfile raises of headers that make no sense: ValueError of their numbers, RecursionError of too many in a row.
_BROKEN = (tarfile.TarError, ValueError, RecursionError)
LATEST = 1 << 33
"""Seconds since 1970, in the 23rd century: file systems have no date for what some streams say."""


@dataclass
class Merge:
    """Puts one host's files into a directory, while others may do so with theirs; no link is ever followed."""

    into: Path
    host: str
    sent: Iterable[Entry] = ()
    """What is left out unless the host has it otherwise."""
    turn: Callable[[], object] = lambda: None
    """Returns when what came may take its places: when the hosts that come before have taken theirs."""
    files: int = 0
    """New files so far, those aside among them."""
    size: int = 0
    """Bytes of these."""
    aside: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What is no file or would lead out of the directory: paths as the stream has them."""

    def __post_init__(self) -> None:
        self._known = {entry.path: (entry.size, entry.content) for entry in self.sent if entry.kind == "file"}
        self._came: dict[str, Path] = {}
        self._waiting: list[Callable[[], object]] = []
        self._links: list[tuple[str, str]] = []

    def unpack(self, stream: IO[bytes]) -> str:
        """Take all of a stream, and of one that breaks what came; returns what is wrong with it, if anything is.

        Files lie apart until all hosts that come before have their places. OSError for what cannot be written here.
        """
        for killed in self.into.glob(f".new-????????.{self.host}"):
            shutil.rmtree(killed, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.into, prefix=".new-", suffix=f".{self.host}") as apart:
            try:
                with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
                    for member in archive:
                        self._take(archive, member, apart)
                while stream.read(PIECE):
                    pass
            except _BROKEN as error:
                return f"the stream broke off: {error}"
            finally:
                self.turn()
                for place in self._waiting:
                    place()
                self._make_links()
        return ""

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo, apart: str) -> None:
        path = _inside(member.name)
        if path is None:
            self.refused.append(member.name)
        elif member.isdir():
            self._waiting.append(partial(self._folder, path))
        elif member.issym() and member.linkname and "\0" not in member.linkname:
            self._links.append((path, member.linkname))
        elif member.isreg() and (content := archive.extractfile(member)):
            self._file(path, content, member, apart)
        elif member.islnk() and (first := self._came.get(_inside(member.linkname) or "")):
            with first.open("rb") as source:
                self._file(path, source, member, apart)
        else:
            self.refused.append(member.name)

    def _folder(self, path: str) -> bool:
        """Make a directory, and those above it; False where something else is in the way."""
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
        """Write a file apart until it is whole; of a log its beginning will do. TarError where it breaks off."""
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
        if self._folder(_above(path)) and self._put(new, path, path, size):
            return
        aside = f"{ASIDE}/{self.host}/{path}"
        if not self._folder(_above(aside)):
            self.refused.append(path)
            return
        names = chain([aside], (f"{aside}.{number}" for number in count(2)))
        self.aside.append(next(name for name in names if self._put(new, path, name, size)))

    def _put(self, new: Path, path: str, place: str, size: int) -> bool:
        """Give a file its place; False where another's content has it."""
        final = self.into / place
        try:
            os.link(new, final)
        except FileExistsError:
            if not stat.S_ISREG(final.lstat().st_mode) or not self._is_same(new, final, path):
                return False
            if size > final.stat().st_size:
                new.replace(final)
        else:
            self.files += 1
            self.size += size
        return True

    def _is_same(self, new: Path, final: Path, path: str) -> bool:
        """Whether they have the same content, or of a log one has the beginning of the other's."""
        return (path.endswith(LOG) or new.stat().st_size == final.stat().st_size) and _begin_alike(new, final)

    def _make_links(self) -> None:
        """Links come last, when what they lead to is there; one that leads out, be it through others, does not stay."""
        made = []
        for path, target in self._links:
            link = None if leads_out(path, target) else self._link(path, target)
            if link is None:
                self.refused.append(path)
            else:
                made.append((path, link))
        for path, link in made:
            if not Path(os.path.realpath(link)).is_relative_to(self.into):
                link.unlink()
                self.refused.append(path)

    def _link(self, path: str, target: str) -> Path | None:
        """Make a link, aside where its place is taken; None where that is taken too."""
        for place in (path, f"{ASIDE}/{self.host}/{path}"):
            link = self.into / place
            if self._folder(_above(place)):
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(target)
                if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 - a Path would tidy what it says
                    return link
        return None


def _inside(name: str) -> str | None:
    """A name in a stream as a path below the directory; None where it would lead out."""
    return str(PurePosixPath(name)) if is_below(name) and "\0" not in name else None


def _above(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _begin_alike(one: Path, other: Path) -> bool:
    """Whether a file holds what the other does, as far as the shorter goes."""
    left = min(one.stat().st_size, other.stat().st_size)
    with one.open("rb") as first, other.open("rb") as second:
        while left:
            piece = first.read(min(left, PIECE))
            if not piece or piece != second.read(len(piece)):
                return False
            left -= len(piece)
    return True


# What GNU's tar says, with code 1, of files that were written to while it read them, as those of a run that goes on.
# Of other tars that is the code of every error.
_CHANGED = re.compile(r"(?m)(: file changed as we read it|: File removed before we read it|; padding with zeros)$")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one host brought that was not here."""

    files: int
    size: int
    """Bytes of the files."""
    aside: tuple[str, ...]
    """Of these files those whose place was taken: their paths below the directory here."""
    refused: tuple[str, ...]
    """Paths on the host of what is no file, or would lead out of the directory here."""
    whole: bool
    """Nothing there is lacking here: none was refused, and none was written to meanwhile."""


def fetch(
    connection: Connection,
    directory: str,
    into: Path,
    *,
    sent: Tree | None = None,
    turn: Callable[[], object] = lambda: None,
    on_bytes: Callable[[int], object] = lambda _: None,
    seconds: float = 86400,
) -> Fetched:
    """Merge a directory of the host into one here; other hosts' may be merged into it at the same time.

    What was ``sent`` and is still the same there is left out. Where a file's place is taken by one with other content,
    it goes to ``hosts/<host>/``; but a log that has grown replaces its beginning. Places are taken once ``turn``
    returns, which waits for the hosts that come before. ``on_bytes`` is told of bytes as they come.
    HostError where not all came, and for what cannot be written here: whole files that came until then are kept, and
    the beginning of a log.
    """
    make_private(into)
    merge = Merge(into.resolve(), connection.target.name, sent.entries if sent else (), turn)
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        unpacked = pool.submit(_unpack, reading, merge)
        why, steady = _receive(connection, directory, writing, on_bytes, seconds)
        try:
            broke = unpacked.result()
        except OSError as error:
            raise HostError(f"cannot write {error.filename or into}: {error.strerror}", hint=f"df -h {into}") from error
    if why := why or broke:
        came = f"{merge.files} new files came before that" if merge.files else "nothing new came before that"
        look = f"{ssh_errors.command(connection.target)} ls -l {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot fetch {directory}: {why}; {came}", look)
    return Fetched(merge.files, merge.size, tuple(merge.aside), tuple(merge.refused), steady and not merge.refused)


def _receive(
    connection: Connection, directory: str, writing: int, on_bytes: Callable[[int], object], seconds: float
) -> tuple[str, bool]:
    """Let the host's stream flow into the pipe; returns why not all of it did, if so, and whether nothing changed."""
    try:
        with os.fdopen(writing, "wb") as sink:

            def take(piece: bytes) -> None:
                sink.write(piece)
                on_bytes(len(piece))

            done = connection.receive(FETCH, directory, on_chunk=take, timeout=seconds, check=False)
    except BrokenPipeError:
        return "", False  # Whoever unpacked it knows why no more is wanted.
    except HostError as error:
        return error.message.removeprefix(f"{ssh_errors.named(connection.target)}: "), False
    changed = done.code == 1 and _CHANGED.search(done.err)
    return "" if done.code == 0 or changed else reason(done), done.code == 0


def _unpack(reading: int, merge: Merge) -> str:
    with os.fdopen(reading, "rb") as stream:
        return merge.unpack(stream)
