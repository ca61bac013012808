"""Locks that name their holder and vanish with it: a kernel lock on a file that says who took it, and for what."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from labctl.errors import HostError
from labctl.system.files import make_private

# Relative to the lab directory: held by what changes the lab, and while a run is staged.
LAB = ".lab/lock"
# Of each run a lock, held by who stages, records or judges it.
RUNS = ".lab/runs"
# Bytes of what a holder wrote, and characters of each word of it, that are read.
LONGEST_TEXT = 4096
LONGEST_WORD = 200


@contextlib.contextmanager
def held(
    path: Path, purpose: str, *, wait: float = 0, notice: Callable[[str], None] = lambda _: None, mode: int = 0o600
) -> Iterator[None]:
    """Hold the lock while the block runs; wait at most so many seconds for another holder.

    Raises HostError that names the holder when it is not given up in time. ``mode`` is that of the file.
    """
    from filelock import FileLock, Timeout

    descriptors: list[int] = []
    lock = FileLock(path, mode=mode, poll_interval=0.1, fallback_to_soft=False, on_acquired=descriptors.append)

    def acquire(seconds: float) -> None:
        # Whoever has it may remove the file with its directory, as `clean` does.
        while not lock.is_locked:
            make_private(path.parent)
            if mode & 0o077:
                create(path, mode)
            with contextlib.suppress(FileNotFoundError):
                lock.acquire(seconds)

    try:
        try:
            acquire(0)
        except Timeout:
            if wait:
                notice(f"waiting for {holder(path)}")
            acquire(wait)
        os.ftruncate(descriptors[-1], 0)
        os.write(descriptors[-1], json.dumps(_owner(purpose)).encode())
    except Timeout:
        raise busy(path) from None
    except OSError as error:
        lock.release()
        raise HostError(f"cannot lock {path}: {error.strerror}", hint=f"ls -ld {path.parent} {path}") from error
    try:
        yield
    finally:
        os.ftruncate(descriptors[-1], 0)
        lock.release()


def create(path: Path, mode: int) -> None:
    """Create the file if it is missing, of exactly this mode from the moment that it is there; HostError where not.

    An existing one is opened without O_CREAT: fs.protected_regular denies that for another user's file in /tmp.
    """
    try:
        if not os.path.lexists(path):
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".labctl-") as new:
                os.fchmod(new.fileno(), mode)
                with contextlib.suppress(FileExistsError):
                    os.link(new.name, path)
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW))
    except OSError as error:
        raise HostError(f"cannot open {path}: {error.strerror}", hint=f"ls -ld {path.parent} {path}") from error


class LockHeld(HostError):
    """Another process holds a lock."""


def busy(path: Path) -> LockHeld:
    """What is raised where another process holds the lock."""
    return LockHeld(f"{holder(path)} holds {path}", hint="wait for it, or end that process")


def _owner(purpose: str) -> dict[str, str | int]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"purpose": purpose, "pid": os.getpid(), "user": user, "host": socket.gethostname(), "since": since}


def holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        return "`{purpose}` by {user} (pid {pid} on {host}, since {since})".format_map(said(path))
    except KeyError:
        return "another labctl"


def said(path: Path) -> dict[str, str]:
    """What the last holder wrote of itself, fit to be printed; empty where that cannot be read."""
    with contextlib.suppress(OSError), reading(path) as stream:
        return words(stream.read(LONGEST_TEXT))
    return {}


def words(text: str) -> dict[str, str]:
    """What a holder wrote, fit to be printed; empty where it makes no sense."""
    try:
        return {key: plain(str(value)) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {}


def plain(text: str) -> str:
    """One short line of printable characters: the words of a lock that everyone may write are a stranger's."""
    return "".join(character if character.isprintable() else "?" for character in text[:LONGEST_WORD])


def held_below(folder: Path) -> list[Path]:
    """The locks of a folder that some process holds now."""
    return [path for path in sorted(folder.glob("*.lock")) if is_held(path)]


def is_held(path: Path) -> bool:
    """Whether some process holds the lock now."""
    try:
        with reading(path) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def reading(path: Path) -> TextIO:
    """The file to read: never another's link, nor a pipe that would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")
