"""Outputs of a run, moved into its record despite other processes in the same directory."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from labctl.records import outputs


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Create the outputs' and the record's folder of run r1; return that of the outputs."""
    path = tmp_path / "runs/.outputs/r1"
    path.mkdir(parents=True)
    record(path).mkdir()
    return path


def record(written: Path) -> Path:
    """Return the record's folder of these outputs."""
    return written.parents[1] / written.name


def tree(path: Path) -> dict[str, str]:
    """Map each path below a directory to a file's content, a link's target, or "" for a folder."""

    def holds(entry: Path) -> str:
        return f"-> {entry.readlink()}" if entry.is_symlink() else "" if entry.is_dir() else entry.read_text()

    return {str(entry.relative_to(path)): holds(entry) for entry in sorted(path.rglob("*"))}


def test_files_folders_and_inner_links_are_moved(written: Path) -> None:
    """Move files, folders and inner links: all are in the record with their modes, a second move does nothing."""
    (written / "model/step-2").mkdir(parents=True)
    (written / "model/step-2/weights").write_text("1")
    (written / "model/latest").symlink_to("step-2")
    (written / "metrics.csv").write_text("loss,1")
    (written / "metrics.csv").chmod(0o640)
    assert outputs.move(written, record(written)).stayed == []
    assert tree(record(written)) == {
        "metrics.csv": "loss,1",
        "model": "",
        "model/latest": "-> step-2",
        "model/step-2": "",
        "model/step-2/weights": "1",
    }
    assert (record(written) / "metrics.csv").stat().st_mode & 0o777 == 0o640
    assert not written.exists()
    assert outputs.move(written, record(written)).stayed == []


@pytest.mark.parametrize(
    ("mode", "kept"),
    [(0o4755, 0o755), (0o6775, 0o775), (0o1644, 0o644), (0o666, 0o664), (0o7777, 0o775), (0o600, 0o600), (0, 0)],
)
def test_a_file_in_the_record_is_neither_setuid_nor_writable_by_others(written: Path, mode: int, kept: int) -> None:
    """Move a file with special modes: without setuid and write permission for others; folders are 0700."""
    (written / "model").mkdir()
    (written / "model").chmod(0o2777)
    (written / "model/tool").touch()
    (written / "model/tool").chmod(mode)
    assert outputs.move(written, record(written)).stayed == []
    assert (record(written) / "model/tool").stat().st_mode & 0o7777 == kept
    assert (record(written) / "model").stat().st_mode & 0o7777 == 0o700


def test_a_setuid_file_of_another_user_stays(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse chmod of a setuid file: it stays, with the reason."""

    def refuse(path: str, mode: int, *, dir_fd: int) -> None:
        """Raise PermissionError."""
        raise PermissionError(1, "Operation not permitted")

    (written / "tool").touch()
    (written / "tool").chmod(0o4755)
    monkeypatch.setattr(os, "chmod", refuse)
    assert outputs.move(written, record(written)).stayed == ["tool: Operation not permitted"]
    assert tree(record(written)) == {}


def test_what_the_record_has_is_kept(written: Path) -> None:
    """Move files whose names the record has: equal ones are dropped, others go to hosts/ or stay."""
    large = "x" * 2 * outputs.SAME
    for name, ours, theirs in (("hostfile", "a", "a"), ("result.json", "FAIL", "PASS"), ("plan.txt", large, large)):
        (record(written) / name).write_text(ours)
        (written / name).write_text(theirs)
    (written / "job.json").mkdir()
    (written / "job.json/x").write_text("x")
    (record(written) / "job.json").write_text("{}")
    moved = outputs.move(written, record(written))
    assert sorted(moved.stayed) == ["job.json: Not a directory", "plan.txt"]
    assert tree(record(written)) == {
        "hostfile": "a",
        "hosts": "",
        "hosts/local": "",
        "hosts/local/result.json": "PASS",
        "job.json": "{}",
        "plan.txt": large,
        "result.json": "FAIL",
    }
    assert sorted(tree(written)) == ["job.json", "job.json/x", "plan.txt"]


def test_what_is_no_file_of_a_run_stays(written: Path, tmp_path: Path) -> None:
    """Move FIFOs, sockets and links that lead out: they stay and are named."""
    os.mkfifo(written / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(written / "socket"))
    (written / "home").symlink_to(tmp_path)
    (written / "up").symlink_to("../other")
    (written / "late").symlink_to("a/../../b")
    (written / "loss").write_text("1")
    assert sorted(outputs.move(written, record(written)).stayed) == ["home", "late", "pipe", "socket", "up"]
    assert tree(record(written)) == {"loss": "1"}


@pytest.mark.parametrize("where", ["written", "record", "folder"])
def test_no_link_in_place_of_a_folder_is_followed(written: Path, tmp_path: Path, where: str) -> None:
    """Put a link in place of a folder: nothing is read or written through it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "keys").write_text("mine")
    (written / "ranks").mkdir()
    (written / "ranks/keys").write_text("theirs")
    if where == "written":
        written.rename(tmp_path / "away")
        written.symlink_to(home)
    elif where == "record":
        record(written).rmdir()
        record(written).symlink_to(home)
    else:
        (record(written) / "ranks").symlink_to(home)
    assert outputs.move(written, record(written)).stayed
    assert tree(home) == {"keys": "mine"}


