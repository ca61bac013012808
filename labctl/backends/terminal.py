"""Carry this process's input and output to a program at the other end of the client's web socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from labctl.errors import ConfigError, HostError, unwritten

IN, OUT, ERR, RESIZE = 0, 1, 2, 4
CHUNK = 1 << 16
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def require(node: str, stdin: str) -> None:
    """Raise ConfigError if a shell in a node would have no terminal."""
    if stdin != "terminal":
        raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")


def carry(socket: Any, send: Callable[[int], None], *, reads: bool, raw: bool) -> None:
    """Carry input to the program and its output here until it ends; pass INT, TERM and HUP to ``send``.

    In a ``raw`` terminal every key goes to the program, also Ctrl-C, and so does the size of the terminal.
    """
    source = sys.stdin.fileno() if reads else None
    size = os.terminal_size((0, 0))
    with _raw(source) if raw and source is not None else contextlib.nullcontext(), _signals(send):
        while socket.is_open():
            if raw and size != (size := shutil.get_terminal_size()):
                socket.write_channel(RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode())
            descriptors = [socket.sock.sock] + ([source] if source is not None else [])
            pending = getattr(socket.sock.sock, "pending", int)()
            ready, _, _ = ([socket.sock.sock], [], []) if pending else select.select(descriptors, [], [], 1.0)
            if source is not None and source in ready and not _forward(source, socket):
                source = None
            if socket.sock.sock in ready:
                socket.update(timeout=0)
            _print(socket)
        _print(socket)


def _forward(source: int, socket: Any) -> bool:
    """Read input once and send it to the program; at its end close that channel and return False."""
    typed = os.read(source, CHUNK)
    if typed:
        socket.write_stdin(typed)
    else:
        # Kubernetes before 1.30 ignores this: the input stays open until the program ends.
        socket.close_channel(IN)
    return bool(typed)


def show_of(node: str, line: str) -> None:
    """Print a line of a program to stdout, after the name of the node that it runs in."""
    _write(sys.stdout, f"{node}: {line}\n".encode("utf-8", "surrogateescape"))


def _print(socket: Any) -> None:
    """Print what has arrived of the program's stdout and stderr to those of this process."""
    for channel, sink in ((OUT, sys.stdout), (ERR, sys.stderr)):
        if piece := socket.read_channel(channel):
            _write(sink, piece)


def _write(sink: TextIO, data: bytes) -> None:
    """Write and flush bytes. OutputClosed if the reader is gone, OutputFailed on a full disk; drop later ones."""
    try:
        sink.buffer.write(data)
        sink.flush()
    except OSError as error:
        # Flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
        raise unwritten(error) from error


@contextlib.contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Put a terminal into raw mode during the block, then restore it."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals(send: Callable[[int], None]) -> Iterator[None]:
    """Pass INT, TERM and HUP to ``send`` during the block, each in its own thread; they do not end this process."""
    import threading

    def deliver(number: int) -> None:
        """Pass a signal on; ignore that the program has ended."""
        # The program may just have ended.
        with contextlib.suppress(HostError):
            send(number)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        threading.Thread(target=deliver, args=(number,), daemon=True).start()

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
