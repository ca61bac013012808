"""Note of a person on a run, a line of text in its record."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.system import files

# Workloads write files of their own named note.txt.
FILE = "labctl-note.txt"
LONGEST = 500
"""Characters of a note at most."""
LARGEST = 8192
"""Bytes that are read of the file at most."""


class RunNote(Struct, frozen=True):
    """A run's note, empty if it has none, and the earlier one that a new one replaced."""

    run_id: str
    note: str
    replaced: str = ""


def read(record: str | Path) -> str:
    """Return the note in a run's record; empty without one."""
    try:
        with files.open_regular(f"{record}/{FILE}") as stream:
            content = stream.read(LARGEST)
    except OSError:
        return ""
    return _one_line(content.decode("utf-8", "replace"))


def write(record: Path, text: str) -> str:
    """Replace the note in a run's record, or remove it if the text is empty; return it as one line.

    ConfigError if it is longer than LONGEST, HostError if it cannot be written.
    """
    note = _one_line(text)
    if len(note) > LONGEST:
        hint = "shorten it, or write the text to a file and note its path"
        raise ConfigError(f"the note has {len(note):,} characters; the limit is {LONGEST}", hint=hint)
    with files.writing(record / FILE), files.opened(record) as folder:
        if note:
            files.replace_in(folder, FILE, [f"{note}\n".encode()], 0o644)
        else:
            with suppress(FileNotFoundError):
                os.unlink(FILE, dir_fd=folder)
    return note


def _one_line(text: str) -> str:
    """Return a text with a single blank for line breaks, control characters and blanks."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
