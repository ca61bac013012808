"""Files of this machine: written atomically, packaged ones, free space, and whether paths stay below a directory."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path, PurePosixPath

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import File
from labctl.system.progress import amount


def write_all(directory: Path, files: Iterable[File]) -> tuple[str, ...]:
    """Write the files below the directory; returns the paths that changed. HostError names the path it cannot write."""

    def put(file: File) -> bool:
        path = directory / file.path
        return link(path, file.content) if file.link else write(path, file.content, file.mode)

    return tuple(file.path for file in files if put(file))


def outdated(directory: Path, files: Iterable[File]) -> tuple[File, ...]:
    """The files that are missing below the directory or read otherwise."""
    return tuple(file for file in files if not _holds(directory / file.path, file))


def _holds(path: Path, file: File) -> bool:
    try:
        if file.link:
            return str(path.readlink()) == file.content
        return path.read_bytes() == file.content.encode("utf-8", "surrogateescape")
    except OSError:
        return False


def link(path: Path, target: str) -> bool:
    """Make a symbolic link, in place of another one; False if it is there. HostError as ``write``."""
    try:
        make_private(path.parent)
        if path.is_symlink():
            if str(path.readlink()) == target:
                return False
            path.unlink()
        path.symlink_to(target)
    except OSError as error:
        raise HostError(f"cannot make {path}: {error.strerror}", hint=f"ls -ld {path.parent}") from error
    return True


def write(path: Path, content: str, mode: int = 0o600) -> bool:
    """Replace a file in one step, so that a reader or a crash never sees half of it; False if nothing changed."""
    data = content.encode("utf-8", "surrogateescape")
    try:
        make_private(path.parent)
        if path.is_file() and path.read_bytes() == data and path.stat().st_mode & 0o777 == mode:
            return False
        _replace(path, data, mode)
    except OSError as error:
        hint = f"ls -ld {path.parent}; df -h {path.parent}"
        raise HostError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    return True


def make_private(directory: Path) -> None:
    """A directory and its missing parents, for their owner alone whatever the umask; HostError where it cannot be."""
    try:
        for folder in (*reversed(directory.parents), directory):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostError(f"cannot make {directory}: {error.strerror}", hint=f"ls -ld {directory.parent}") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            os.fchmod(handle, mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Room(Struct, frozen=True):
    """Free bytes of a file system."""

    filesystem: str
    free: int


def room_at(path: Path) -> Room:
    """Room on the file system of a path that may not exist yet."""
    there = next(one for one in (path, *path.parents) if one.exists()).resolve()
    mount = next(one for one in (there, *there.parents) if one.is_mount())
    return Room(str(mount), shutil.disk_usage(there).free)


def require_room(what: str, needed: Iterable[tuple[Room, int]], host: str = "", hint: str = "") -> None:
    """HostError if a file system has too little room for all the bytes that go to it; ``host`` if it is another's."""
    totals = Counter[str]()
    for room, size in needed:
        totals[room.filesystem] += size
        total = totals[room.filesystem]
        if total > room.free:
            where = f"{host}: " if host else ""
            raise HostError(
                f"{where}no room for {what}: {amount(total)} needed on {room.filesystem}, "
                f"{amount(room.free)} free: {amount(total - room.free)} too little",
                hint=hint or (f"on {host}: df -h" if host else f"df -h {room.filesystem}"),
                node=host or None,
            )


def path(*parts: str) -> Path:
    """A packaged file or folder: from the installed wheel's ``_data``, else from the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data"
    return (installed if installed.is_dir() else package.parent).joinpath(*parts)


def is_below(path: str) -> bool:
    """Whether a path, joined to a directory, names something in it: it is relative, without ``..``."""
    return not path.startswith("/") and ".." not in path.split("/")


def leads_out(name: str, target: str) -> bool:
    """Whether a symbolic link, by its name below a directory, leads out of it or may do so through another link."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return not is_below(end) or climbs_late(target)


def climbs_late(target: str) -> bool:
    """Whether a link goes up after it went down: where that leads depends on other links."""
    return ".." in dropwhile(lambda part: part == "..", PurePosixPath(target).parts)
