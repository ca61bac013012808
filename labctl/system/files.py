"""Where the files that come with labctl are: the compose template, Dockerfiles, workloads, hostfiles."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.errors import HostError
from labctl.model import File
from labctl.system import process


def write_all(directory: Path, files: Iterable[File]) -> tuple[str, ...]:
    """Write the files below the directory; returns the paths that changed. HostError names the path it cannot write."""
    return tuple(file.path for file in files if _put(directory / file.path, file))


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


def _put(path: Path, file: File) -> bool:
    return link(path, file.content) if file.link else write(path, file.content, file.mode)


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
        replace(path, data, mode)
    except OSError as error:
        raise HostError(
            f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}; df -h {path.parent}"
        ) from error
    return True


def make_private(directory: Path) -> None:
    """A directory and its missing parents, for their owner alone whatever the umask; HostError where it cannot be."""
    try:
        missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for parent in reversed(missing):
            with contextlib.suppress(FileExistsError):
                parent.mkdir(mode=0o700)
        if not directory.is_dir():
            raise NotADirectoryError(0, "there is a file of that name")
    except OSError as error:
        raise HostError(f"cannot make {directory}: {error.strerror}", hint=f"ls -ld {directory.parent}") from error


def replace(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            os.fchmod(handle, mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for many small files, in memory where it can be; gone after the block, also where this is killed."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of a random name below it, for its owner alone
    with (
        tempfile.TemporaryDirectory(prefix="labctl-", dir=memory if os.access(memory, os.W_OK) else None) as folder,
        process.guarded(("rm", "-rf", folder)),
    ):
        yield Path(folder)


_PACKAGE = Path(__file__).resolve().parents[1]


def path(*parts: str) -> Path:
    """A packaged file or folder: from the installed wheel's ``_data``, else from the checkout."""
    installed = _PACKAGE / "_data"
    return (installed if installed.is_dir() else _PACKAGE.parent).joinpath(*parts)
