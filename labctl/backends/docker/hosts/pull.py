"""Pull directories from hosts into one here: nothing is lost, nothing is overwritten, nothing lands outside of it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.hosts.push import SCRIPT, reason
from labctl.backends.docker.hosts.ssh import Connection
from labctl.errors import HostError
from labctl.records.manifest import Manifest
from labctl.records.merge import Merge, PullResult
from labctl.system.files import make_private

# What GNU's tar says, with code 1, of files that were written to while it read them, as those of a run that goes on.
# Of other tars that is the code of every error.
_CHANGED = re.compile(r"(?m)(: file changed as we read it|: File removed before we read it|; padding with zeros)$")


def pull(
    connection: Connection,
    directory: str,
    into: Path,
    *,
    pushed: Manifest | None = None,
    reserved: tuple[str, ...] = (),
    turn: Callable[[], object] = lambda: None,
    seconds: float = 86400,
) -> PullResult:
    """Merge a directory of the host into one here; other hosts' may be merged into it at the same time.

    What was ``pushed`` and is unchanged is left out. A file whose name is ``reserved``, or whose place is taken by one
    with other content, goes to ``hosts/<host>/``; but a log that has grown replaces its beginning. Places are taken
    once ``turn`` returns, which waits for the hosts that come before.
    HostError where not all came, and for what cannot be written here: whole files that came until then are kept, and
    the beginning of a log.
    """
    make_private(into)
    merge = Merge(into, connection.target.name, pushed, reserved, turn)
    found = merge.found
    reading, writing = os.pipe()

    def unpack() -> str:
        with os.fdopen(reading, "rb") as stream:
            return merge.unpack(stream)

    with ThreadPoolExecutor(1) as pool:
        unpacked = pool.submit(unpack)
        why, steady = _receive(connection, directory, writing, seconds)
        try:
            broken = unpacked.result()
        except OSError as error:
            raise HostError(f"cannot write {error.filename or into}: {error.strerror}", hint=f"df -h {into}") from error
    if why := why or broken:
        came = f"{found.files} new files came before that" if found.files else "nothing new came before that"
        look = f"{ssh_errors.command(connection.target)} ls -l {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot fetch {directory}: {why}; {came}", look)
    found.complete = steady and not found.refused
    return found


def _receive(connection: Connection, directory: str, writing: int, seconds: float) -> tuple[str, bool]:
    """Let the host's stream flow into the pipe; returns why not all of it did, if so, and whether nothing changed."""
    try:
        with os.fdopen(writing, "wb") as sink:
            done = connection.receive(SCRIPT, "pull", directory, on_chunk=sink.write, timeout=seconds)
    except BrokenPipeError:
        return "", False  # Whoever unpacked it knows why no more is wanted.
    except HostError as error:
        return error.message.removeprefix(f"{ssh_errors.named(connection.target)}: "), False
    changed = done.code == 1 and _CHANGED.search(done.err)
    return "" if done.code == 0 or changed else reason(done), done.code == 0
