"""Pull directories from hosts into a local one: nothing is lost or overwritten, or written outside of it."""

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
from labctl.system import human
from labctl.system.files import make_private

# GNU tar's messages, with exit code 1, about files that changed while it read them, as in a running run. Other tars
# exit with 1 for every error.
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
    """Merge a host's directory into ``into``; return count, name clashes, refused names. HostError if it breaks off.

    Files that were ``pushed`` and are unchanged are skipped. A file whose name is ``reserved``, or whose path is taken
    by a file with other content, goes to ``hosts/<host>/``; but a log that has grown replaces its beginning. Paths are
    taken once ``turn`` returns, which waits for the hosts that come before.
    HostError if not all arrived, and for a file that cannot be written here: the complete files until then are kept,
    and the beginning of a log.
    """
    make_private(into)
    merge = Merge(into, connection.target.name, pushed, reserved, turn)
    result = merge.found
    reading, writing = os.pipe()

    def unpack() -> str:
        """Unpack the piped stream; return the reason if it is broken, else an empty text."""
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
        came = f"fetched {human.count(result.files, 'new file')} before that"
        look = f"{ssh_errors.command(connection.target)} ls -l {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot fetch {directory}: {why}; {came}", look)
    result.complete = steady and not result.refused
    return result


def _receive(connection: Connection, directory: str, writing: int, seconds: float) -> tuple[str, bool]:
    """Pipe the host's stream into ``writing``; return why it broke, or "", and True if no file changed meanwhile."""
    try:
        with os.fdopen(writing, "wb") as sink:
            done = connection.receive(SCRIPT, "pull", directory, on_chunk=sink.write, timeout=seconds)
    except BrokenPipeError:
        return "", False  # The unpacking thread stopped reading, and reports the reason.
    except HostError as error:
        return error.message.removeprefix(f"{ssh_errors.named(connection.target)}: "), False
    changed = done.code == 1 and _CHANGED.search(done.err)
    return "" if done.code == 0 or changed else reason(done), done.code == 0
