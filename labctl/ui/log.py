"""Windows of a run's log, read by byte offsets: a log of a million lines opens as quickly as one of ten."""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import accumulate, count, islice
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from labctl.records import store
from labctl.system import files

PIECE, PART = 1 << 20, 1 << 18
"""Bytes of a file in memory at once, and those after which the lines before are remembered."""
LONGEST = 4000
"""Bytes of a line that are shown."""
MOST_LINES, MOST_PIECES = 2000, 32
"""Lines of a window at most, and pieces that are searched for those of a rank."""
MOST_MATCHES = 500
BEFORE_MATCH, AROUND_MATCH = 60, 240
"""Bytes that are shown of a line with a text that was searched, before the text and in all."""
# Colors, movements and titles of terminals; then other characters that do not show, or that turn text around.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
UNSEEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Put before lines by pdsh.
NODE = re.compile(r"^worker-\d+: ")


class LogLine(Struct, frozen=True, kw_only=True):
    """A line of a log, to show; rank and time in seconds since 1970 are None if they are not recorded."""

    at: int
    """Offset of its first byte."""
    number: int
    """Its number in the log, from 1."""
    text: str
    rank: int | None = None
    when: float | None = None


class Window(Struct, frozen=True, kw_only=True):
    """Lines of a log between two offsets; ``skipped``: number of new lines before them that are left out."""

    begin: int = 0
    end: int = 0
    size: int = 0
    """Length of the log."""
    lines: tuple[LogLine, ...] = ()
    skipped: int = 0


class Matches(Struct, frozen=True):
    """Lines of a log with a text, each cut to its place; ``more`` if there are others behind."""

    lines: tuple[LogLine, ...] = ()
    more: bool = False


def before(folder: Path, end: int | None, most: int, rank: int | None = None) -> Window:
    """Return the last lines before an offset (None: the end), those of a rank if given; empty without a log."""
    with opened(folder) as log:
        return log.before(log.size if end is None else end, most, rank) if log else Window()


def after(folder: Path, begin: int, most: int, rank: int | None = None) -> Window:
    """Return the first lines from an offset on, those of a rank if given; empty without a log."""
    with opened(folder) as log:
        return log.after(begin, most, rank) if log else Window()


def new_lines(folder: Path, since: int | None, most: int) -> Window | None:
    """Return the last whole lines behind an offset (None: of all) and how many are left out; None without a new one."""
    with opened(folder) as log:
        if not log or log.size <= (since or 0):
            return None
        end = log.whole
        if end <= (since or 0):
            return None
        return log.before(end, most) if since is None else log.between(since, end, most)


def search(folder: Path, text: str, rank: int | None = None) -> Matches:
    """Return the first lines with a text, of a rank if given; case of ASCII letters does not matter."""
    with opened(folder) as log:
        wanted = text.partition("\n")[0].encode().lower()
        matches = list(islice(log.search(wanted, rank), MOST_MATCHES + 1)) if log and wanted else []
    return Matches(tuple(matches[:MOST_MATCHES]), more=len(matches) > MOST_MATCHES)


def display_text(raw: bytes, length: int = 0) -> str:
    """Return the text of a line that no terminal code changes: the last state of a progress bar, a long line cut.

    ``length`` is that of the line of which ``raw`` is a part.
    """
    length = max(length, len(raw))
    part = raw[-LONGEST:] if b"\r" in raw else raw[:LONGEST]
    text = part.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    plain = UNSEEN.sub("\ufffd", ESCAPES.sub("", text))
    return plain if length <= LONGEST or b"\r" in raw else f"{plain} ... {length:,} bytes"


# --- files ---------------------------------------------------------------------------------------------------


