"""Parts of the tar format."""

from __future__ import annotations

import tarfile

BROKEN = (tarfile.TarError, ValueError, RecursionError)
"""What tarfile raises for broken headers: ValueError for their numbers, RecursionError for too many in a row."""
END = bytes(2 * tarfile.BLOCKSIZE)
"""Of a tar archive."""


def padding(size: int) -> bytes:
    """What comes after a file of so many bytes in a tar archive."""
    return bytes(-size % tarfile.BLOCKSIZE)


def header(name: str, kind: bytes, mode: int, *, size: int = 0, link: str = "", time: float = 0) -> bytes:
    """What comes before a member, in GNU's format, which holds a name of any length as the bytes that it is."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname, member.mtime = kind, mode, size, link, int(time)
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def member_header(name: str, size: int = 0, mode: int = 0o644, target: str = "") -> bytes:
    """What comes before a member of a tar archive: a file, a directory (named with /) or a link with a target."""
    if name.endswith("/"):
        return header(name.rstrip("/"), tarfile.DIRTYPE, 0o755, size=size, link=target)
    kind = tarfile.SYMTYPE if target else tarfile.REGTYPE
    return header(name, kind, mode, size=size, link=target)
