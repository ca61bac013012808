"""Files of this machine: written atomically, packaged ones, free space, and whether paths stay below a directory."""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import dropwhile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import Copy, File
from labctl.system.progress import amount

LARGE = 1 << 30
PASSWORDS = frozenset({".env", ".netrc", ".git-credentials", ".pypirc"})
"""Names of files of other programs with passwords and tokens."""
SKIPPED = ("__pycache__", ".git")
"""Names that ``walk`` passes over."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
LARGEST_TEXT = 32 << 20
"""Bytes; the indexes of the largest models have 20 MB."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


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
        data = _bytes(file.content)
        with open_regular(path) as stream:
            return os.fstat(stream.fileno()).st_size == len(data) and stream.read(len(data) + 1) == data
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
    data = _bytes(content)
    with writing(path):
        make_private(path.parent)
        if _holds(path, File(path=path.name, content=content)) and path.lstat().st_mode & 0o777 == mode:
            return False
        with opened(path.parent, follow=True) as folder:
            replace_in(folder, path.name, [data], mode)
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """HostError that names the path, for an OSError within."""
    try:
        yield
    except OSError as error:
        hint = f"ls -ld {path.parent}; df -h {path.parent}"
        raise HostError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def make_private(directory: Path) -> None:
    """A directory and its missing parents, for their owner alone whatever the umask; HostError where it cannot be."""
    try:
        for folder in (*reversed(directory.parents), directory):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostError(f"cannot make {directory}: {error.strerror}", hint=f"ls -ld {directory.parent}") from error


def create_all(
    directory: Path, files: Iterable[File], folders: Iterable[str] = (), copies: Iterable[Copy] = ()
) -> None:
    """Make a directory, which must be new, with these folders and files. HostError names what cannot be written.

    No link is followed that another process puts in there, or in what is copied, meanwhile; what is to be copied and is
    gone by then is left out.
    """
    with writing(directory):
        make_private(directory.parent)
        directory.mkdir(mode=0o700)
    made = {Path()}

    @contextmanager
    def folder(path: Path) -> Iterator[int]:
        with opened(directory) as root, ExitStack() as held:
            handle = root
            for part in reversed((path, *path.parents)):
                if part not in made:
                    os.mkdir(part.name, 0o700, dir_fd=handle)
                    made.add(part)
                if part.name:
                    handle = held.enter_context(opened(part.name, handle))
            yield handle

    for name in folders:
        with writing(directory / name), folder(Path(name)):
            pass
    for file in files:
        path = Path(file.path)
        with writing(directory / path), folder(path.parent) as parent, create(path.name, parent, file.mode) as stream:
            stream.write(_bytes(file.content))
    for one in copies:
        path = Path(one.path)
        below = open_below(one.root, Path(one.name).parent)
        with writing(directory / path), folder(path.parent) as parent, suppress(FileNotFoundError), below as source:
            _copy(path.name, source, parent)


@contextmanager
def open_below(root: Path, path: Path) -> Iterator[int]:
    """A descriptor of a directory by its path below another; OSError for a link on the way."""
    with ExitStack() as held:
        handle = held.enter_context(opened(root))
        for part in path.parts:
            handle = held.enter_context(opened(part, handle))
        yield handle


def _copy(name: str, source: int, into: int) -> None:
    """Copy a file or a link; its blocks are shared where the file system can do that. OSError."""
    if stat.S_ISLNK(os.lstat(name, dir_fd=source).st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=into)
        return
    with open_regular(name, source) as old:
        mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
        with create(name, into, mode | 0o600) as new:
            with suppress(OSError):
                while os.copy_file_range(old.fileno(), new.fileno(), LARGE):
                    pass
            shutil.copyfileobj(old, new)


def walk(folder: Path, *, hidden: bool = True) -> Iterator[str]:
    """Every file and link below a folder, but compiled Python and git's own; names with a dot if ``hidden``."""

    def wanted(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if name not in SKIPPED and (hidden or not name.startswith(".")))

    for above, folders, files in os.walk(folder):
        here = Path(above)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = wanted(set(folders).difference(links))
        yield from (str((here / name).relative_to(folder)) for name in wanted((*files, *links)))


@contextmanager
def opened(directory: str | Path, parent: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """A descriptor of a directory, relative to that of its parent; OSError for a link, unless to ``follow``."""
    handle = os.open(directory, _FOLDER | (0 if follow else os.O_NOFOLLOW), dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def open_regular(path: str | Path, parent: int | None = None, *, follow: bool = False) -> BinaryIO:
    """A file to read; OSError for a link, unless to ``follow``, and for a pipe or device, which might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), dir_fd=parent)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_limited(path: Path) -> bytes:
    """A file, or what a link leads to, that containers may have written; OSError where it is none or too large."""
    with open_regular(path, follow=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(LARGEST_TEXT + 1) if size <= LARGEST_TEXT else b""
    if max(size, len(data)) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_TEXT >> 20} MiB", str(path))
    return data


def create(name: str, parent: int, mode: int) -> BinaryIO:
    """A new file of a directory, given by its descriptor, to write; OSError where there is anything of its name."""
    handle = os.open(name, _NEW, 0o600, dir_fd=parent)
    try:
        os.fchmod(handle, mode)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "wb")


def replace_in(parent: int, name: str, pieces: Iterable[bytes], mode: int) -> None:
    """Replace a file of a directory, given by its descriptor, in one step; a link of its name is replaced. OSError."""
    temporary = f".new-{os.urandom(8).hex()}"
    try:
        with create(temporary, parent, mode) as stream:
            stream.writelines(pieces)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _bytes(content: str) -> bytes:
    return content.encode("utf-8", "surrogateescape")


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


def remove(path: Path) -> None:
    """Remove a file or directory. HostError."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {path}") from error
