"""Files of this machine: atomic writes, packaged files, free space, and checks that paths stay below a directory."""

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
from labctl.system import human

LARGE = 1 << 30
PASSWORDS = frozenset({".env", ".netrc", ".git-credentials", ".pypirc"})
"""Files of other programs that hold passwords and tokens."""
SKIPPED = ("__pycache__", ".git")
"""Names that ``walk`` skips."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
LARGEST_TEXT = 32 << 20
"""Maximum size of a text file in bytes; the indexes of the largest models have 20 MB."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def write_all(directory: Path, files: Iterable[File]) -> tuple[str, ...]:
    """Write files and links below the directory; return the paths of those that changed. HostError on failure."""

    def put(file: File) -> bool:
        """Write the file or link; return True if it changed."""
        path = directory / file.path
        return link(path, file.content) if file.link else write(path, file.content, file.mode)

    return tuple(file.path for file in files if put(file))


def outdated(directory: Path, files: Iterable[File]) -> tuple[File, ...]:
    """Return the files that are missing below the directory or have other content there, whatever their modes."""
    return tuple(file for file in files if not _holds(directory / file.path, file))


def _holds(path: Path, file: File) -> bool:
    """Tell if a path is the file or the link, with the same content; False if it cannot be read."""
    try:
        if file.link:
            return str(path.readlink()) == file.content
        data = _bytes(file.content)
        with open_regular(path) as stream:
            return os.fstat(stream.fileno()).st_size == len(data) and stream.read(len(data) + 1) == data
    except OSError:
        return False


def link(path: Path, target: str) -> bool:
    """Make a symbolic link and its folders, replacing another; return False if it exists. HostError if that fails."""
    try:
        make_private(path.parent)
        if path.is_symlink():
            if str(path.readlink()) == target:
                return False
            path.unlink()
        path.symlink_to(target)
    except OSError as error:
        raise HostError(f"cannot create {path}: {error.strerror}", hint=f"ls -ld {path.parent}") from error
    return True


def write(path: Path, content: str, mode: int = 0o600) -> bool:
    """Replace a file atomically, making its folders; return False if it was as wanted. HostError if that fails."""
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
    """Convert an OSError in the block to a HostError that names the path."""
    try:
        yield
    except OSError as error:
        hint = f"ls -ld {path.parent}; df -h {path.parent}"
        raise HostError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700, whatever the umask. HostError if it cannot."""
    try:
        for folder in (*reversed(directory.parents), directory):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostError(f"cannot create {directory}: {error.strerror}", hint=f"ls -ld {directory.parent}") from error


def create_all(
    directory: Path, files: Iterable[File], folders: Iterable[str] = (), copies: Iterable[Copy] = ()
) -> None:
    """Create a new directory with these folders, files and copies; raise HostError that names the path that failed.

    No symbolic link is followed that another process creates meanwhile, here or in the sources. Sources that have
    disappeared are skipped.
    """
    with writing(directory):
        make_private(directory.parent)
        directory.mkdir(mode=0o700)
    made = {Path()}

    @contextmanager
    def folder(path: Path) -> Iterator[int]:
        """Open a folder below the new directory, creating missing ones; provide its descriptor."""
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
    for copy in copies:
        path = Path(copy.path)
        below = open_below(copy.root, Path(copy.name).parent)
        with writing(directory / path), folder(path.parent) as parent, suppress(FileNotFoundError), below as source:
            _copy(path.name, source, parent)


@contextmanager
def open_below(root: Path, path: Path) -> Iterator[int]:
    """Open a directory by its path below another; OSError for a symbolic link on the way."""
    with ExitStack() as held:
        handle = held.enter_context(opened(root))
        for part in path.parts:
            handle = held.enter_context(opened(part, handle))
        yield handle


def _copy(name: str, source: int, into: int) -> None:
    """Copy a file or a link, sharing blocks if possible. OSError for another kind, or if the name is taken."""
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
    """Yield the relative path of every file and link below a folder; not SKIPPED, nor dot names unless ``hidden``."""

    def kept(names: Iterable[str]) -> list[str]:
        """Return the sorted names, without SKIPPED and, unless ``hidden``, without dot names."""
        return sorted(name for name in names if name not in SKIPPED and (hidden or not name.startswith(".")))

    for above, folders, files in os.walk(folder):
        here = Path(above)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = kept(set(folders).difference(links))
        yield from (str((here / name).relative_to(folder)) for name in kept((*files, *links)))


@contextmanager
def opened(directory: str | Path, parent: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """Open a directory, relative to the descriptor ``parent`` if given; OSError for a link, unless ``follow``."""
    handle = os.open(directory, _FOLDER | (0 if follow else os.O_NOFOLLOW), dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def open_regular(path: str | Path, parent: int | None = None, *, follow: bool = False) -> BinaryIO:
    """Open a file to read; OSError for a link, unless ``follow``, and for a pipe or device, which might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), dir_fd=parent)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_limited(path: Path) -> bytes:
    """Read a file, or a link's target, that containers may have written; OSError if not regular or over 32 MiB."""
    with open_regular(path, follow=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(LARGEST_TEXT + 1) if size <= LARGEST_TEXT else b""
    if max(size, len(data)) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"larger than {human.memory(LARGEST_TEXT)}", str(path))
    return data