class IndexedFile:
    """An open file that may grow, with the line numbers of its offsets."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._handle = stream.fileno()
        self.size = os.fstat(self._handle).st_size
        self._counts = _counts(path)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes between two offsets."""
        return os.pread(self._handle, max(0, end - begin), begin)

    def number_at(self, offset: int) -> int:
        """Return the number of lines that end before an offset."""
        counts = self._counted()
        part = min(offset // PART, len(counts) - 1)
        return counts[part] + self.read(part * PART, offset).count(b"\n")

    def offset_of(self, number: int) -> int:
        """Return the offset behind so many lines."""
        if number <= 0:
            return 0
        counts = self._counted()
        part = bisect_left(counts, number) - 1
        content = self.read(part * PART, (part + 1) * PART)
        rest = content.split(b"\n", number - counts[part])[-1]
        return part * PART + len(content) - len(rest)

    def start_of_line(self, offset: int) -> int:
        """Return the offset behind the last end of a line before an offset."""
        while offset > 0:
            begin = max(0, offset - PART)
            if newline := self.read(begin, offset).rfind(b"\n") + 1:
                return begin + newline
            offset = begin
        return 0

    def end_of_line(self, offset: int) -> int:
        """Return the offset behind the first end of a line from an offset on, or the size."""
        while offset < self.size:
            if newline := self.read(offset, offset + PART).find(b"\n") + 1:
                return offset + newline
            offset += PART
        return self.size

    def _counted(self) -> list[int]:
        """Return the numbers of lines before each part."""
        with COUNTING:
            while (part := len(self._counts)) * PART <= self.size:
                content = self.read((part - 1) * PART, part * PART)
                self._counts.append(self._counts[-1] + content.count(b"\n"))
        return self._counts


COUNTING = threading.Lock()


@lru_cache(maxsize=64)
def _counts(path: Path) -> list[int]:  # noqa: ARG001
    """Return the counts of a file, which has the same lines if it is rewritten. By path: inodes are used again."""
    return [0]


@contextmanager
def opened(folder: Path) -> Iterator[Log | None]:
    """Open the log in a run's record; None if there is none."""
    try:
        lines = files.open_regular(folder / store.OUTPUT)
    except OSError:
        yield None
        return
    times: BinaryIO | None = None
    with suppress(OSError):
        times = files.open_regular(folder / store.TIMES)
    try:
        indexed_times = IndexedFile(times, folder / store.TIMES) if times else None
        yield Log(IndexedFile(lines, folder / store.OUTPUT), indexed_times)
    finally:
        lines.close()
        if times:
            times.close()


# --- the log -------------------------------------------------------------------------------------------------


class Span(Struct, frozen=True):
    """A line's offset, its bytes or a part of them, and its length if that is more."""

    at: int
    raw: bytes
    length: int = 0


class Log:
    """An open log: its lines, with ranks and times if they are recorded."""

    def __init__(self, lines: IndexedFile, times: IndexedFile | None) -> None:
        self._lines, self._times = lines, times

    @property
    def size(self) -> int:
        """Return the length in bytes."""
        return self._lines.size

    @property
    def whole(self) -> int:
        """Return the offset behind the last line that is complete."""
        return self._lines.start_of_line(self.size)

    def before(self, end: int, most: int, rank: int | None = None) -> Window:
        """Return the last lines before an offset, of a rank if given: then fewer if they are far apart."""
        end = min(end, self.size)
        lines: list[LogLine] = []
        begin = end
        for _ in range(1 if rank is None else MOST_PIECES):
            stop, begin = begin, self._begin(begin)
            lines = self._read(begin, stop, rank, slice(len(lines) - most, None)) + lines
            if len(lines) == most or begin == 0:
                break
        begin = lines[0].at if len(lines) == most else begin
        return Window(begin=begin, end=end, size=self.size, lines=tuple(lines))

    def after(self, begin: int, most: int, rank: int | None = None) -> Window:
        """Return the first lines from an offset on, of a rank if given: then fewer if they are far apart."""
        begin = self._lines.start_of_line(min(begin, self.size))
        lines: list[LogLine] = []
        end = begin
        for _ in range(1 if rank is None else MOST_PIECES):
            start, end = end, self._end(end)
            lines += self._read(start, end, rank, slice(most - len(lines)))
            if len(lines) == most or end == self.size:
                break
        end = self._lines.end_of_line(lines[-1].at) if len(lines) == most else end
        return Window(begin=begin, end=end, size=self.size, lines=tuple(lines))

    def between(self, begin: int, end: int, most: int) -> Window:
        """Return the last lines between two offsets, and how many are left out."""
        first = max(begin, self._begin(end)) if end - begin > PIECE else begin
        lines = self._read(first, end, None, slice(-most, None))
        skipped = lines[0].number - 1 - self._lines.number_at(begin)
        return Window(begin=lines[0].at, end=end, size=self.size, lines=tuple(lines), skipped=skipped)

    def search(self, wanted: bytes, rank: int | None) -> Iterator[LogLine]:
        """Yield the lines with these lower-case bytes, of a rank if given."""
        begin = number = 0
        while begin < self.size:
            end = self._end(begin)
            # A line that is longer is searched at its beginning.
            content = self._lines.read(begin, min(end, begin + PIECE))
            lines = content.count(b"\n") or 1
            marks: list[bytes] = []
            for place, start, at, stop in _find_all(content, wanted):
                marks = marks or self._marks(number, lines)
                first = max(start, at - BEFORE_MATCH)
                span = Span(begin + start, content[first : min(stop, first + AROUND_MATCH)])
                line = _line(number + place + 1, span, marks[place])
                if rank in (None, line.rank):
                    yield line
            begin, number = end, number + lines

    def _begin(self, stop: int) -> int:
        """Return where a piece of whole lines begins that ends at an offset; or the single line that is longer."""
        low = max(0, stop - PIECE)
        if not low:
            return 0
        newline = self._lines.read(low, stop - 1).find(b"\n") + 1
        return low + newline if newline else self._lines.start_of_line(low)

    def _end(self, start: int) -> int:
        """Return where a piece of whole lines ends that begins at an offset; or the single line that is longer."""
        high = start + PIECE
        if high >= self.size:
            return self.size
        newline = self._lines.read(start, high).rfind(b"\n") + 1
        return start + newline if newline else self._lines.end_of_line(high)

    def _read(self, begin: int, end: int, rank: int | None, kept: slice) -> list[LogLine]:
        """Return the lines of a piece, of a rank if given, and of them those that are to be kept."""
        spans = self._spans(begin, end)
        if rank is None:
            spans = spans[kept]
        if not spans:
            return []
        first = self._lines.number_at(spans[0].at)
        rows = list(zip(count(first + 1), spans, self._marks(first, len(spans)), strict=False))
        if rank is not None:
            ending = b" %d" % rank
            rows = [row for row in rows if row[2].endswith(ending)][kept]
        return [_line(*row) for row in rows]

    def _spans(self, begin: int, end: int) -> list[Span]:
        """Return the lines of a piece."""
        if end - begin > PIECE:
            return [self._long(begin, end)]
        lines = self._lines.read(begin, end).removesuffix(b"\n").split(b"\n") if end > begin else []
        places = accumulate((len(line) + 1 for line in lines), initial=begin)
        return [Span(at, line) for at, line in zip(places, lines, strict=False)]

    def _long(self, begin: int, end: int) -> Span:
        """Return a line longer than a piece: its beginning, or its end if a progress bar was drawn again there."""
        last = self._lines.read(end - LONGEST, end).removesuffix(b"\n")
        part = last if b"\r" in last else self._lines.read(begin, begin + LONGEST)
        return Span(begin, part, end - begin - 1)

    def _marks(self, number: int, lines: int) -> list[bytes]:
        """Return time and rank of lines as output.times has them; empty for those that it lacks."""
        marks: list[bytes] = []
        if self._times:
            begin, end = self._times.offset_of(number), self._times.offset_of(number + lines)
            marks = self._times.read(begin, end).split(b"\n")[:lines]
        return marks + [b""] * (lines - len(marks))


def _find_all(content: bytes, wanted: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield the lines with these lower-case bytes: how many are before, and offsets of line, match and end."""
    lowered = content.lower()
    place = counted = 0
    at = lowered.find(wanted)
    while at >= 0:
        start = content.rfind(b"\n", 0, at) + 1
        stop = content.find(b"\n", at)
        stop = len(content) if stop < 0 else stop
        place, counted = place + content.count(b"\n", counted, start), start
        yield place, start, at, stop
        at = lowered.find(wanted, stop)


def _line(number: int, span: Span, mark: bytes) -> LogLine:
    """Return a line to show, by its number, its bytes, and its time and rank as output.times has them."""
    when, _, digits = mark.partition(b" ")
    rank = int(digits) if digits.isdigit() else None
    text = display_text(span.raw, span.length)
    # The rank is shown beside it. A bar that was drawn again has no node before its last state anyway.
    text = text if rank is None else NODE.sub("", text)
    return LogLine(at=span.at, number=number, text=text, rank=rank, when=store.moment(when))
