"""Parts of the tar format."""

from __future__ import annotations

import tarfile

BROKEN = (tarfile.TarError, ValueError, RecursionError)
"""Exceptions of tarfile for broken headers: ValueError for numbers, RecursionError for too many headers in a row."""
END = bytes(2 * tarfile.BLOCKSIZE)
"""End marker of a tar archive."""


def padding(size: int) -> bytes:
    """Return the padding after a file of ``size`` bytes in a tar archive."""
    return bytes(-size % tarfile.BLOCKSIZE)


def header(name: str, kind: bytes, mode: int, *, size: int = 0, link: str = "", time: float = 0) -> bytes:
    """Return the header of a member in GNU format, which keeps names of any length and any bytes."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname, member.mtime = kind, mode, size, link, int(time)
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def member_header(name: str, size: int = 0, mode: int = 0o644, target: str = "") -> bytes:
    """Return the header of a file, a directory of mode 0755 (named with a trailing /) or a link to ``target``."""
    if name.endswith("/"):
        return header(name.rstrip("/"), tarfile.DIRTYPE, 0o755, size=size, link=target)
    kind = tarfile.SYMTYPE if target else tarfile.REGTYPE
    return header(name, kind, mode, size=size, link=target)
