"""Starts processes from argument lists, never through a shell line; a failure is a HostError with the command."""

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
from labctl.system import human

NOT_FOUND = 127
"""Exit code of a program that does not exist, as in shells."""
# Seconds that a guard may run after this process has ended.
GUARDING = 60
CHUNK = 1 << 16
# Longer than the agent's message for a line of a million bytes.
LONGEST_LINE = 1 << 21
_TEXT: dict[str, Any] = {"text": True, "encoding": "utf-8", "errors": "replace"}


class ProcessTimeout(HostError):
    """A program was killed because its time was up."""


class ProgramNotFound(HostError):
    """A program does not exist on this machine."""


class CompletedProcess(Struct, frozen=True):
    """A program's arguments, exit code and output."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 - subprocess's own name for it
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
    check: bool = True,
    errors: str = "replace",
) -> CompletedProcess:
    """Run a program to its end and return code and output; HostError on timeout and, with ``check``, on failure.

    ``env`` is added to this process's environment. ``errors`` is Python's error handler for bytes that are not UTF-8.
    HostError if it takes too long and, with ``check``, if it fails or is not found (otherwise the code is 127).
    """
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL if input is None else pipe, "stdout": pipe, "stderr": pipe}
    try:
        with _child(argv, timeout, env=env, cwd=cwd, **streams, **{**_TEXT, "errors": errors}) as child:
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
    """Run a program, calling ``on_line`` for each line of stdout and stderr; else as ``stream_blocks``."""

    def each(lines: Sequence[str]) -> None:
        """Call ``on_line`` for each line."""
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
    typed: Input | None = None,
    rest: bool = True,
) -> CompletedProcess:
    """Run a program, passing on its output in blocks of lines as they come; return the last 30. HostError as ``run``.

    ``out`` keeps the last 30 lines. A line of more than 2 MiB comes in pieces. ``rest``: pass on an unfinished last
    line too, as a broken connection leaves it. With a ``pulse``, the program's input stays open until this process ends
    and gets what is ``typed``, and an empty line every ``pulse`` seconds. Errors as ``run``.
    """
    tail: deque[str] = deque(maxlen=30)
    stdin = subprocess.PIPE if pulse else subprocess.DEVNULL
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        # As bytes: text mode would end lines at carriage returns too.
        with _child(argv, timeout, env=env, cwd=cwd, **pipes) as child, _pulsing(child, typed or Input(), pulse):
            for lines in _blocks(child.stdout, rest) if child.stdout else ():
                tail.extend(lines)
                on_lines(lines)
    except ProgramNotFound as error:
        return _not_found(argv, check, error)
    text = "\n".join(tail)
    return _judged(CompletedProcess(tuple(argv), child.returncode, text, ""), text, check)


def _blocks(stdout: IO[bytes], rest: bool) -> Iterator[list[str]]:
    """Yield the lines of a pipe in blocks as they arrive; with ``rest`` also an unfinished last line."""
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
    """Split a block into lines, without carriage returns at their ends."""
    text = block.decode("utf-8", "replace")
    lines = text.removesuffix("\n").split("\n")
    return [line.rstrip("\r") for line in lines] if "\r" in text else lines


class Input:
    """The input of a program, written line by line; what is written before the program starts waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: IO[bytes] | None = None
        self._waiting = b""
        self._closed = False

    def write(self, line: str) -> None:
        """Write a line to the program, or keep it until the program starts; drop it if the pipe is broken."""
        with self._lock:
            self._waiting += f"{line}\n".encode()
            self._pass_on()

    def close(self) -> None:
        """Close the input, once what was written has been passed on."""
        with self._lock:
            self._closed = True
            self._pass_on()

    def open(self, pipe: IO[bytes]) -> None:
        """Pass on what has been written, and from now on what is written, to a pipe."""
        with self._lock:
            self._pipe = pipe
            self._pass_on()

    def detach(self) -> None:
        """Stop writing to the pipe: its number may become another file's."""
        with self._lock:
            self._pipe = None

    def _pass_on(self) -> None:
        """Write the waiting input, then close the pipe if the input is closed; the lock is held."""
        if not self._pipe or self._pipe.closed:
            return
        with suppress(OSError):
            while self._waiting:
                written = os.write(self._pipe.fileno(), self._waiting)
                self._waiting = self._waiting[written:]
        self._waiting = b""
        if self._closed:
            self._pipe.close()


