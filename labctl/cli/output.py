"""Printing: progress and warnings to stderr, one answer to stdout as text or JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from labctl.errors import LabError, OutputClosed, OutputFailed, unwritten
from labctl.system import human

if TYPE_CHECKING:
    from labctl.cli.bar import Bar
    from labctl.model import Event, HostFailure, Progress


DEPRECATED = {
    "DoctorReport": {"fixed": "mended"},
    "Finding": {"summary": "seen", "impact": "why", "auto_fixable": "runnable"},
    "EffectiveSettings": {"resolved": "decided"},
    "ResolvedSetting": {"reason": "why"},
    "HostDevices": {"reason": "why", "warnings": "notes"},
    "DetectedDevice": {"kind": "accelerator", "leased_by": "holder"},
    "FitReport": {"items": "lines", "excluded": "not_counted", "required": "needs"},
    "MemoryItem": {"component": "part", "location": "place"},
    "training": {"mixed_precision": "mixed", "gradient_accumulation_steps": "accumulation"},
    "FitAdvice": {"required": "needs"},
    "Change": {"reason": "why"},
    "SavedBundle": {"created": "written", "excluded": "left_out"},
    "LoadedBundle": {"created": "written", "excluded": "left_out"},
    "ExcludedFile": {"path": "what", "reason": "why"},
    "WorkloadInfo": {"description": "describe", "source": "declared"},
}
"""JSON keys that are kept until schema 2: class, or key of a mapping, -> {key: deprecated key}."""


USUAL_WIDTH = 80
"""Columns of lines for what is no terminal, or one that does not know its width."""
BOLD, DIM, RED, YELLOW, PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[33m", "\033[0m"
COMMAND = re.compile(r"(^|`|&& |; )labctl (?=[a-z])(?!init|setup)")
"""Beginning of a command in a hint that acts on a lab."""
STYLE = re.compile(r"(\033\[[0-9;:]*m)")
"""Colors and the like (SGR): the escape sequences of a program that a terminal gets."""


class Output:
    """Output of a command; with ``as_json`` the answer, or error, is one JSON document.

    With ``quiet`` neither steps nor the output of runs are printed. A command goes on if nobody reads its progress, as
    after ``2>&1 | head``, unless it ``only_shows`` what others do.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, only_shows: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.directory = ""
        """The lab directory that the user named; empty if it is found from the current directory."""
        self._unread = () if only_shows else (OutputClosed, OutputFailed)
        self._bar: Bar | None = None

    def event(self, event: Event) -> None:
        """Print an event to stderr, except steps and run output if ``quiet``, and ``waiting`` if ``as_json``.

        A step is cut to the width of a terminal.
        """
        if event.kind in ("line", "step") and self.quiet:
            return
        if event.kind == "line":
            self.tell(program_text(event.text, sys.stderr, mark=color("  | ", DIM)))
        elif event.kind == "step" and sys.stderr.isatty():
            self.tell(human.shortened(printable(event.text, kept=""), width_of(sys.stderr) or USUAL_WIDTH))
        elif event.kind == "warning":
            self.tell(f"{color('warning:', YELLOW)} {printable(event.text)}")
        elif event.kind != "waiting" or not self.as_json:
            self.tell(printable(event.text))

    def begin(self, text: str) -> None:
        """Print what the command begins with to a terminal, for one that is silent for a while; not with --json."""
        if sys.stderr.isatty() and not self.as_json:
            self.tell(human.shortened(printable(f"{text} ...", kept=""), width_of(sys.stderr) or USUAL_WIDTH))

    def note(self, text: str) -> None:
        """Print a line to stderr, above the progress bar if there is one."""
        if self._bar:
            self._bar.print(text)
        else:
            write(text, sys.stderr)

    def tell(self, text: str) -> None:
        """Print a line of progress as ``note`` does; nothing if nobody reads it and the command goes on."""
        with suppress(*self._unread):
            self.note(text)

    @contextmanager
    def showing(self, progress: Callable[[], Progress], age: float, limit: float) -> Iterator[None]:
        """Show a run's progress on stderr in the block; not with --json.

        It is a bar where that can be redrawn, else, if ``quiet``, a line now and then.
        """
        if self.as_json or not (self.quiet or can_redraw(sys.stderr)):
            yield
            return
        from labctl.cli.bar import Bar, noting, progress_line, progress_text

        began = time.monotonic() - age
        if not can_redraw(sys.stderr):
            with noting(self.tell, progress, lambda now: progress_line(now, time.monotonic() - began, limit)):
                yield
            return
        bar = Bar(sys.stderr, lambda width: progress_text(progress(), time.monotonic() - began, limit, width))
        try:
            with bar as self._bar:
                yield
        finally:
            self._bar = None

    def answer(self, answer: object, text: str) -> None:
        """Print text, made printable, to stdout unless empty; with --json the answer as a JSON document."""
        shown = printable(text)
        if self.as_json:
            shown = json.dumps({"schema": 1, **to_json(answer)}, indent=2, allow_nan=False)
        if shown:
            say(shown)

    def error(self, error: LabError) -> None:
        """Print an error with its hint: to stderr, or with --json as document to stdout."""
        hint = self.typed_here(error.hint)
        if self.as_json:
            document = {"kind": error.kind, "message": error.message, "hint": hint, "node": error.node}
            say(json.dumps({"schema": 1, "error": document}, indent=2))
            return
        self.note(f"{color('error:', RED)} {printable(error.message)}")
        if hint:
            self.note(f"{color('hint:', BOLD)} {printable(hint)}")

    def typed_here(self, hint: str) -> str:
        """Return a hint whose commands name the lab directory as the user did; unchanged if it names one."""
        if not self.directory or " -C " in hint:
            return hint
        return COMMAND.sub(lambda match: f"{match[0]}-C {shlex.quote(self.directory)} ", hint)


