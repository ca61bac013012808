"""A run's results come back from its hosts: each host's directory as one stream, merged into the directory here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labctl import ssh_words
from labctl.connection import Connection
from labctl.errors import HostError
from labctl.files import make_private
from labctl.host_scripts import FETCH
from labctl.merging import Merge
from labctl.sending import reason
from labctl.tree import Tree

# What GNU's tar says, with code 1, of files that were written to while it read them, as those of a run that goes on.
# Of other tars that is the code of every error.
_CHANGED = re.compile(r"(?m)(: file changed as we read it|: File removed before we read it|; padding with zeros)$")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one host brought that was not here."""

    files: int
    size: int
    """Bytes of the files."""
    aside: tuple[str, ...]
    """Of these files those whose place was taken: their paths below the directory here."""
    refused: tuple[str, ...]
    """Paths on the host of what is no file, or would lead out of the directory here."""
    whole: bool
    """Nothing there is lacking here: none was refused, and none was written to meanwhile."""


def fetch(
    connection: Connection,
    directory: str,
    into: Path,
    *,
    sent: Tree | None = None,
    turn: Callable[[], object] = lambda: None,
    on_bytes: Callable[[int], object] = lambda _: None,
    seconds: float = 86400,
) -> Fetched:
    """Merge a directory of the host into one here; other hosts' may be merged into it at the same time.

    What was ``sent`` and is still the same there is left out. Where a file's place is taken by one with other content,
    it goes to ``hosts/<host>/``; but a log that has grown replaces its beginning. Places are taken once ``turn``
    returns, which waits for the hosts that come before. ``on_bytes`` is told of bytes as they come.
    HostError where not all came, and for what cannot be written here: whole files that came until then are kept, and
    the beginning of a log.
    """
    make_private(into)
    merge = Merge(into.resolve(), connection.target.name, sent.entries if sent else (), turn)
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        unpacked = pool.submit(_unpack, reading, merge)
        why, steady = _receive(connection, directory, writing, on_bytes, seconds)
        try:
            broke = unpacked.result()
        except OSError as error:
            raise HostError(f"cannot write {error.filename or into}: {error.strerror}", hint=f"df -h {into}") from error
    if why := why or broke:
        came = f"{merge.files} new files came before that" if merge.files else "nothing new came before that"
        look = f"{ssh_words.command(connection.target)} ls -l {shlex.quote(directory)}"
        raise ssh_words.error(connection.target, f"cannot fetch {directory}: {why}; {came}", look)
    return Fetched(merge.files, merge.size, tuple(merge.aside), tuple(merge.refused), steady and not merge.refused)


def _receive(
    connection: Connection, directory: str, writing: int, on_bytes: Callable[[int], object], seconds: float
) -> tuple[str, bool]:
    """Let the host's stream flow into the pipe; returns why not all of it did, if so, and whether nothing changed."""
    try:
        with os.fdopen(writing, "wb") as sink:

            def take(piece: bytes) -> None:
                sink.write(piece)
                on_bytes(len(piece))

            done = connection.receive(FETCH, directory, on_chunk=take, timeout=seconds, check=False)
    except BrokenPipeError:
        return "", False  # Whoever unpacked it knows why no more is wanted.
    except HostError as error:
        return error.message.removeprefix(f"{ssh_words.named(connection.target)}: "), False
    changed = done.code == 1 and _CHANGED.search(done.err)
    return "" if done.code == 0 or changed else reason(done), done.code == 0


def _unpack(reading: int, merge: Merge) -> str:
    with os.fdopen(reading, "rb") as stream:
        return merge.unpack(stream)
