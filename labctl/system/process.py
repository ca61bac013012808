"""Starts processes: argument lists, never a command line; a failure is a HostError that says what ran.

Nothing else does, but ``pipes``, which holds on to what goes through their pipes.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from labctl.errors import HostError, OutputClosed

NOT_FOUND = 127
"""The code of a program that is not there, as shells give it."""
# Seconds for what is to be done when this process is gone.
GUARDING = 60


class ProcessTimeout(HostError):
    """A program was ended because its time was up."""


@dataclass(frozen=True, slots=True)
class CompletedProcess:
    """What ran and what came of it."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 - subprocess's own name for it
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> CompletedProcess:
    """Run to the end and return the output; ``env`` is added to this process's own.

    HostError when it takes too long and, with ``check``, when it fails or is not there (else its code is 127).
    """
    try:
        with _child(argv, env, timeout, input=input, out=subprocess.PIPE, err=subprocess.PIPE) as child:
            out, err = child.communicate(input, timeout=timeout)
    except FileNotFoundError as error:
        return missing(argv, check, error)
    except subprocess.TimeoutExpired as error:
        raise too_slow(argv, timeout) from error
    return _judged(CompletedProcess(tuple(argv), child.returncode, out, err), err or out, check)


def stream(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> CompletedProcess:
    """Run long work, handing on each line of its output and errors; ``out`` keeps the last 30. Errors as ``run``."""
    tail: deque[str] = deque(maxlen=30)
    expired = threading.Event()
    try:
        with (
            _child(argv, env, timeout, out=subprocess.PIPE, err=subprocess.STDOUT, cwd=cwd) as child,
            limited(child, timeout, expired),
        ):
            for line in _lines(child.stdout):
                tail.append(line)
                on_line(line)
            child.wait()
    except FileNotFoundError as error:
        return missing(argv, check, error)
    if expired.is_set():
        raise too_slow(argv, timeout)
    text = "\n".join(tail)
    return _judged(CompletedProcess(tuple(argv), child.returncode, text, ""), text, check)


def variable(name: str) -> str:
    """A variable of this process's environment, which the programs that it starts inherit; empty where it is unset."""
    return os.environ.get(name, "")


def without(names: Iterable[str], argv: Sequence[str]) -> tuple[str, ...]:
    """The words that run a program without these variables, should this process's environment have any of them."""
    unset = [word for name in names if name in os.environ for word in ("-u", name)]
    return ("env", *unset, *argv) if unset else tuple(argv)


def attached(
    argv: Sequence[str], forward: Callable[[signal.Signals], None], *, env: Mapping[str, str] | None = None
) -> int:
    """Run a program on this process's own input and output to its end; returns its code. ``env`` as ``run``.

    What would end this process meanwhile (INT, TERM, HUP, less ignored signals) goes to ``forward`` instead.
    HostError when the program is not there, or was itself ended by a signal; Unread when nobody reads what it prints.
    """
    ours = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _heeded(number)]
    before = {number: signal.signal(number, lambda number, _: forward(signal.Signals(number))) for number in ours}
    try:
        # In a session of its own: the terminal's signals come through here alone.
        child = subprocess.Popen(argv, start_new_session=True, env=None if env is None else {**os.environ, **env})
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, _: child.send_signal(number))
        code = child.wait()
    except OSError as error:
        raise HostError(f"cannot run {shlex.join(argv)}: {error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGPIPE:
        raise OutputClosed(f"nobody reads what {argv[0]} prints")
    if code < 0:
        raise HostError(f"{argv[0]} was ended by {signal.Signals(-code).name}")
    return code


@contextmanager
def begun() -> Iterator[Callable[[Sequence[str]], None]]:
    """Hands out a function that starts a program without waiting for it; all have ended when the block is left."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(argv: Sequence[str]) -> None:
        quiet = subprocess.DEVNULL
        children.append(subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))

    try:
        yield begin
    finally:
        for child in children:
            child.wait()


@contextmanager
def guarded(argv: Sequence[str]) -> Iterator[None]:
    """Run the program if the block is left by an exception, and also if this process is killed within it.

    A shell waits for a word from here; that the pipe closes without one tells it of any death, SIGKILL's too. Those
    that began within the block, and have a minute each, hold the pipe too: what they need is there until they are done.
    """
    quiet = subprocess.DEVNULL
    wait = ("sh", "-c", f'read -r word && [ "$word" = done ] || exec timeout {GUARDING} "$@"', "sh", *argv)
    with subprocess.Popen(
        wait, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, close_fds=False
    ) as guard:
        held_by_guards(guard)
        try:
            yield
        except BaseException:
            guard.communicate(b"now\n")
            raise
        guard.communicate(b"done\n")


def held_by_guards(child: subprocess.Popen[bytes]) -> None:
    """Have the guards that begin from now on hold the input of a child open until they are done."""
    assert child.stdin is not None  # noqa: S101 - it was asked for
    os.set_inheritable(child.stdin.fileno(), True)


def _heeded(number: signal.Signals) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN


@contextmanager
def _child(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    timeout: float | None,
    *,
    out: int,
    err: int,
    input: str | None = None,  # noqa: A002
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A child that is gone, with what it started, when the block is left by an exception."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=out,
        stderr=err,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=None if env is None else {**os.environ, **env},
        cwd=cwd,
        # Without a limit it stays in the terminal's own group: Ctrl-C reaches it, and sudo can ask for a password.
        start_new_session=timeout is not None,
    )
    with child:
        try:
            yield child
        except BaseException:
            kill(child, own_session=timeout is not None)
            raise


@contextmanager
def limited(child: subprocess.Popen[Any], timeout: float | None, expired: threading.Event) -> Iterator[None]:
    """Kill the child, which leads a session of its own, when its time is up."""
    if timeout is None:
        yield
        return

    def expire() -> None:
        expired.set()
        kill(child, own_session=True)

    timer = threading.Timer(timeout, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kill(child: subprocess.Popen[Any], *, own_session: bool) -> None:
    """End the child; with all that it started, where it leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        if own_session:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.terminate()


def _lines(output: IO[str] | None) -> Iterator[str]:
    for line in output or ():
        yield line.rstrip("\r\n")


def _judged(done: CompletedProcess, said: str, check: bool) -> CompletedProcess:
    if check and done.code != 0:
        last = "\n".join(said.rstrip().splitlines()[-20:])
        raise HostError(f"{shlex.join(done.argv)}: exit code {done.code}" + (f"\n{last}" if last else ""))
    return done


def missing(argv: Sequence[str], check: bool, error: OSError) -> CompletedProcess:
    """What comes of a program that is not there: with ``check``, HostError."""
    if check:
        raise HostError(f"{argv[0]}: no such program (wanted for: {shlex.join(argv)})") from error
    return CompletedProcess(tuple(argv), NOT_FOUND, "", f"{argv[0]}: not found")


def too_slow(argv: Sequence[str], timeout: float | None) -> ProcessTimeout:
    return ProcessTimeout(f"{shlex.join(argv)}: not done within {timeout} s")


CHUNK = 1 << 16


def feed(argv: Sequence[str], chunks: Iterable[bytes], *, timeout: float) -> CompletedProcess:
    """Run a program to its end with these bytes for its input; whatever its code.

    What the chunks raise is raised here, and the program killed. HostError when it is not there or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with _held_child(argv, timeout, subprocess.PIPE, out, errors) as child:
            assert child.stdin is not None  # noqa: S101 - it was asked for
            # One that hears no more may still have something to say, and its code says what came of it.
            with suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    child.stdin.write(chunk)
        return CompletedProcess(tuple(argv), child.returncode, _text(out), _text(errors))


def drain(argv: Sequence[str], on_chunk: Callable[[bytes], object], *, timeout: float) -> CompletedProcess:
    """Run a program to its end, handing on the bytes of its output; errors as ``feed``."""
    with tempfile.TemporaryFile() as errors:
        with _held_child(argv, timeout, subprocess.DEVNULL, subprocess.PIPE, errors) as child:
            assert child.stdout is not None  # noqa: S101 - it was asked for
            while chunk := os.read(child.stdout.fileno(), CHUNK):
                on_chunk(chunk)
        return CompletedProcess(tuple(argv), child.returncode, "", _text(errors))


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


class BackgroundProcess:
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
        """Its output as it comes, line ends kept; it is killed if a reader still waits after so long."""
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
def _held_child(
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