def to_json(value: Any, kind: str = "") -> Any:
    """Convert Structs to JSON objects, old key names included, LabErrors to messages; ``kind`` is the value's key."""
    from msgspec import Struct
    from msgspec.structs import asdict

    if isinstance(value, Struct):
        kind, value = type(value).__name__, asdict(value)
    if isinstance(value, Mapping):
        document = {key: to_json(item, key) for key, item in value.items()}
        return document | {old: document[key] for key, old in DEPRECATED.get(kind, {}).items() if key in document}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value.message if isinstance(value, LabError) else value


def say(text: str) -> None:
    """Print text to stdout. OutputClosed if the reader is gone."""
    write(text, sys.stdout)


def say_printed(text: str) -> None:
    """Print a program's output to stdout, made safe for a terminal. OutputClosed if the reader is gone."""
    say(program_text(text, sys.stdout))


def write(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print text and ``end`` in one flushed write. OutputClosed if the reader is gone, OutputFailed on a full disk.

    Later writes are dropped then.
    """
    try:
        print(f"{text}{end}", end="", file=stream, flush=True)
    except OSError as error:
        # Flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise unwritten(error) from error


def can_redraw(stream: TextIO) -> bool:
    """Tell if the stream is a terminal with a movable cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def width_of(stream: TextIO) -> int:
    """Return the columns that the terminal of a stream has now; 0 if it is none, or one that does not know them."""
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns
    return 0


def color(text: str, code: str) -> str:
    """Wrap text in a color escape code if stderr has colors; else return it unchanged."""
    return f"{code}{text}{PLAIN}" if has_colors(sys.stderr) else text


def has_colors(stream: TextIO) -> bool:
    """Tell if output to a stream is colored: to a terminal; NO_COLOR and FORCE_COLOR turn it off or on."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def printable(text: str, kept: str = "\n\t") -> str:
    """Replace control characters by ``?``, except the ``kept`` ones."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if is_safe(character, kept) else "?" for character in text)


def is_safe(character: str, kept: str) -> bool:
    """Tell if a character is printable, a non-ASCII blank, or one of the ``kept``."""
    # isprintable() is False for blanks of other scripts.
    blank = character.isspace() and character > "\x9f"
    return character.isprintable() or character in kept or blank


def program_text(text: str, stream: TextIO, mark: str = "") -> str:
    """Return output for a terminal, a mark before each line, no escapes but colors; unchanged for other streams."""
    if not stream.isatty():
        return text
    return "\n".join(mark + shown_line(line, mark) for line in text.split("\n"))


def shown_line(line: str, mark: str = "") -> str:
    """Return a line without escapes but colors, reset at its end, and with the mark after each ``\\r``."""
    if line.isascii() and line.isprintable():
        return line
    parts = STYLE.split(line)
    parts[::2] = (printable(part, "\t\r").replace("\r", f"\r{mark}") for part in parts[::2])
    return "".join(parts) + (PLAIN if len(parts) > 1 else "")


def failure_lines(failed: Iterable[HostFailure]) -> list[str]:
    """Render each host's failure, with its name if the message lacks it, and its hint on the next line."""
    lines = []
    for failure in failed:
        # Most messages begin with the name of the host already.
        named = failure.message.startswith(failure.host)
        lines.append(failure.message if named else f"{failure.host}: {failure.message}")
        lines += [f"  {failure.hint}"] if failure.hint else []
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render a table with left-aligned columns, two spaces apart."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def fitted(columns: Mapping[str, Sequence[str]], width: int, dispensable: Iterable[str] = ()) -> str:
    """Render a table of the columns that have a text, by head, in ``width`` characters; whole if that is 0.

    If it is wider, the ``dispensable`` columns are left out in turn; then its lines are cut.
    """
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    for head in ("", *dispensable):
        shown.pop(head, None)
        text = table(list(shown), zip(*shown.values(), strict=True))
        if not width or max(map(len, text.splitlines()), default=0) <= width:
            return text
    return cut(text, width)


def cut(text: str, width: int) -> str:
    """Cut the lines of a text to ``width`` characters, unless that is 0."""
    return "\n".join(human.shortened(line, width) for line in text.split("\n")) if width else text


def wrap(text: str, width: int, indent: str = "  ", further: str | None = None) -> list[str]:
    """Wrap a text without cutting words; ``further`` is the indent of all lines but the first, if it is another."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrapped(line: str, width: int, indent: int) -> str:
    """Break a line between words at ``width`` characters, unless that is 0; paths stay whole."""
    return "\n".join(wrap(line, width, "", " " * indent)) if width else line
