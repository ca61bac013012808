"""Starts processes: argument lists, never a command line; a failure is a HostError that says what ran."""

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
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from labctl.errors import HostError, OutputClosed

NOT_FOUND = 127
"""The code of a program that is not there, as shells give it."""
# Seconds for what is to be done when this process is gone.
GUARDING = 60
CHUNK = 1 << 16
# Longer than what the agent in a node makes of a line of a million bytes.
LONGEST_LINE = 1 << 21
_TEXT: dict[str, Any] = {"text": True, "encoding": "utf-8", "errors": "replace"}


class ProcessTimeout(HostError):
    """A program was ended because its time was up."""


class ProgramNotFound(HostError):
    """A program is not on this machine."""


class CompletedProcess(Struct, frozen=True):
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
    errors: str = "replace",
) -> CompletedProcess:
    """Run to the end and return the output; ``env`` is added to this process's own.

    ``errors`` is Python's word for what becomes of bytes that are not UTF-8.
    HostError when it takes too long and, with ``check``, when it fails or is not there (else its code is 127).
    """
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL if input is None else pipe, "stdout": pipe, "stderr": pipe}
    try:
        with _child(argv, timeout, env=env, **streams, **{**_TEXT, "errors": errors}) as child:
            out, err = child.communicate(input, timeout=timeout)
    except ProgramNotFound as error:
        return _not_found(argv, check, error)
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
    """Run long work, handing on each line of its output and errors, as ``stream_blocks`` does several."""

    def each(lines: Sequence[str]) -> None:
        for line in lines:
            on_line(line)

    return stream_blocks(argv, each, env=env, cwd=cwd, timeout=timeout, check=check)


