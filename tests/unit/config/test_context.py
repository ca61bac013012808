"""Lab directory of a command, its allowed owners, and the image that a workload gave the lab."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labctl.config.context import Context, find_lab, require_initialised, require_named
from labctl.errors import ConfigError

OTHER = 12345


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """Write a lab's .env to tmp_path; return a directory two levels below it."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path / "a/b"


def give_away(path: Path, uid: int = OTHER) -> None:
    """Give the file to this user; skip the test unless run by root."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.lchown(path, uid, uid)


def test_the_nearest_directory_with_a_labs_settings_is_the_labs(inner: Path, tmp_path: Path) -> None:
    """Find the lab upwards: the nearest .env with a LAB_ key."""
    (inner / ".env").write_text("A=1\n")
    assert find_lab(inner, {}) == tmp_path
    (inner / ".env").write_text("export LAB_NAME=x\n")
    assert find_lab(inner, {}) == inner


def test_a_byte_order_mark_hides_no_lab(inner: Path) -> None:
    """Find a lab whose .env begins with a byte order mark, as Windows editors write it: found."""
    (inner / ".env").write_text("\ufeffLAB_NAME=x\r\n")
    assert find_lab(inner, {}) == inner


def test_without_one_it_is_the_directory_itself(tmp_path: Path) -> None:
    """Find the lab where no .env is: the directory itself."""
    assert find_lab(tmp_path, {}) == tmp_path


@pytest.mark.parametrize("here", ["", "a/b"])
def test_settings_of_somebody_else_are_not_taken(inner: Path, tmp_path: Path, here: str) -> None:
    """Find a .env of another user: ConfigError names owner and reader, the hint has -C.

    A user who can write above a directory, as in /tmp, could choose containers and hosts otherwise.
    """
    give_away(tmp_path / ".env")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/\.env belongs to .*12345, and you are ") as caught:
        find_lab(tmp_path / here, {})
    assert f"-C {tmp_path}" in caught.value.hint


def test_a_link_of_somebody_else_to_my_settings_is_not_taken(inner: Path, tmp_path: Path) -> None:
    """Find a link of another user to a .env: ConfigError."""
    (tmp_path / "a/.env").symlink_to(tmp_path / ".env")
    give_away(tmp_path / "a/.env")
    with pytest.raises(ConfigError, match=r"a/\.env belongs to"):
        find_lab(inner, {})


def test_other_files_of_that_name_are_passed_over_whosever_they_are(inner: Path, tmp_path: Path) -> None:
    """Find the lab past .env files of other programs and past a FIFO: the lab upwards."""
    (inner / ".env").write_text("A=1\n")
    give_away(inner / ".env")
    os.mkfifo(tmp_path / "a/.env")
    assert find_lab(inner, {}) == tmp_path


def test_roots_settings_are_taken_and_under_sudo_those_of_its_caller(
    inner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Find a .env of root, or of the user behind sudo: taken; of a third user: ConfigError."""
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


# --- the image of a workload ---------------------------------------------------------------------------------


def at(directory: Path, **flags: str) -> Context:
    """Return a Context of this directory with these flags."""
    return Context(directory=directory, environ={}, emit=lambda _: None, flags=flags)


def test_what_a_workload_made_of_the_image_holds_until_it_is_forgotten_or_the_settings_change(tmp_path: Path) -> None:
    """Keep a workload's image: it overrides .env but no flag, until .env changes that key or it is forgotten."""
    env = tmp_path / ".env"
    env.write_text("LAB_NAME=demo\nLAB_PACKAGES=nltk\n")
    used = at(tmp_path).settings().with_value("LAB_IMAGE", "labctl/horovod", "workload mnist")
    at(tmp_path).keep_image(used.with_value("LAB_PACKAGES", "nltk einops", "workload mnist"))
    loaded = at(tmp_path).settings()
    assert (loaded.text("LAB_IMAGE"), loaded.origin("LAB_IMAGE")) == ("labctl/horovod", "workload mnist")
    assert loaded.text("LAB_PACKAGES") == "nltk einops"
    assert at(tmp_path, LAB_IMAGE="mine:1").settings().text("LAB_IMAGE") == "mine:1"
    at(tmp_path).keep_image(loaded)
    assert at(tmp_path).settings().text("LAB_IMAGE") == "labctl/horovod", "`up` again"
    env.write_text("LAB_NAME=demo\nLAB_PACKAGES=sacrebleu\n")
    assert at(tmp_path).settings().text("LAB_PACKAGES") == "sacrebleu"
    assert at(tmp_path).settings().text("LAB_IMAGE") == "labctl/horovod"
    at(tmp_path).forget_image()
    assert at(tmp_path).settings().text("LAB_IMAGE") == ""
    at(tmp_path).forget_image()


def test_a_directory_without_settings_is_no_lab(tmp_path: Path) -> None:
    """Require an initialised lab where no .env is: ConfigError as of any other command, `labctl init` in its hint."""
    with pytest.raises(ConfigError) as caught:
        require_initialised(at(tmp_path))
    with pytest.raises(ConfigError) as other:
        require_named(at(tmp_path), at(tmp_path).settings())
    assert (caught.value.message, caught.value.hint) == (other.value.message, other.value.hint)
    assert "`labctl init mylab` creates one" in caught.value.hint


def test_outside_a_lab_nobodys_lab_is_meant(tmp_path: Path) -> None:
    """Require a lab's name without .env: ConfigError, unless LAB_NAME is in the environment."""
    with pytest.raises(ConfigError, match=r"is not a lab directory \(no \.env\)"):
        require_named(at(tmp_path), at(tmp_path).settings())
    named = Context(directory=tmp_path, environ={"LAB_NAME": "mine"}, emit=lambda _: None, flags={})
    require_named(named, named.settings())
