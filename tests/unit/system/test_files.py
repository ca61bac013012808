from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.errors import HostError
from labctl.model import File
from labctl.system import files


def mode(path: Path) -> int:
    """Return the permission bits of the file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_written_once_and_then_left_alone(tmp_path: Path) -> None:
    """Write a file twice: True, then False with the same inode and time; True for other content."""
    path = tmp_path / "a/b"
    assert files.write(path, "x") is True
    before = path.stat()
    assert files.write(path, "x") is False
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files.write(path, "y") is True
    assert path.read_text() == "y"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_modes_are_exact_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """Write files under any umask: mode 0600, or the one that was given."""
    before = os.umask(umask)
    try:
        files.write(tmp_path / "private", "x")
        files.write(tmp_path / "script", "x", 0o755)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "private"), mode(tmp_path / "script")) == (0o600, 0o755)


def test_a_wrong_mode_is_put_right(tmp_path: Path) -> None:
    """Write over a wrong mode: True, and the mode is 0600."""
    files.write(tmp_path / "key", "x")
    (tmp_path / "key").chmod(0o644)
    assert files.write(tmp_path / "key", "x") is True
    assert mode(tmp_path / "key") == 0o600


def make_huge(path: Path) -> None:
    """Make a sparse file of 1 TiB."""
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("plant", [make_huge, os.mkfifo])
def test_what_a_container_put_in_the_place_of_a_file_is_replaced_unread(
    tmp_path: Path, plant: Callable[[Path], object]
) -> None:
    """Write over a huge file or a FIFO: replaced without reading it."""
    plant(tmp_path / "image")
    assert files.write(tmp_path / "image", "sha256:x")
    assert (tmp_path / "image").read_text() == "sha256:x"


def test_a_link_is_replaced_also_where_it_leads_to_the_same(tmp_path: Path) -> None:
    """Write over a link to the same content: replaced by a file."""
    (tmp_path / "theirs").write_text("a")
    (tmp_path / "theirs").chmod(0o600)
    (tmp_path / "mine").symlink_to("theirs")
    assert files.write(tmp_path / "mine", "a")
    assert not (tmp_path / "mine").is_symlink()


def test_new_directories_are_for_their_owner_alone_and_old_ones_stay(tmp_path: Path) -> None:
    """Write below new folders: they have mode 0700, existing ones keep theirs."""
    tmp_path.chmod(0o755)
    files.write(tmp_path / "a/b/c", "x")
    assert (mode(tmp_path), mode(tmp_path / "a"), mode(tmp_path / "a/b")) == (0o755, 0o700, 0o700)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a write: HostError, the old file stays, no temporary file."""
    files.write(tmp_path / "a", "old")

    def full(descriptor: int, mode: int) -> None:
        """Raise "No space left on device"."""
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(HostError, match=r"cannot write .*/a: No space left on device"):
        files.write(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_is_made_beside_the_one_that_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the file in the same folder: a replacement is atomic only within one file system."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert files.write(tmp_path / "a", "x") is True


def test_a_path_that_cannot_be_is_an_error_for_people(tmp_path: Path) -> None:
    """Write below a file: HostError with path and hint."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError) as caught:
        files.write(tmp_path / "file/below", "x")
    assert str(tmp_path / "file") in caught.value.message
    assert caught.value.hint


def test_write_all_names_what_changed(tmp_path: Path) -> None:
    """Write several files: the paths that changed."""
    expected = (File(path="a", content="1"), File(path="d/b", content="2"))
    assert files.write_all(tmp_path, expected) == ("a", "d/b")
    assert files.write_all(tmp_path, (expected[0], File(path="d/b", content="3"))) == ("d/b",)


def test_outdated_are_missing_and_different_files_and_nothing_is_written(tmp_path: Path) -> None:
    """Ask for outdated files: missing and different ones and folders in order; nothing is written."""
    expected = tuple(File(path=name, content="x") for name in ("same", "other", "missing", "folder"))
    (tmp_path / "same").write_text("x")
    (tmp_path / "other").write_text("y")
    (tmp_path / "folder").mkdir()
    assert [file.path for file in files.outdated(tmp_path, expected)] == ["other", "missing", "folder"]
    assert not (tmp_path / "missing").exists()


def test_bytes_that_are_no_text_come_back_the_same(tmp_path: Path) -> None:
    """Write an undecodable byte: the same byte, and unchanged the second time."""
    files.write(tmp_path / "a", "x\udcff")
    assert (tmp_path / "a").read_bytes() == b"x\xff"
    assert files.write(tmp_path / "a", "x\udcff") is False