@contextmanager
def _pulsing(child: subprocess.Popen[Any], typed: Input, seconds: float) -> Iterator[None]:
    """Open the child's input, and write an empty line every ``seconds``, if not 0, until the block is left."""
    if not seconds or not child.stdin:
        yield
        return
    over = threading.Event()

    def send() -> None:
        """Write an empty line every ``seconds`` until the block is left."""
        while not over.wait(seconds):
            typed.write("")

    typed.open(child.stdin)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        typed.detach()
        over.set()
        thread.join()


def allow_more_files() -> None:
    """Raise this process's limit of open files to its hard limit."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def variable(name: str) -> str:
    """Return a variable of this process's environment, which started programs inherit; empty if unset."""
    return os.environ.get(name, "")


def without(names: Iterable[str], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments prefixed with ``env -u NAME`` for those of the variables that are set here."""
    present = [name for name in names if name in os.environ]
    options = [word for name in present for word in ("-u", name)]
    return ("env", *options, *argv) if options else tuple(argv)


def attached(
    argv: Sequence[str], forward: Callable[[signal.Signals], None], *, env: Mapping[str, str] | None = None
) -> int:
    """Run a program on our input and output, signals going to ``forward``; return its code. HostError if one ends it.

    ``env`` as ``run``. Signals that were ignored are not passed to ``forward``. HostError if the program is not found
    or ends by a signal; OutputClosed if its output is closed.
    """
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, _: forward(signal.Signals(number)))
        for number in ours
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        # A new session: the terminal's signals reach it only through `forward`.
        child = subprocess.Popen(argv, start_new_session=True, env={**os.environ, **(env or {})})
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, _: child.send_signal(number))
        code = child.wait()
    except OSError as error:
        raise HostError(f"cannot run {shlex.join(argv)}: {error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGPIPE:
        raise OutputClosed(f"the output of {argv[0]} was closed")
    if code < 0:
        raise HostError(f"{argv[0]} was ended by {signal.Signals(-code).name}")
    return code


@contextmanager
def begun() -> Iterator[Callable[[Sequence[str]], None]]:
    """Provide a function that starts a program without waiting; at the end of the block wait for all of them."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(argv: Sequence[str]) -> None:
        """Start a program in its own session, without input or output."""
        quiet = subprocess.DEVNULL
        children.append(subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))

    try:
        yield begin
    finally:
        for child in children:
            child.wait()


@contextmanager
def guarded(argv: Sequence[str]) -> Iterator[None]:
    """Run the program if an exception leaves the block, and also if this process is killed within it.

    A shell waits for a word on a pipe from this process; the pipe closing without it reveals any death, even by
    SIGKILL. Guards started within the block, which have a minute each, hold the pipe too: this program runs after them.
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
    """Make a child's input pipe inheritable: guards started from now on keep it open until they end."""
    assert child.stdin is not None  # noqa: S101 - a pipe was requested
    os.set_inheritable(child.stdin.fileno(), True)