def test_no_more_than_so_many_files_and_folders_are_moved(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move 30 files with a limit of 20: ten stay."""
    monkeypatch.setattr(outputs, "MOST_FILES", 20)
    for number in range(30):
        (written / f"{number:02}").write_text("")
    assert len(outputs.move(written, record(written)).stayed) == 1
    assert (len(list(record(written).iterdir())), len(list(written.iterdir()))) == (20, 10)


def test_folders_within_each_other_without_end_stay(written: Path) -> None:
    """Move folders nested too deep: the rest stays and is named."""
    deep = written
    for _ in range(outputs.MOST_FOLDERS + 40):
        deep /= "d"
        deep.mkdir()
    (deep / "loss").write_text("1")
    (stayed,) = outputs.move(written, record(written)).stayed
    assert stayed.split("/") == ["d"] * (outputs.MOST_FOLDERS + 1)
    assert (deep / "loss").exists()


@pytest.mark.parametrize("attempt", range(50))
def test_what_is_changed_for_a_link_meanwhile_reaches_nothing_else(written: Path, tmp_path: Path, attempt: int) -> None:
    """Swap files for links during the move: nothing outside changes, and no link is in the record.

    A process that outlives the run could do so.
    """
    home = tmp_path / "home"
    (home / "inner").mkdir(parents=True)
    (home / "keys").write_text("mine")
    (home / "inner/keys").write_text("mine")
    before = tree(home)
    for number in range(20):
        (written / f"folder-{number}").mkdir()
        (written / f"folder-{number}/keys").write_text("theirs")
        (written / f"file-{number}").write_text("theirs")
    end = threading.Event()

    def change() -> None:
        """Replace folders and files by links until the end."""
        number = attempt
        while not end.is_set():
            number = (number + 7) % 20
            for name, target in ((f"folder-{number}", home / "inner"), (f"file-{number}", home / "keys")):
                try:
                    (written / name).rename(tmp_path / f"{name}-was")
                    (written / name).symlink_to(target)
                except OSError:
                    continue

    thread = threading.Thread(target=change)
    thread.start()
    try:
        outputs.move(written, record(written))
    finally:
        end.set()
        thread.join()
    assert tree(home) == before
    assert not [path for path in record(written).rglob("*") if path.is_symlink()]
    assert {path.read_text() for path in record(written).rglob("*") if path.is_file()} <= {"theirs"}


@pytest.mark.parametrize("name", ["result.json", "output.log", "started", "run.lock", "labctl-note.txt"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_has_a_name_that_labctl_alone_writes_is_moved_aside(written: Path, name: str, kind: str) -> None:
    """Move outputs with names of labctl's own records: into hosts/local, at the top alone."""
    if kind == "file":
        (written / name).write_text('{"verdict": "PASS"}')
    elif kind == "folder":
        (written / name).mkdir()
        (written / name / "x").write_text("kept")
    else:
        (written / name).symlink_to("deep")
    (written / "deep").mkdir()
    (written / "deep" / name).write_text("kept")
    moved = outputs.move(written, record(written))
    assert (moved.aside, moved.stayed) == ([f"hosts/local/{name}"], [])
    assert not os.path.lexists(record(written) / name)
    assert os.path.lexists(record(written) / "hosts/local" / name)
    assert (record(written) / "deep" / name).read_text() == "kept"
    assert not written.exists()


def test_what_is_moved_aside_follows_no_link(written: Path, tmp_path: Path) -> None:
    """Make the record's hosts a link: the file stays, and nothing is written through it."""
    (tmp_path / "home").mkdir()
    (record(written) / "hosts").symlink_to(tmp_path / "home")
    (written / "result.json").write_text("{}")
    moved = outputs.move(written, record(written))
    assert (moved.aside, moved.stayed) == ([], ["result.json: Not a directory"])
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("long", ["f", "f" * 250])
def test_a_file_that_becomes_a_link_at_the_last_moment_does_not_come(
    written: Path, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    """Replace a file by a link after it was checked: it stays."""
    (written / "d").mkdir()
    (written / "d" / long).write_text("x")
    looked: list[str] = []
    fits = outputs._fits

    def late(name: str, folder: int, path: str) -> bool:
        """Check the file as before, then replace it by a link once."""
        fitting = fits(name, folder, path)
        if path == f"d/{long}" and not looked:
            (written / "d" / long).unlink()
            (written / "d" / long).symlink_to("/etc")
        looked.append(name)
        return fitting

    monkeypatch.setattr(outputs, "_fits", late)
    assert outputs.move(written, record(written)).stayed == [f"d/{long}"]
    assert tree(record(written)) == {"d": ""}
