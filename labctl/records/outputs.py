"""Move the results of a run from a directory that containers can write to its record, which they cannot."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct, field

from labctl.model import HERE
from labctl.records.merge import ASIDE
from labctl.records.store import KEPT
from labctl.system import files

MOST_FILES = 200_000
MOST_FOLDERS = 64
"""Depth of nested folders."""
SAME = 1 << 20
"""Bytes up to which a file is compared with the one that has its place."""
MODE = 0o775
"""Permissions that a file may keep in the record: no setuid, setgid or sticky bit, and no write by others."""


class Move(Struct):
    """Paths that were not moved to their own place: ``aside`` in the record, ``stayed`` in the run's directory."""

    aside: list[str] = field(default_factory=list)
    stayed: list[str] = field(default_factory=list)
    count: int = 0


def move(written: Path, record: Path) -> Move:
    """Move a run's files into its record, remove emptied folders; return what stayed, went aside, and the count.

    Files with names that are reserved for labctl go to ``hosts/local/``. Files that the record has with other content
    stay, as do links that lead out, pipes, sockets, and files beyond the limits. Processes may change ``written``
    meanwhile, but no link in it is followed.
    """
    result = Move()
    try:
        with files.opened(written.parent) as above, files.opened(written.name, above) as source:
            with files.opened(record) as into:
                _folder(result, source, into, "", MOST_FOLDERS)
            if not result.stayed:
                os.rmdir(written.name, dir_fd=above)
    except FileNotFoundError:
        pass
    except OSError as error:
        result.stayed.append(f"{written.name}: {error.strerror}")
    return result


def _folder(result: Move, source: int, into: int, above: str, deep: int) -> None:
    """Move the entries of a folder, by descriptors, to the record; note what stays; ``deep`` folders more at most."""
    with os.scandir(source) as entries:
        names = [entry.name for entry in islice(entries, MOST_FILES - result.count + 1)]
    for name in names:
        path = f"{above}{name}"
        result.count += 1
        try:
            if result.count > MOST_FILES or not deep:
                result.stayed.append(path)
                return
            if path in KEPT:
                with _made(ASIDE, into) as hosts, _made(HERE, hosts) as apart:
                    before = len(result.stayed)
                    _entry(result, name, source, apart, f"{ASIDE}/{HERE}/{path}", deep)
                if len(result.stayed) == before:
                    result.aside.append(f"{ASIDE}/{HERE}/{path}")
            else:
                _entry(result, name, source, into, path, deep)
        except FileNotFoundError:
            continue
        except OSError as error:
            result.stayed.append(f"{path}: {error.strerror}")


def _entry(result: Move, name: str, source: int, into: int, path: str, deep: int) -> None:
    """Move a file, link or folder, and note it in ``result`` if it stays. OSError if a folder cannot be moved."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=source).st_mode):
        if not _file(name, path, source, into):
            result.stayed.append(path)
        return
    with files.opened(name, source) as below, _made(name, into) as beside:
        before = len(result.stayed)
        _folder(result, below, beside, f"{path}/", deep - 1)
    if len(result.stayed) == before:
        os.rmdir(name, dir_fd=source)


@contextmanager
def _made(name: str, into: int) -> Iterator[int]:
    """Yield a descriptor of a folder, created with mode 700 if missing. OSError if the name is no folder."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=into)
    with files.opened(name, into) as folder:
        yield folder


def _file(name: str, path: str, source: int, into: int) -> bool:
    """Move a file or safe link, or remove it if the record has the same; return False if it has to stay."""
    if not _fits(name, source, path):
        return False
    if _exists(name, into):
        content = _content(name, source)
        if same := content is not None and content == _content(name, into):
            os.unlink(name, dir_fd=source)
        return same
    moving = f".moving-{os.urandom(8).hex()}"
    # By a hard link in the record, which no container can replace while it is checked.
    os.link(name, moving, src_dir_fd=source, dst_dir_fd=into, follow_symlinks=False)
    if not _fits(moving, into, path):
        os.unlink(moving, dir_fd=into)
        return False
    try:
        _restrict(moving, into)
    except OSError:
        os.unlink(moving, dir_fd=into)
        raise
    os.rename(moving, name, src_dir_fd=into, dst_dir_fd=into)
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=source)
    return True


def _restrict(name: str, folder: int) -> None:
    """Remove a regular file's permission bits beyond MODE. OSError if it belongs to another user."""
    mode = os.lstat(name, dir_fd=folder).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~MODE:
        # Follows links, but no container can put one here.
        os.chmod(name, stat.S_IMODE(mode) & MODE, dir_fd=folder)


def _fits(name: str, folder: int, path: str) -> bool:
    """Tell if a name is a regular file, or a link that does not lead out of the record."""
    mode = os.lstat(name, dir_fd=folder).st_mode
    if stat.S_ISLNK(mode):
        return not files.leads_out(path, os.readlink(name, dir_fd=folder))
    return stat.S_ISREG(mode)


def _exists(name: str, folder: int) -> bool:
    """Tell if a name exists in a folder, even as a broken link."""
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _content(name: str, folder: int) -> bytes | None:
    """Return a file's bytes, or a link's target; None for a file larger than SAME."""
    if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
        return os.fsencode(os.readlink(name, dir_fd=folder))
    with files.open_regular(name, folder) as stream:
        content = stream.read(SAME + 1)
    return content if len(content) <= SAME else None
