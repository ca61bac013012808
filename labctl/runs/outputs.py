"""Moves what a run wrote, where containers can write, into its record, where they cannot."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct, field

from labctl.runs.store import KEPT
from labctl.system import files

MOST_FILES = 200_000
MOST_FOLDERS = 64
"""Folders within each other."""
SAME = 1 << 20
"""Bytes up to which a file whose place is taken is compared with what has it."""


class _Move(Struct):
    count: int = 0
    stayed: list[str] = field(default_factory=list)


def move(written: Path, record: Path) -> tuple[str, ...]:
    """Move files and folders of a run into its record, and remove what is left empty; returns what stayed.

    That is what the record has with other content, links that lead out, pipes and sockets, and what is too much. What
    runs meanwhile may change ``written``, but no link there is followed.
    """
    found = _Move()
    try:
        with files.opened(written.parent) as above, files.opened(written.name, above) as source:
            with files.opened(record) as into:
                _folder(found, source, into, "", MOST_FOLDERS)
            if not found.stayed:
                os.rmdir(written.name, dir_fd=above)
    except FileNotFoundError:
        return tuple(found.stayed)
    except OSError as error:
        return (*found.stayed, f"{written.name}: {error.strerror}")
    return tuple(found.stayed)


def _folder(found: _Move, source: int, into: int, above: str, deep: int) -> None:
    with os.scandir(source) as entries:
        names = [entry.name for entry in islice(entries, MOST_FILES - found.count + 1)]
    for name in names:
        path = f"{above}{name}"
        found.count += 1
        try:
            if found.count > MOST_FILES or not deep:
                found.stayed.append(path)
                return
            if path in KEPT:
                found.stayed.append(path)
                continue
            if not stat.S_ISDIR(os.lstat(name, dir_fd=source).st_mode):
                if not _file(name, path, source, into):
                    found.stayed.append(path)
                continue
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=into)
            with files.opened(name, source) as below, files.opened(name, into) as beside:
                before = len(found.stayed)
                _folder(found, below, beside, f"{path}/", deep - 1)
            if len(found.stayed) == before:
                os.rmdir(name, dir_fd=source)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.stayed.append(f"{path}: {error.strerror}")


def _file(name: str, path: str, source: int, into: int) -> bool:
    """Move a file, or a link that stays in the run's directory; False for anything else."""
    if not _fits(name, source, path):
        return False
    if _exists(name, into):
        content = _content(name, source)
        if same := content is not None and content == _content(name, into):
            os.unlink(name, dir_fd=source)
        return same
    moving = f".moving-{os.urandom(8).hex()}"
    # A second name, which nobody else can make that of something else meanwhile.
    os.link(name, moving, src_dir_fd=source, dst_dir_fd=into, follow_symlinks=False)
    if not _fits(moving, into, path):
        os.unlink(moving, dir_fd=into)
        return False
    os.rename(moving, name, src_dir_fd=into, dst_dir_fd=into)
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=source)
    return True


def _fits(name: str, folder: int, path: str) -> bool:
    mode = os.lstat(name, dir_fd=folder).st_mode
    if stat.S_ISLNK(mode):
        return not files.leads_out(path, os.readlink(name, dir_fd=folder))
    return stat.S_ISREG(mode)


def _exists(name: str, folder: int) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _content(name: str, folder: int) -> bytes | None:
    """What a small file holds, or where a link leads."""
    if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
        return os.fsencode(os.readlink(name, dir_fd=folder))
    with files.open_regular(name, folder) as stream:
        content = stream.read(SAME + 1)
    return content if len(content) <= SAME else None
