"""Programs whose pipes are held on to: bytes in, bytes out, or an input that stays open as long as it is wanted."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from labctl.shell import Completed, held_by_guards, kill, limited, missing, too_slow

CHUNK = 1 << 16


def feed(argv: Sequence[str], chunks: Iterable[bytes], *, timeout: float) -> Completed:
    """Run a program to its end with these bytes for its input; whatever its code.

    What the chunks raise is raised here, and the program killed. HostError when it is not there or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, subprocess.PIPE, out, errors) as child:
            assert child.stdin is not None  # noqa: S101 - it was asked for
            # One that hears no more may still have something to say, and its code says what came of it.
            with suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    child.stdin.write(chunk)
        return Completed(tuple(argv), child.returncode, _text(out), _text(errors))


def drain(argv: Sequence[str], on_chunk: Callable[[bytes], object], *, timeout: float) -> Completed:
    """Run a program to its end, handing on the bytes of its output; errors as ``feed``."""
    with tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, subprocess.DEVNULL, subprocess.PIPE, errors) as child:
            assert child.stdout is not None  # noqa: S101 - it was asked for
            while chunk := os.read(child.stdout.fileno(), CHUNK):
                on_chunk(chunk)
        return Completed(tuple(argv), child.returncode, "", _text(errors))


def bridge(argv: Sequence[str], descriptor: int, gate: AbstractContextManager[object], seconds: float) -> None:
    """Run a program on this descriptor, its input and its output, to its end: for so many seconds within the gate."""
    with gate:
        child = subprocess.Popen(
            argv, stdin=descriptor, stdout=descriptor, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
    with child:
        pass


class Held:
    """A program beside this one. Its input is a pipe that closes with this process, however that ends.

    Guards that have begun meanwhile are done before it closes.
    """

    def __init__(self, argv: Sequence[str], errors: Path) -> None:
        """Start it; what it says on its standard error goes to the file. HostError when it is not there."""
        pipe = subprocess.PIPE
        try:
            with errors.open("wb") as sink:
                self._child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=sink, start_new_session=True)
        except FileNotFoundError as error:
            missing(argv, check=True, error=error)
        held_by_guards(self._child)
        self.number = self._child.pid
        """Of the process, and of the group that it leads."""
        self._told_to_end = False

    def lines(self, seconds: float) -> Generator[str, None, None]:
        """Its output as it comes, line ends kept; it is killed if somebody still waits for more after so long."""
        with limited(self._child, seconds, threading.Event()):
            for line in self._child.stdout or ():
                yield line.decode("utf-8", "replace")

    def ended(self, seconds: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, seconds: float = 2) -> None:
        """End it with all that it started: politely first, and once, as its number may be another's afterwards."""
        if self._told_to_end:
            return
        self._told_to_end = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGTERM)
        if not self.ended(seconds):
            kill(self._child, own_session=True)
        with self._child:
            pass


@contextmanager
def _child(
    argv: Sequence[str], timeout: float, stdin: int, out: int | IO[bytes], errors: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that has ended when the block is left: killed by an exception, or when its time is up (HostError)."""
    expired = threading.Event()
    try:
        child = subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=errors, start_new_session=True)
    except FileNotFoundError as error:
        missing(argv, check=True, error=error)
        raise
    with child, limited(child, timeout, expired):
        try:
            yield child
            child.wait()
        except BaseException:
            kill(child, own_session=True)
            raise
    if expired.is_set():
        raise too_slow(argv, timeout)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
