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
from typing import BinaryIO

from script_exit import InputError

BLOCK = 4 << 20
DEPTH = 4
"""Reads that are under way at a time."""
DEFAULT_SIZE = 512 << 20
IN_MEMORY = ("ramfs", "tmpfs")


class SequentialRead:
    """Reads the file at a path, no more than so many bytes of it; in a directory it makes one, which has no name there.

    Raises InputError for what cannot be read, is too short, or is in memory.
    """

    parts: tuple[tuple[str, str, int], ...]

    def __init__(self, path: Path, asked: int | None) -> None:
        kind = file_system(path, Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        if kind in IN_MEMORY:
            raise InputError(f"{path} is in memory ({kind}): there is no disk to read")
        self._path = path
        try:
            if path.is_dir():
                self._block = os.urandom(BLOCK)
                self._file = file_of(self._block, (asked or DEFAULT_SIZE) // BLOCK, path)
            else:
                self._block = b""
                self._file = path.open("rb", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
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
        # Some file systems take O_DIRECT and read their cache all the same.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        read = sum(self._pool.map(self._read_part, range(DEPTH)))
        seconds = time.perf_counter() - began
        if read != self._size:
            raise InputError(f"{self._path}: {read} of {self._size} bytes read: it is being changed")
        return (seconds,)

    def wrong(self) -> str:
        """Compares what was read last with what was written; of somebody else's file nothing is known."""
        read = self._buffers[: self._size // BLOCK]
        same = not self._block or all(buffer[:] == self._block for buffer in read)
        return "" if same else f"what was read in {self._path} is not what was written there"

    def _read_part(self, number: int) -> int:
        """Every so many-th block, so that all reads that are under way lie side by side."""
        offsets = range(number * BLOCK, self._size, DEPTH * BLOCK)
        return sum(os.preadv(self._file.fileno(), [self._buffers[number]], offset) for offset in offsets)


def file_of(block: bytes, times: int, directory: Path) -> BinaryIO:
    """A file of so many such blocks, on the disk; it is gone once it is closed."""
    file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
    for _ in range(times):
        file.write(block)
    os.fsync(file.fileno())
    return file


def read_directly(file: BinaryIO, buffer: mmap.mmap) -> bool:
    """Switch the open file to O_DIRECT and try it; False, and as before, where the file system does not take it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file.fileno(), [buffer], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def file_system(path: Path, mountinfo: str) -> str:
    """The type of the file system that a path is on, such as ext4 or nfs4 (proc_pid_mountinfo(5))."""
    mounts = {}
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        mounts[Path(mount.split()[4].replace("\\040", " "))] = source.split()[0]
    whole = path.resolve()
    return next(mounts[place] for place in (whole, *whole.parents) if place in mounts)