def _start(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program; raise ProgramNotFound if it does not exist."""
    try:
        return subprocess.Popen(argv, **options)
    except FileNotFoundError as error:
        raise ProgramNotFound(f"{argv[0]}: command not found (needed for: {shlex.join(argv)})") from error


@contextmanager
def _child(
    argv: Sequence[str], timeout: float | None, *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Provide a child that has ended when the block is left, killed on error; ProcessTimeout after ``timeout`` seconds.

    With a timeout its descendants are killed with it. Without one it stays in the terminal's process group: Ctrl-C
    reaches it, and sudo can ask for a password.
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
    if timeout is not None and expired.is_set():
        raise ProcessTimeout(f"`{shlex.join(argv)}` timed out after {human.duration(timeout)}")


@contextmanager
def _limited(child: subprocess.Popen[Any], timeout: float | None) -> Iterator[threading.Event]:
    """Kill the child, a session leader, after ``timeout`` seconds; provide an event that tells if that happened."""
    expired = threading.Event()
    if timeout is None:
        yield expired
        return

    def expire() -> None:
        """Kill the child's session and set the event."""
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
    """Kill the child and its descendants if it leads its own session; else send it SIGTERM."""
    with suppress(ProcessLookupError, PermissionError):
        if own_session:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.terminate()


def _judged(done: CompletedProcess, output: str, check: bool) -> CompletedProcess:
    """Return the completed process; with ``check``, raise HostError with the last lines of ``output`` if it failed."""
    if check and done.code != 0:
        last = "\n".join(output.rstrip().splitlines()[-20:])
        raise HostError(f"{shlex.join(done.argv)}: exit code {done.code}" + (f"\n{last}" if last else ""))
    return done


def _not_found(argv: Sequence[str], check: bool, error: ProgramNotFound) -> CompletedProcess:
    """Return a completed process with exit code 127, or raise the error with ``check``."""
    if check:
        raise error
    return CompletedProcess(tuple(argv), NOT_FOUND, "", f"{argv[0]}: not found")


def feed(argv: Sequence[str], chunks: Iterable[bytes], *, timeout: float) -> CompletedProcess:
    """Run a program with these chunks as its input; return code, whatever it is, and output. HostError on timeout.

    An exception of ``chunks`` kills the program and is raised. HostError if it is not found or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, stdin=subprocess.PIPE, stdout=out, stderr=errors) as child:
            assert child.stdin is not None  # noqa: S101 - a pipe was requested
            # A program that closes its input early may still print; its exit code tells if it failed.
            with suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    child.stdin.write(chunk)
        return CompletedProcess(tuple(argv), child.returncode, _text(out), _text(errors))


def drain(argv: Sequence[str], on_chunk: Callable[[bytes], object], *, timeout: float) -> CompletedProcess:
    """Run a program, passing chunks of stdout to ``on_chunk``; return code and stderr. HostError on timeout."""
    with tempfile.TemporaryFile() as errors:
        with _child(argv, timeout, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as child:
            assert child.stdout is not None  # noqa: S101 - a pipe was requested
            while chunk := os.read(child.stdout.fileno(), CHUNK):
                on_chunk(chunk)
        return CompletedProcess(tuple(argv), child.returncode, "", _text(errors))


def bridge(argv: Sequence[str], descriptor: int, gate: AbstractContextManager[object], seconds: float) -> None:
    """Run a program with a descriptor as input and output to its end; hold the gate for the first ``seconds`` only."""
    with gate:
        child = subprocess.Popen(
            argv, stdin=descriptor, stdout=descriptor, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
    child.wait()


class BackgroundProcess:
    """A program beside this one; its input is a pipe that closes when this process ends, however that is.

    Guards that have started meanwhile end before the pipe closes.
    """

    def __init__(self, argv: Sequence[str], errors: Path) -> None:
        """Start the program with its standard error written to a file. HostError if it is not found."""
        pipe = subprocess.PIPE
        with errors.open("wb") as sink:
            self._child = _start(argv, stdin=pipe, stdout=pipe, stderr=sink, start_new_session=True)
        held_by_guards(self._child)
        self.number = self._child.pid
        """Id of the process, and of the process group that it leads."""
        self._ending = False

    def lines(self, seconds: float) -> Generator[str, None, None]:
        """Yield the program's output lines, line ends kept, until it ends; kill it after ``seconds``.

        A line of more than 2 MiB comes in pieces.
        """
        stdout = self._child.stdout
        assert stdout is not None  # noqa: S101 - a pipe was requested
        with _limited(self._child, seconds):
            while line := stdout.readline(LONGEST_LINE):
                yield line.decode("utf-8", "replace")

    def ended(self, seconds: float = 0) -> bool:
        """Tell if the program has ended, waiting up to ``seconds`` for it."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, seconds: float = 2) -> None:
        """End the program and its descendants: SIGTERM first, SIGKILL after ``seconds``.

        Repeated calls do nothing: the process id may belong to another process by then.
        """
        if self._ending:
            return
        self._ending = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGTERM)
        if not self.ended(seconds):
            _kill(self._child, own_session=True)
        with self._child:
            pass


def _text(file: IO[bytes]) -> str:
    """Return the first 2 MiB of a temporary file as text."""
    file.seek(0)
    return file.read(LONGEST_LINE).decode("utf-8", "replace")
