"""Starts processes: argument lists, never a command line; a failure is a HostError that says what ran.

Nothing else does, but ``pipes``, which holds on to what goes through their pipes.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from labctl.errors import HostError, Unread

NOT_FOUND = 127
"""The code of a program that is not there, as shells give it."""
# Seconds for what is to be done when this process is gone.
GUARDING = 60


class OutOfTime(HostError):
    """A program was ended because its time was up."""


@dataclass(frozen=True, slots=True)
class Completed:
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
) -> Completed:
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
    return _judged(Completed(tuple(argv), child.returncode, out, err), err or out, check)


def stream(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> Completed:
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
    return _judged(Completed(tuple(argv), child.returncode, text, ""), text, check)


def without(names: Iterable[str], argv: Sequence[str]) -> tuple[str, ...]:
    """The words that run a program without these variables, should this process's environment have any of them."""
    unset = [word for name in names if name in os.environ for word in ("-u", name)]
    return ("env", *unset, *argv) if unset else tuple(argv)


def attached(
    argv: Sequence[str], forward: Callable[[signal.Signals], None], *, env: Mapping[str, str] | None = None
) -> int:
    """Run a program on this process's own input and output to its end; returns its code. ``env`` as ``run``.

    What would end this process meanwhile (INT, TERM, HUP, less what it was told to ignore) goes to ``forward`` instead.
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
        raise Unread(f"nobody reads what {argv[0]} prints")
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


def _judged(done: Completed, said: str, check: bool) -> Completed:
    if check and done.code != 0:
        last = "\n".join(said.rstrip().splitlines()[-20:])
        raise HostError(f"{shlex.join(done.argv)}: exit code {done.code}" + (f"\n{last}" if last else ""))
    return done


def missing(argv: Sequence[str], check: bool, error: OSError) -> Completed:
    """What comes of a program that is not there: with ``check``, HostError."""
    if check:
        raise HostError(f"{argv[0]}: no such program (wanted for: {shlex.join(argv)})") from error
    return Completed(tuple(argv), NOT_FOUND, "", f"{argv[0]}: not found")


def too_slow(argv: Sequence[str], timeout: float | None) -> OutOfTime:
    return OutOfTime(f"{shlex.join(argv)}: not done within {timeout} s")