def stream_blocks(
    argv: Sequence[str],
    on_lines: Callable[[Sequence[str]], object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    check: bool = True,
    pulse: float = 0,
    rest: bool = True,
) -> CompletedProcess:
    """Run long work, handing on the lines of its output and errors, those that come at once together.

    ``out`` keeps the last 30. A line of more than 2 MiB comes in pieces; ``rest``: so does what has no end at the end,
    as of a connection that broke. With a ``pulse`` its input gets an empty line each so many seconds, and is open until
    this process ends, however that comes. Errors as ``run``.
    """
    tail: deque[str] = deque(maxlen=30)
    stdin = subprocess.PIPE if pulse else subprocess.DEVNULL
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        # As bytes: in text a carriage return would be the end of a line, too.
        with _child(argv, timeout, env=env, cwd=cwd, **pipes) as child, _pulsing(child, pulse):
            for lines in _blocks(child.stdout, rest) if child.stdout else ():
                tail.extend(lines)
                on_lines(lines)
    except ProgramNotFound as error:
        return _not_found(argv, check, error)
    text = "\n".join(tail)
    return _judged(CompletedProcess(tuple(argv), child.returncode, text, ""), text, check)


def _blocks(stdout: IO[bytes], rest: bool) -> Iterator[list[str]]:
    """The lines of a pipe, those that come at once together, and the ``rest`` at its end."""
    begun = b""
    while text := os.read(stdout.fileno(), min(CHUNK, LONGEST_LINE - len(begun))):
        begun += text
        end = begun.rfind(b"\n") + 1 or (LONGEST_LINE if len(begun) == LONGEST_LINE else 0)
        if end:
            whole, begun = begun[:end], begun[end:]
            yield _split(whole)
    if begun and rest:
        yield _split(begun)


def _split(block: bytes) -> list[str]:
    text = block.decode("utf-8", "replace")
    lines = text.removesuffix("\n").split("\n")
    return [line.rstrip("\r") for line in lines] if "\r" in text else lines


@contextmanager
def _pulsing(child: subprocess.Popen[Any], seconds: float) -> Iterator[None]:
    """Send the child an empty line each so many seconds, if any, until the block is left."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(seconds):
            with suppress(OSError):
                os.write(child.stdin.fileno(), b"\n")  # type: ignore[union-attr]

    if seconds:
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
    try:
        yield
    finally:
        over.set()
        if seconds:
            thread.join()


def allow_more_files() -> None:
    """Let this process have as many files open as it may: each run that it follows has five."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
    HostError when the program is not there, or was itself ended by a signal; OutputClosed when its output is closed.
    """
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, _: forward(signal.Signals(number)))
        for number in ours
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        # In a session of its own: the terminal's signals come through here alone.
        child = subprocess.Popen(argv, start_new_session=True, env={**os.environ, **(env or {})})
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


def held_by_guards(child: subprocess.Popen[Any]) -> None:
    """Have the guards that begin from now on hold the input of a child open until they are done."""
    assert child.stdin is not None  # noqa: S101 - it was asked for
    os.set_inheritable(child.stdin.fileno(), True)


def _start(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    try:
        return subprocess.Popen(argv, **options)
    except FileNotFoundError as error:
        raise ProgramNotFound(f"{argv[0]}: no such program (wanted for: {shlex.join(argv)})") from error


@contextmanager
def _child(
    argv: Sequence[str], timeout: float | None, *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A child that has ended when the block is left: killed with what it started by an exception, or as its time is up.

    Without a limit it stays in the terminal's own group: Ctrl-C reaches it, and sudo can ask for a password.
    """
    own_session = timeout is not None
    child = _start(argv, env={**os.environ, **(env or {})}, start_new_session=own_session, **options)
    with child, _limited(child, timeout) as expired:
        try:
            yield child
            child.wait()
        except subprocess.TimeoutExpired:
            expired.set()
            _kill(child, own_session=own_session)
        except BaseException:
            _kill(child, own_session=own_session)
            raise
    if expired.is_set():
        raise ProcessTimeout(f"{shlex.join(argv)}: not done within {timeout} s")


@contextmanager
def _limited(child: subprocess.Popen[Any], timeout: float | None) -> Iterator[threading.Event]:
    """Kill the child, which leads a session of its own, when its time is up; hands out whether it was."""
    expired = threading.Event()
    if timeout is None:
        yield expired
        return

    def expire() -> None:
        expired.set()
        _kill(child, own_session=True)

    timer = threading.Timer(timeout, expire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def _kill(child: subprocess.Popen[Any], *, own_session: bool) -> None:
    """End the child; with all that it started, where it leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        if own_session:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.terminate()


def _judged(done: CompletedProcess, said: str, check: bool) -> CompletedProcess:
    if check and done.code != 0:
        last = "\n".join(said.rstrip().splitlines()[-20:])
        raise HostError(f"{shlex.join(done.argv)}: exit code {done.code}" + (f"\n{last}" if last else ""))
    return done


def _not_found(argv: Sequence[str], check: bool, error: ProgramNotFound) -> CompletedProcess:
    if check:
        raise error
    return CompletedProcess(tuple(argv), NOT_FOUND, "", f"{argv[0]}: not found")


def feed(argv: Sequence[str], chunks: Iterable[bytes], *, timeout: float) -> CompletedProcess:
    """Run a program to its end with these bytes for its input; whatever its code.

    What the chunks raise is raised here, and the program killed. HostError when it is not there or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, stdin=subprocess.PIPE, stdout=out, stderr=errors) as child:
            assert child.stdin is not None  # noqa: S101 - it was asked for
            # One that hears no more may still have something to say, and its code says what came of it.
            with suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    child.stdin.write(chunk)
        return CompletedProcess(tuple(argv), child.returncode, _text(out), _text(errors))


def drain(argv: Sequence[str], on_chunk: Callable[[bytes], object], *, timeout: float) -> CompletedProcess:
    """Run a program to its end, handing on the bytes of its output; errors as ``feed``."""
    with tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as child:
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
    child.wait()


class BackgroundProcess:
    """A program beside this one. Its input is a pipe that closes with this process, however that ends.

    Guards that have begun meanwhile are done before it closes.
    """

    def __init__(self, argv: Sequence[str], errors: Path) -> None:
        """Start it; what it says on its standard error goes to the file. HostError when it is not there."""
        pipe = subprocess.PIPE
        with errors.open("wb") as sink:
            self._child = _start(argv, stdin=pipe, stdout=pipe, stderr=sink, start_new_session=True)
        held_by_guards(self._child)
        self.number = self._child.pid
        """Of the process, and of the group that it leads."""
        self._told_to_end = False

    def lines(self, seconds: float) -> Generator[str, None, None]:
        """Its output as it comes, line ends kept; it is killed if a reader still waits after so long.

        A line of more than 2 MiB comes in pieces.
        """
        stdout = self._child.stdout
        assert stdout is not None  # noqa: S101 - it was asked for
        with _limited(self._child, seconds):
            while line := stdout.readline(LONGEST_LINE):
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
            _kill(self._child, own_session=True)
        with self._child:
            pass


def _text(file: IO[bytes]) -> str:
    """What a program said beside its output, the first 2 MiB of it."""
    file.seek(0)
    return file.read(LONGEST_LINE).decode("utf-8", "replace")
