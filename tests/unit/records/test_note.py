"""Note on a run in its record: one line, of limited length, whatever lies there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.errors import ConfigError, HostError
from labctl.records import note


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("lr halved", "lr halved"),
        ("  two\r\nlines\twith \x1b[31mred\x00 ", "two lines with [31mred"),
        ("größer, 学習率 ½ 🚀", "größer, 学習率 ½ 🚀"),
        ("\u202egnp.exe \udcff", "gnp.exe"),
        ("x" * 500, "x" * 500),
        ("学" * 500, "学" * 500),
    ],
)
def test_a_note_is_one_line_of_printable_characters(tmp_path: Path, text: str, kept: str) -> None:
    """Write a note: line breaks, control and direction characters become blanks, and it is read back."""
    assert note.write(tmp_path, text) == kept
    assert note.read(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [note.FILE]


def test_a_note_replaces_an_earlier_one_and_an_empty_one_removes_it(tmp_path: Path) -> None:
    """Write two notes, then empty ones: the last counts, and at the end there is no file."""
    note.write(tmp_path, "first")
    note.write(tmp_path, "second")
    assert note.read(tmp_path) == "second"
    for text in (" \n", ""):
        assert note.write(tmp_path, text) == ""
    assert note.read(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_is_too_long_is_refused_and_the_earlier_one_stays(tmp_path: Path) -> None:
    """Write 501 characters: ConfigError with both numbers."""
    note.write(tmp_path, "first")
    with pytest.raises(ConfigError, match="the note has 501 characters; the limit is 500"):
        note.write(tmp_path, "x" * 501)
    assert note.read(tmp_path) == "first"


def test_a_note_on_a_record_that_is_gone_names_the_file(tmp_path: Path) -> None:
    """Write a note into a directory that is not there: HostError with its path."""
    with pytest.raises(HostError, match=f"cannot write {tmp_path}/gone/{note.FILE}: No such file or directory"):
        note.write(tmp_path / "gone", "text")


@pytest.mark.parametrize(
    ("plant", "read"),
    [
        (lambda path: path.write_bytes(b"by \xff hand\nsecond"), "by \ufffd hand second"),
        (lambda path: path.write_text("x" * (1 << 20)), "x" * note.LARGEST),
        (lambda path: path.symlink_to("/etc/passwd"), ""),
        (os.mkfifo, ""),
        (Path.mkdir, ""),
    ],
)
def test_any_file_is_read_as_one_short_line(tmp_path: Path, plant: Callable[[Path], object], read: str) -> None:
    """Put another file in the note's place: a regular one is read as a line of limited length, others are none."""
    plant(tmp_path / note.FILE)
    assert note.read(tmp_path) == read


def test_a_link_in_the_place_of_a_note_is_replaced(tmp_path: Path) -> None:
    """Write a note where a link is: the link goes, and its target is as it was."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / note.FILE).symlink_to("mine")
    note.write(tmp_path, "text")
    assert (note.read(tmp_path), (tmp_path / "mine").read_text()) == ("text", "mine")
