from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from labctl import launchers
from labctl.config import hostfile, inventory, scaffold, settings
from labctl.errors import ConfigError
from labctl.workloads import loader


def content(directory: Path) -> dict[str, bytes]:
    """Return the content of all files by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_lab_directory_has_settings_hostfiles_and_workloads(tmp_path: Path) -> None:
    """Initialise a lab: .env (mode 0600), hosts.txt, hostfiles and workloads, which all parse."""
    lab = tmp_path / "new/lab"
    assert set(scaffold.initialise(lab)) == {".env", "hosts.txt", "hostfiles", "workloads"}
    assert (lab / ".env").stat().st_mode & 0o777 == 0o600
    listed, errors = loader.list_all(lab / "workloads", launchers.names())
    assert errors == ()
    assert "opt-tiny" in {workload.name for workload in listed}
    assert (lab / "workloads/common/script_exit.py").is_file()
    assert "common" not in {name for workload in listed for name in (workload.name, workload.directory.name)}
    paths = [path for path in (lab / "hostfiles").rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        assert hostfile.parse(path.read_text(), str(path))
    assert not list(lab.rglob("__pycache__"))


def test_its_settings_are_read_without_a_warning(tmp_path: Path) -> None:
    """Load the new lab's settings: no warnings, and the lab's own name."""
    scaffold.initialise(tmp_path)
    loaded = settings.load(tmp_path, {"HOME": "/home/someone"}, {})
    assert loaded.warnings == ()
    assert loaded.text("LAB_NAME") == scaffold.lab_name(tmp_path)


def test_the_list_of_hosts_is_one_once_its_examples_are_no_comments(tmp_path: Path) -> None:
    """Parse the new hosts.txt: no host; with its examples uncommented two."""
    scaffold.initialise(tmp_path)
    text = (tmp_path / "hosts.txt").read_text()
    with pytest.raises(ConfigError, match="names no host"):
        inventory.parse(text, "hosts.txt")
    assert [host.name for host in inventory.parse(re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE), "hosts.txt")] == [
        "red",
        "blue",
    ]


def test_a_second_time_writes_nothing(tmp_path: Path) -> None:
    """Initialise twice: the second time nothing is written."""
    scaffold.initialise(tmp_path)
    before = content(tmp_path)
    assert scaffold.initialise(tmp_path) == ()
    assert content(tmp_path) == before


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    """Initialise over existing files: they stay, only missing ones are written."""
    (tmp_path / ".env").write_text("LAB_NAME=mine\n")
    (tmp_path / "workloads/own").mkdir(parents=True)
    assert scaffold.initialise(tmp_path) == ("hostfiles", "hosts.txt")
    assert (tmp_path / ".env").read_text() == "LAB_NAME=mine\n"
    assert [path.name for path in (tmp_path / "workloads").iterdir()] == ["own"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    """Initialise over an empty workloads folder: it is filled."""
    (tmp_path / "workloads").mkdir()
    assert "workloads" in scaffold.initialise(tmp_path)
    assert (tmp_path / "workloads/opt/workload.yml").is_file()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """Initialise a path that is a file: ConfigError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        scaffold.initialise(tmp_path / "file")


def test_a_directory_that_cannot_be_made_is_an_error_for_people(tmp_path: Path) -> None:
    """Initialise below a file: LabError."""
    from labctl.errors import LabError

    (tmp_path / "file").write_text("")
    with pytest.raises(LabError):
        scaffold.initialise(tmp_path / "file/lab")


@pytest.mark.parametrize("name", ["lab", "My Lab!", "ü", "-", "a" * 80, "x" * 29 + "-y", "9", "a_b.c"])
def test_any_directory_gives_a_name_that_the_settings_take(tmp_path: Path, name: str) -> None:
    """Name a lab after any directory: a valid label with four hexadecimal digits."""
    chosen = scaffold.lab_name(tmp_path / name)
    settings.label(chosen)
    assert re.fullmatch(r"[a-z0-9-]+-[0-9a-f]{4}", chosen)


def test_two_directories_of_one_name_are_two_labs(tmp_path: Path) -> None:
    """Name labs of two directories of the same name: different names."""
    assert scaffold.lab_name(tmp_path / "a/lab") != scaffold.lab_name(tmp_path / "b/lab")


def test_files_are_the_persons_own_to_change(tmp_path: Path) -> None:
    """Initialise: all workload files belong to the user and are writable."""
    scaffold.initialise(tmp_path)
    for path in (tmp_path / "workloads").rglob("*"):
        assert path.stat().st_uid == os.getuid()
        assert path.stat().st_mode & 0o200
