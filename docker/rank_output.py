#!/usr/bin/python3
"""Print and log the output of a rank in whole lines, each with the mark of its rank.

Standard library only, Python >= 3.8. rank.sh starts it before the rank, and connects the rank's output to its stdin:

    rank_output.py RANK LOG REPORTS GREETING

REPORTS is the descriptor of a pipe to which only rank.sh writes; its lines have another mark. GREETING is printed
first, with that mark. Programs cannot forge a mark: its first byte is removed from their output.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import select
import stat
import sys
import termios
import time

PIECE = 1 << 16
# Bytes that a launcher reads at once, and the lines among them for which Open MPI's buffer has room for its own marks.
AT_ONCE, MOST_LINES = 4096, 128
# Bytes of a line that every launcher passes on whole: of a longer one it gets the beginning, and the log all. pdsh cuts
# lines at 128 KiB.
LONGEST = 120_000
# Seconds after which an unfinished line that ends in dots or their like, as a test suite's, is printed as far as it is.
WORDLESS = 10
DOTS = re.compile(rb"([.#=*-])\1\1$")
# Seconds between two looks at the launcher, and after its end until its rank must have ended.
LOOK, ENDING = 1, 2
LONG = re.compile(rb"[^\n]{%d,}" % AT_ONCE)


class Output:
    """Output of a rank: its log, and the pipe to its launcher."""

    def __init__(self, rank: str, log: str) -> None:
        """Open the rank's log for appending, and the pipe to the launcher; report a log that cannot be opened."""
        self._rank, self._name = rank, os.path.basename(log)  # noqa: PTH119
        self._mark, self._report_mark = b"\x01%s\x02" % rank.encode(), b"\x01%s!\x02" % rank.encode()
        self._out = launcher_pipe()
        self._is_open_mpi = self._out != 1
        self._partial: list[bytes] = []
        self._size = 0
        """Bytes of the unfinished line in ``_partial``, or of one too long to keep, whose beginning was printed."""
        self._bar_printed = 0.0
        self._line_began = 0.0
        """Time of the first text of the unfinished line."""
        self._log = -1
        try:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self.report(b"labctl: a rank has no log: %s\n" % os.fsencode(str(error)))

    def add(self, text: bytes) -> None:
        """Print and log the rank's lines that the text completes, and progress bars at most once per second."""
        # pdsh ends a line at a NUL. Only this program may print the first byte of a mark.
        text = text.replace(b"\0", b"").replace(b"\x01", b"")
        line, newline, rest = text.partition(b"\n")
        if self._size + len(line) > LONGEST:
            self._add_to_long(line)
            if not newline:
                return
            self.end_line()
            text = rest
        end = text.rfind(b"\n") + 1
        if end:
            lines, self._partial = b"".join((*self._partial, text[:end])), [text[end:]]
            self._size, self._line_began = len(text) - end, time.monotonic()
            self._print(lines, self._mark)
            return
        if not self._size:
            self._line_began = time.monotonic()
        self._partial.append(text)
        self._size += len(text)
        # A progress bar, redrawn after carriage returns, is printed as a line each second.
        if b"\r" in text and time.monotonic() >= self._bar_printed + 1:
            text = b"".join(self._partial)
            end = text.rfind(b"\r")
            self._partial, self._bar_printed = [text[end:]], time.monotonic()
            self._size, self._line_began = len(text) - end, time.monotonic()
            self._print(text[:end] and text[:end] + b"\n", self._mark)

    def show_unfinished(self) -> None:
        """Print an unfinished line of dots that is WORDLESS seconds old; what follows is printed as another line."""
        text = b"".join(self._partial) if 0 < self._size <= LONGEST else b""
        if DOTS.search(text) and time.monotonic() >= self._line_began + WORDLESS:
            self._partial, self._size = [], 0
            write(self._log, text)
            self._send(text + b"\n", self._mark)

    def _add_to_long(self, text: bytes) -> None:
        """Log a part of a line that is too long; of its first part, print the first LONGEST bytes."""
        if self._size <= LONGEST:
            text, self._partial = b"".join((*self._partial, text)), []
            self._send(text[:LONGEST] + b"\n", self._mark)
            self._size = 0
        write(self._log, text)
        self._size += len(text)

    def end_line(self) -> None:
        """Print and log the unfinished last line; of a line that was cut, report how long it was."""
        text, size = b"".join(self._partial), self._size
        self._partial, self._size = [], 0
        if size <= LONGEST:
            self._print(text and text + b"\n", self._mark)
            return
        write(self._log, b"\n")
        cut = f"cut to {LONGEST:,} here; {self._name} has all"
        self.report(os.fsencode(f"labctl: rank {self._rank} printed a line of {size:,} bytes, {cut}\n"))

    def report(self, lines: bytes) -> None:
        """Print and log lines of rank.sh, with the mark of reports."""
        self._print(lines.replace(b"\x01", b""), self._report_mark)

    def _print(self, lines: bytes, mark: bytes) -> None:
        write(self._log, lines)
        self._send(lines, mark)

    def _send(self, lines: bytes, mark: bytes) -> None:
        """Write lines to the launcher with the mark, in writes that it reads whole; cut long ones for Open MPI."""
        marked = lines and mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        if self._is_open_mpi:
            marked = LONG.sub(pieces, marked)
        while marked:
            size, cut = AT_ONCE, 0
            while not cut or marked.count(b"\n", 0, cut) > MOST_LINES:
                cut = marked.rfind(b"\n", 0, size) + 1 or marked.find(b"\n") + 1
                size //= 2
            write(self._out, marked[:cut])
            marked = marked[cut:]


