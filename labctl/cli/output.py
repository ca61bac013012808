"""The only printer: progress and warnings to stderr, one answer to stdout as a table for people or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from labctl.errors import LabError, OutputClosed

if TYPE_CHECKING:
    from labctl.model import Event


BOLD, DIM, RED, GREEN, YELLOW, PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"


class Output:
    """Where a command's words go; ``as_json`` makes the answer, errors included, one JSON document."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def event(self, event: Event) -> None:
        """Progress, as it happens."""
        if event.kind == "line":
            self.note(f"{DIM}  | {PLAIN}{event.text}" if sys.stderr.isatty() else event.text)
        elif event.kind == "warning":
            self.note(f"{color('warning:', YELLOW)} {event.text}")
        elif event.kind != "waiting" or not self.as_json:
            self.note(event.text)

    def note(self, text: str) -> None:
        write(text, sys.stderr)

    def answer(self, document: dict[str, Any], text: str) -> None:
        """The command's answer: the document with --json, else the text."""
        shown = json.dumps({"schema": 1, **document}, indent=2, allow_nan=False) if self.as_json else text
        if shown:
            say(shown)

    def error(self, error: LabError) -> None:
        """What went wrong and what to type next."""
        if self.as_json:
            document = {"kind": error.kind, "message": error.message, "hint": error.hint, "node": error.node}
            say(json.dumps({"schema": 1, "error": document}, indent=2))
            return
        self.note(f"{color('error:', RED)} {error.message}")
        if error.hint:
            self.note(f"{color('hint:', BOLD)} {error.hint}")


def say(text: str) -> None:
    """Plain text for stdout. Unread as ``write``."""
    write(text, sys.stdout)


def write(text: str, stream: TextIO) -> None:
    """The text and its line end, in one piece: hosts are worked on side by side. Unread where nobody reads it."""
    try:
        print(f"{text}\n", end="", file=stream, flush=True)
    except BrokenPipeError as error:
        # What is left in the buffer would fail once more as Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise OutputClosed("nobody reads what labctl prints") from error


def color(text: str, code: str) -> str:
    """Text in a color where stderr is a terminal."""
    return f"{code}{text}{PLAIN}" if sys.stderr.isatty() else text


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, two blanks apart."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(lines)


def quantity(value: object) -> str:
    """A number with as many digits as people read."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def result_text(result: dict[str, Any], files: Path) -> str:
    """A run's result as a person reads it, and where its files are."""
    rows = [("run", result["run_id"])]
    for name, value in result["metrics"].items():
        unit = f" {value['unit']}" if value.get("unit") else ""
        if "first" in value:
            rows.append((name, f"{quantity(value['first'])} -> {quantity(value['last'])}{unit}"))
        else:
            rows.append((name, f"{quantity(value['value'])}{unit}"))
    where = ", ".join(f"{rank['rank']} on {rank['node']}" for rank in result["ranks"][:8])
    if result["ranks"]:
        rows.append(("ranks", f"{result['world_size']} ({where}{', ...' if len(result['ranks']) > 8 else ''})"))
        rows.append(("seconds", quantity(result["seconds"])))
    cause = f" ({result['cause']})" if result["cause"] else ""
    rows.append(("verdict", f"{result['verdict']}{cause}: {result['message']}"))
    if result["cause"] == "node-lost":
        rows.append(("next", "`labctl up` makes the node anew"))
    rows.append(("files", str(files)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}} {text}" for name, text in rows)
