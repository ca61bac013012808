"""The archive in which the code of a run reaches its pods."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from labctl.backends.kubernetes.packing import pack
from labctl.errors import ConfigError
from labctl.model import Copy


def copies(root: Path, *names: str) -> list[Copy]:
    """Return the copies of these files, below work/mine."""
    return [Copy(path=f"work/mine/{name}", root=root, name=name) for name in names]


def test_names_links_modes_and_bytes_are_kept(tmp_path: Path) -> None:
    """pack() keeps names, links and bytes; modes are 0755 or 0644."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/é 1+1=2 $X.py").write_bytes(b"\xff\r\n")
    (tmp_path / "go.sh").write_text("#!/bin/sh\n")
    (tmp_path / "go.sh").chmod(0o700)
    (tmp_path / "link").symlink_to("sub")
    packed = pack(copies(tmp_path, "sub/é 1+1=2 $X.py", "link", "go.sh"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {member.name: (member.mode, member.linkname) for member in archive}
        content = archive.extractfile("work/mine/sub/é 1+1=2 $X.py")
        assert content
        assert content.read() == b"\xff\r\n"
    assert members == {
        "work/mine/go.sh": (0o755, ""),
        "work/mine/link": (0o777, "sub"),
        "work/mine/sub/é 1+1=2 $X.py": (0o644, ""),
    }


def test_the_same_files_give_the_same_archive_whenever_they_were_written(tmp_path: Path) -> None:
    """pack() of the same files in another order and of another time gives the same bytes."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(name)
    first = pack(copies(tmp_path, "a.py", "b.py"))
    os.utime(tmp_path / "a.py", (1, 1))
    assert pack(copies(tmp_path, "b.py", "a.py")) == first


def test_a_file_that_is_gone_meanwhile_is_named(tmp_path: Path) -> None:
    """pack() of a missing file raises ConfigError that names it."""
    with pytest.raises(ConfigError, match=r"gone\.py: cannot be read: No such file"):
        pack(copies(tmp_path, "gone.py"))
