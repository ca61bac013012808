"""Kernel locks on files that name their holder and purpose; a lock ends with the process that holds it."""

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

# Lock of changes to the lab and of the staging of runs, relative to the lab directory.
LAB = ".lab/lock"
PATIENCE = 300
"""Seconds to wait for another command that changes the lab."""
# Folder with a lock for each run, held while it is staged, recorded or judged.
RUNS = ".lab/runs"
# Maximum bytes that are read of a holder's text, and maximum characters of each value in it.
LONGEST_TEXT = 4096
LONGEST_WORD = 200


@contextlib.contextmanager
def held(
    path: Path, purpose: str, *, wait: float = 0, notice: Callable[[str], None] = lambda _: None, mode: int = 0o600
) -> Iterator[None]:
    """Hold the lock during the block, waiting up to ``wait`` seconds for it; LockHeld, naming the holder, after that.

    ``mode`` is the file's.
    """
    from filelock import FileLock, Timeout

    descriptors: list[int] = []
    lock = FileLock(path, mode=mode, poll_interval=0.1, fallback_to_soft=False, on_acquired=descriptors.append)

    def acquire(seconds: float) -> None:
        """Acquire the lock within ``seconds``, creating its file if missing. Timeout if it stays held."""
        # The holder may remove the file with its directory, as `clean` does.
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
    """Create the file if it is missing, with exactly this mode from the start; raise HostError if it cannot be opened.

    An existing file is opened without O_CREAT: fs.protected_regular denies that for another user's file in /tmp.
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
    """Return the LockHeld error that names the holder of a lock."""
    return LockHeld(f"{holder(path)} holds {path}", hint="wait for it, or end that process")


def _owner(purpose: str) -> dict[str, str | int]:
    """Return purpose, pid, user, host and start time of this process, as a holder writes them into its lock."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"purpose": purpose, "pid": os.getpid(), "user": user, "host": socket.gethostname(), "since": since}


def holder(path: Path) -> str:
    """Describe a lock's last holder, by purpose, user, pid and host; ``another labctl`` if the file does not tell."""
    try:
        return "`{purpose}` by {user} (pid {pid} on {host}, since {since})".format_map(said(path))
    except KeyError:
        return "another labctl"


def said(path: Path) -> dict[str, str]:
    """Read the last holder's description of itself, printable; empty if it cannot be read."""
    with contextlib.suppress(OSError), reading(path) as stream:
        return words(stream.read(LONGEST_TEXT))
    return {}


def words(text: str) -> dict[str, str]:
    """Parse a holder's description from JSON into printable texts; empty if it is invalid."""
    try:
        return {key: plain(str(value)) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {}


def plain(text: str) -> str:
    """Replace unprintable characters by ``?`` and cut to 200 characters, as any user may have written the text."""
    return "".join(character if character.isprintable() else "?" for character in text[:LONGEST_WORD])


def held_below(folder: Path) -> list[Path]:
    """Return the ``*.lock`` files in a folder that a process holds now, sorted."""
    return [path for path in sorted(folder.glob("*.lock")) if is_held(path)]


def is_held(path: Path) -> bool:
    """Tell if a process holds the lock now; False if it cannot be opened."""
    try:
        with reading(path) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def reading(path: Path) -> TextIO:
    """Open a lock to read it; OSError for a symbolic link, and never block at a pipe without a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")