def launcher_pipe() -> int:
    """Return the descriptor to print on: 2, with O_DIRECT set, under Open MPI if it is a pipe; else 1.

    Open MPI puts its own mark before each read and each line, and drops text that does not fit its buffer then. Its
    stdout is a terminal, which merges writes; its stderr is a pipe, which keeps them apart with O_DIRECT.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ or not stat.S_ISFIFO(os.fstat(2).st_mode):
        return 1
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_DIRECT)
    return 2


def pieces(line: re.Match[bytes]) -> bytes:
    """Cut a marked line into lines of 4096 bytes at most, of which all but the last have the mark of a piece.

    The agent in the launcher joins them: Open MPI would put its own mark, or a line of another rank, between reads.
    """
    mark, _, text = line[0].partition(b"\x02")
    of_piece = mark + b"+\x02"
    room = AT_ONCE - len(of_piece) - 1
    *begun, last = (text[at : at + room] for at in range(0, len(text), room))
    return b"".join(b"%b%b\n" % (of_piece, piece) for piece in begun) + mark + b"\x02" + last


def write(file: int, text: bytes) -> None:
    """Write all of the text to a descriptor; give up silently at the first error."""
    try:
        while text:
            text = text[os.write(file, text) :]
    except OSError:
        pass  # The log or the launcher's pipe may still work without the other.


def buffered(file: int) -> int:
    """Return the number of bytes in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(file, termios.FIONREAD, count)
    return count[0]


class Parent:
    """The process of a launcher that started this rank. It outlives its ranks unless it is killed."""

    def __init__(self, rank: str) -> None:
        self._rank, self._script = rank, os.getppid()
        self._pid = parent_of(self._script)
        self._name = name_of(self._pid)
        self._gone: float | None = None

    def report(self) -> bytes:
        """Return a line, once, 2 s after the launcher's process here ended before its rank; else empty."""
        if not self._pid or parent_of(self._script) in (0, self._pid):
            return b""
        self._gone = self._gone or time.monotonic()
        if time.monotonic() < self._gone + ENDING:
            return b""
        self._pid = 0
        text = f"labctl: {self._name} on {os.uname().nodename} was killed while rank {self._rank} ran\n"
        return os.fsencode(text)


def parent_of(pid: int) -> int:
    """Return the parent's pid of a process; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # noqa: PTH123 - pathlib takes longer to import
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def name_of(pid: int) -> str:
    """Return a process's program, or the script or module that Python runs; "its launcher" if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:
        return "its launcher"
    name = os.path.basename(words[0])  # noqa: PTH119
    if not name.startswith("python"):
        return name
    if "-m" in words[:4]:
        return words[words.index("-m") + 1]
    return next((os.path.basename(word) for word in words[1:] if word and not word.startswith("-")), name)  # noqa: PTH119


def pump(output: Output, reports: int, parent: Parent) -> None:
    """Print the rank's output until it closes, each report after the output before it, and a killed launcher."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(reports, select.POLLIN)
    partial = b""
    is_open, looked = True, time.monotonic()
    while is_open:
        ready = [file for file, _ in poll.poll(1000 * LOOK)]
        if time.monotonic() >= looked + LOOK:
            looked = time.monotonic()
            output.report(parent.report())
            output.show_unfinished()
        if not ready:
            continue
        if reports not in ready:
            text = os.read(0, PIECE)
            output.add(text)
            is_open = bool(text)
            continue
        lines, end, partial = (partial + os.read(reports, PIECE)).rpartition(b"\n")
        # Output that the rank printed before the report is in the pipe by now.
        left = buffered(0)
        while left:
            text = os.read(0, min(left, PIECE))
            output.add(text)
            left -= len(text)
        output.end_line()
        output.report(lines + end)
    output.end_line()


def main(rank: str, log: str, reports: str, greeting: str) -> None:
    """Print and log the greeting as a report, then the rank's output and reports until its stdin closes."""
    output = Output(rank, log)
    output.report(os.fsencode(greeting) + b"\n")
    pump(output, int(reports), Parent(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
