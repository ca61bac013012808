#!/usr/bin/python3
"""Print and log the output of a rank in whole lines, each with the mark of its rank.

Standard library only, Python >= 3.8. rank.sh starts it before the rank and is its input:

    rank_output.py RANK LOG REPORTS GREETING

REPORTS is the descriptor of a pipe on which rank.sh alone writes: a line of it has a mark of its own, as GREETING has,
which is printed first. No program can write a mark: the byte that begins each is dropped from what it prints.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import stat
import sys
import termios
import time

PIECE = 1 << 16
# Bytes that a launcher reads at once, and lines for which Open MPI then has room for its marks.
AT_ONCE, MOST_LINES = 4096, 128


class Output:
    """The rank's log, and the pipe to its launcher."""

    def __init__(self, rank: str, log: str) -> None:
        self._mark, self._report_mark = b"\x01%s\x02" % rank.encode(), b"\x01%s!\x02" % rank.encode()
        self._out = launcher_pipe()
        self._begun: list[bytes] = []
        self._drawn = 0.0
        self._log = -1
        try:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self.report(b"labctl: a rank has no log: %s\n" % os.fsencode(str(error)))

    def take(self, text: bytes) -> None:
        """Print the lines of the rank that are whole."""
        # pdsh ends a line at a NUL; what begins a mark is this program's alone.
        text = text.replace(b"\0", b"").replace(b"\x01", b"")
        end = text.rfind(b"\n") + 1
        if end:
            lines, self._begun = b"".join((*self._begun, text[:end])), [text[end:]]
            self._print(lines, self._mark)
            return
        self._begun.append(text)
        # A bar that is drawn over and over is a line each second: how far it is shall be seen.
        if b"\r" in text and time.monotonic() >= self._drawn + 1:
            text = b"".join(self._begun)
            end = text.rfind(b"\r")
            self._begun, self._drawn = [text[end:]], time.monotonic()
            self._print(text[:end] and text[:end] + b"\n", self._mark)

    def end_line(self) -> None:
        """Print the last line of the rank, which has no end."""
        text, self._begun = b"".join(self._begun), []
        self._print(text and text + b"\n", self._mark)

    def report(self, lines: bytes) -> None:
        """Print lines of rank.sh."""
        self._print(lines.replace(b"\x01", b""), self._report_mark)

    def _print(self, lines: bytes, mark: bytes) -> None:
        write(self._log, lines)
        marked = lines and mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        while marked:
            size, cut = AT_ONCE, 0
            while not cut or marked.count(b"\n", 0, cut) > MOST_LINES:
                cut = marked.rfind(b"\n", 0, size) + 1 or marked.find(b"\n") + 1
                size //= 2
            write(self._out, marked[:cut])
            marked = marked[cut:]


def launcher_pipe() -> int:
    """The descriptor that the launcher reads writes of whole.

    Open MPI puts its mark before what it reads at once and at each line, and drops what makes too much of that. It has
    a terminal for the output, which holds no writes apart, and for errors a pipe, which does if it is asked to.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ or not stat.S_ISFIFO(os.fstat(2).st_mode):
        return 1
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_DIRECT)
    return 2


def write(file: int, text: bytes) -> None:
    try:
        while text:
            text = text[os.write(file, text) :]
    except OSError:
        pass  # The other one may be there still.


def waiting(file: int) -> int:
    """Bytes that a pipe holds now."""
    count = array.array("i", [0])
    fcntl.ioctl(file, termios.FIONREAD, count)
    return count[0]


def pump(output: Output, reports: int) -> None:
    """Print what a rank prints until its output is closed, and reports behind what was printed before them."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(reports, select.POLLIN)
    begun = b""
    open_still = True
    while open_still:
        ready = [file for file, _ in poll.poll()]
        if reports not in ready:
            text = os.read(0, PIECE)
            output.take(text)
            open_still = bool(text)
            continue
        lines, end, begun = (begun + os.read(reports, PIECE)).rpartition(b"\n")
        # What the rank printed before is in the pipe by now.
        left = waiting(0)
        while left:
            text = os.read(0, min(left, PIECE))
            output.take(text)
            left -= len(text)
        output.end_line()
        output.report(lines + end)
    output.end_line()


def main(rank: str, log: str, reports: str, greeting: str) -> None:
    output = Output(rank, log)
    output.report(os.fsencode(greeting) + b"\n")
    pump(output, int(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