def create(name: str, parent: int, mode: int) -> BinaryIO:
    """Create a file to write in the directory with the descriptor ``parent``; OSError if the name exists."""
    handle = os.open(name, _NEW, 0o600, dir_fd=parent)
    try:
        os.fchmod(handle, mode)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "wb")


def replace_in(parent: int, name: str, pieces: Iterable[bytes], mode: int) -> None:
    """Replace a file or link atomically in the directory with the descriptor ``parent``. OSError if that fails."""
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
    """Free space of a file system in bytes."""

    filesystem: str
    free: int


def room_at(path: Path) -> Room:
    """Return the free space of the file system of a path; the path need not exist."""
    nearest = next(parent for parent in (path, *path.parents) if parent.exists()).resolve()
    mount = next(parent for parent in (nearest, *nearest.parents) if parent.is_mount())
    return Room(str(mount), shutil.disk_usage(nearest).free)


def require_room(purpose: str, needed: Iterable[tuple[Room, int]], host: str = "", hint: str = "") -> None:
    """Raise HostError if a file system has too little free space for the bytes that ``needed`` sums up for it.

    ``host`` names the machine in the error if it is another machine.
    """
    totals = Counter[str]()
    for room, size in needed:
        totals[room.filesystem] += size
        total = totals[room.filesystem]
        if total > room.free:
            where = f"{host}: " if host else ""
            raise HostError(
                f"{where}no room for {purpose}: {human.size(total)} needed on {room.filesystem}, "
                f"{human.size(room.free)} free: {human.size(total - room.free)} too little",
                hint=hint or (f"on {host}: df -h" if host else f"df -h {room.filesystem}"),
                node=host or None,
            )


def path(*parts: str) -> Path:
    """Return the path of a packaged file or folder: in the installed wheel's ``_data``, else in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data"
    return (installed if installed.is_dir() else package.parent).joinpath(*parts)


def is_below(path: str) -> bool:
    """Tell if a path stays below the directory that it is joined to: it is relative, without ``..``."""
    return not path.startswith("/") and ".." not in path.split("/")


def leads_out(name: str, target: str) -> bool:
    """Tell if a symbolic link, named below a directory, leads out of it or could do so through another link."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return not is_below(end) or climbs_late(target)


def climbs_late(target: str) -> bool:
    """Tell if a link's target has ``..`` after another part: its end then depends on other links."""
    return ".." in dropwhile(lambda part: part == "..", PurePosixPath(target).parts)


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its content. HostError on failure, also if nothing is there."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {path}") from error
