"""Which directory a command takes for the lab's, and whose it may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labctl.config.context import find_lab
from labctl.errors import ConfigError

OTHER = 12345


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """A directory two levels below one with a .env of a lab."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path / "a/b"


def give_away(path: Path, uid: int = OTHER) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.lchown(path, uid, uid)


def test_the_nearest_directory_with_a_labs_settings_is_the_labs(inner: Path, tmp_path: Path) -> None:
    (inner / ".env").write_text("A=1\n")
    assert find_lab(inner, {}) == tmp_path
    (inner / ".env").write_text("export LAB_NAME=x\n")
    assert find_lab(inner, {}) == inner


def test_without_one_it_is_the_directory_itself(tmp_path: Path) -> None:
    assert find_lab(tmp_path, {}) == tmp_path


@pytest.mark.parametrize("here", ["", "a/b"])
def test_settings_of_somebody_else_are_not_taken(inner: Path, tmp_path: Path, here: str) -> None:
    """Who may write above me, as in /tmp, would say in which containers and on which hosts my command runs."""
    give_away(tmp_path / ".env")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/\.env belongs to .*12345, and you are ") as caught:
        find_lab(tmp_path / here, {})
    assert f"-C {tmp_path}" in caught.value.hint


def test_a_link_of_somebody_else_to_my_settings_is_not_taken(inner: Path, tmp_path: Path) -> None:
    (tmp_path / "a/.env").symlink_to(tmp_path / ".env")
    give_away(tmp_path / "a/.env")
    with pytest.raises(ConfigError, match=r"a/\.env belongs to"):
        find_lab(inner, {})


def test_other_files_of_that_name_are_passed_over_whosever_they_are(inner: Path, tmp_path: Path) -> None:
    (inner / ".env").write_text("A=1\n")
    give_away(inner / ".env")
    os.mkfifo(tmp_path / "a/.env")
    assert find_lab(inner, {}) == tmp_path


def test_roots_settings_are_taken_and_under_sudo_those_of_its_caller(
    inner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(tmp_path / ".env")
    assert find_lab(inner, {"SUDO_UID": str(OTHER)}) == tmp_path
    give_away(tmp_path / ".env", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: OTHER)
        assert find_lab(inner, {}) == tmp_path
    give_away(tmp_path / ".env", OTHER + 1)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    with pytest.raises(ConfigError, match="belongs to"):
        find_lab(inner, {"SUDO_UID": str(OTHER + 1)})
