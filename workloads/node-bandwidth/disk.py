"""Sequential read of a file past the page cache, as `fio --rw=read --direct=1 --bs=4M --iodepth=4` does.

O_DIRECT where the file system takes it; else its pages are dropped from the cache before each round
(POSIX_FADV_DONTNEED). What a disk, a file server or a hypervisor caches itself is beyond both.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from script_exit import InputError

BLOCK = 4 << 20
DEPTH = 4
"""Reads that are under way at a time."""
DEFAULT_SIZE = 512 << 20
IN_MEMORY = ("ramfs", "tmpfs")


class SequentialRead:
    """Sequential read of at most ``size`` bytes of the file at a path; in a directory it creates an unnamed file.

    Raises InputError for what cannot be read, is too short, or is in memory.
    """

    parts: tuple[tuple[str, str, int], ...]

    def __init__(self, path: Path, asked: int | None) -> None:
        """Open the file, or write an unnamed one in a directory, and try O_DIRECT. InputError if unsuitable."""
        kind = file_system(path, Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        if kind in IN_MEMORY:
            raise InputError(f"{path} is in memory ({kind}): there is no disk to read")
        self._path = path
        try:
            if path.is_dir():
                self._content = 2 * os.urandom(BLOCK)
                self._file = write_file(path, (asked or DEFAULT_SIZE) // BLOCK, self._content)
            else:
                self._content = b""
                self._file = os.open(path, os.O_RDONLY)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        self._size = min(self._size, asked or self._size) // BLOCK * BLOCK
        if not self._size:
            raise InputError(f"{path}: less than {BLOCK >> 20} MiB to read")
        # Anonymous maps begin at a page, as O_DIRECT asks.
        self._buffers = [mmap.mmap(-1, BLOCK) for _ in range(DEPTH)]
        self._pool = ThreadPoolExecutor(DEPTH)
        way = "O_DIRECT" if read_directly(self._file, self._buffers[0]) else "POSIX_FADV_DONTNEED"
        self.parts = (("disk", "disk read", self._size),)
        self.detail = f"{way} on {kind}, {self._size >> 20} MiB"

    def round(self) -> tuple[float, ...]:
        """Read the file with DEPTH threads past the page cache; return the seconds. InputError if it is cut short."""
        # Some file systems take O_DIRECT and read their cache all the same.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        read = sum(self._pool.map(self._read_part, range(DEPTH)))
        seconds = time.perf_counter() - began
        if read != self._size:
            raise InputError(f"{self._path}: {read} of {self._size} bytes read: it is being changed")
        return (seconds,)

    def wrong(self) -> str:
        """Return an error text if the last blocks differ from those written; "" if not, or for a given file."""
        if not self._content:
            return ""
        for number, buffer in enumerate(self._buffers[: self._size // BLOCK]):
            last = self._offsets(number)[-1] // BLOCK
            if buffer[:] != block(self._content, last):
                return f"block {last} read in {self._path} is not what was written there"
        return ""

    def _read_part(self, number: int) -> int:
        """Read this thread's blocks into its buffer; return the bytes read."""
        buffer = [self._buffers[number]]
        return sum(os.preadv(self._file, buffer, offset) for offset in self._offsets(number))

    def _offsets(self, number: int) -> range:
        """Return the offsets that one thread reads; concurrent reads are adjacent."""
        return range(number * BLOCK, self._size, DEPTH * BLOCK)


def write_file(directory: Path, blocks: int, content: bytes) -> int:
    """Write a file of so many blocks, fsync and unlink it; return its open descriptor."""
    file, name = tempfile.mkstemp(dir=directory)
    Path(name).unlink()
    for number in range(blocks):
        os.write(file, block(content, number))
    os.fsync(file)
    return file


def block(content: bytes, number: int) -> memoryview:
    """Return block ``number`` to write: the random bytes, shifted, so that no two blocks are equal."""
    return memoryview(content)[number : number + BLOCK]


def read_directly(file: int, buffer: mmap.mmap) -> bool:
    """Switch the open file to O_DIRECT and test a read; False, with its flags restored, if that fails."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [buffer], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def file_system(path: Path, mountinfo: str) -> str:
    """Return the type of the file system that a path is on, such as ext4 or nfs4, from mountinfo's text."""
    mounts = {}
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        mounts[Path(mount.split()[4].replace("\\040", " "))] = source.split()[0]
    whole = path.resolve()
    return next(mounts[place] for place in (whole, *whole.parents) if place in mounts)
