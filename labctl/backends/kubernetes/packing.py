"""Pack the code of a run into one archive: names, links and modes are kept, whatever a ConfigMap takes for a key."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable

from labctl.errors import ConfigError
from labctl.model import Copy
from labctl.system import files

ARCHIVE = "code.tar.gz"
"""Archive of a run's code, to be unpacked in the run's directory; pod.sh has the same name."""


def pack(copies: Iterable[Copy]) -> bytes:
    """Return files and links as a compressed archive; equal ones give equal bytes. ConfigError if unreadable."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for copy in sorted(copies, key=lambda copy: copy.path):
            _add(archive, copy)
    return packed.getvalue()


def _add(archive: tarfile.TarFile, copy: Copy) -> None:
    """Add a file or a symbolic link to the archive, without owner and time. ConfigError if it cannot be read."""
    source, member = copy.root / copy.name, tarfile.TarInfo(copy.path)
    try:
        if source.is_symlink():
            member.type, member.linkname, member.mode = tarfile.SYMTYPE, str(source.readlink()), 0o777
            archive.addfile(member)
            return
        with files.open_regular(source) as stream:
            content = stream.read()
        member.size, member.mode = len(content), 0o755 if source.stat().st_mode & 0o100 else 0o644
        archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error


def digest(packed: bytes) -> str:
    """Return the SHA-256 of an archive."""
    return hashlib.sha256(packed).hexdigest()
