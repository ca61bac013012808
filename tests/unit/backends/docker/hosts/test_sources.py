"""Clones, data and cached models of a host, read by the real script from fictitious directories."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from labctl.backends.docker.hosts import sources
from labctl.backends.docker.hosts.sources import Kind
from labctl.backends.docker.hosts.ssh import LocalConnection


def git(clone: Path, *arguments: str) -> str:
    """Run git in this clone with a test identity; return its stripped stdout."""
    identity = ("-c", "user.name=ann", "-c", "user.email=ann@example.org")
    done = subprocess.run(["git", "-C", str(clone), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a clone with a script and a library, all committed; return it."""
    path = tmp_path / "clone"
    (path / "library").mkdir(parents=True)
    (path / "train.py").write_text("print(1)\n")
    (path / "library/tools.py").write_text("x = 1\n")
    (path / ".gitignore").write_text("*.log\n")
    git(path, "init", "--quiet")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "--message", "first")
    return path


def value(kind: Kind, path: Path) -> str | None:
    """Return what the script of sources says of this path, None if nothing."""
    return sources.read(LocalConnection(), [(kind, str(path))], 30).get((kind, str(path)))


def test_a_clean_clone_is_known_by_its_commit(clone: Path) -> None:
    """A clone with only an ignored file besides is its commit."""
    (clone / "run.log").write_text("ignored\n")
    assert value("code", clone) == git(clone, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["train.py", "untracked.py"])
def test_a_clone_that_differs_from_its_commit_says_so_where_that_is(clone: Path, name: str) -> None:
    """A clone with a changed or new file is its commit and ` changed`; a clean folder in it is the commit alone."""
    (clone / name).write_text("print(2)\n")
    commit = git(clone, "rev-parse", "HEAD")
    assert value("code", clone) == f"{commit} changed"
    assert value("code", clone / "library") == commit


def test_what_is_in_no_repository_has_no_commit(tmp_path: Path) -> None:
    """A path in no repository, or that does not exist, is None."""
    assert value("code", tmp_path) is None
    assert value("code", tmp_path / "nowhere") is None


def test_no_program_that_a_clone_names_is_run(clone: Path, tmp_path: Path) -> None:
    """Filters and fsmonitor of a clone's git configuration are not run."""
    mark = tmp_path / "mark"
    git(clone, "config", "filter.own.clean", f"touch {mark}; cat")
    git(clone, "config", "core.fsmonitor", f"touch {mark}; false")
    (clone / ".git/info/attributes").write_text("* filter=own\n")
    (clone / "train.py").write_text("print(2)\n")
    assert str(value("code", clone)).endswith(" changed")
    assert not mark.exists()


def test_a_work_tree_of_another_clone_is_read_as_well(clone: Path, tmp_path: Path) -> None:
    """A worktree of a clone is its commit."""
    git(clone, "worktree", "add", "--quiet", str(tmp_path / "other"))
    assert value("code", tmp_path / "other/library") == git(clone, "rev-parse", "HEAD")


def test_data_are_known_by_content_and_names(tmp_path: Path) -> None:
    """Data of a file is its SHA-256; of a folder it changes with names and content; a missing path is None."""
    file, folder = tmp_path / "corpus.txt", tmp_path / "images of dogs"
    file.write_text("to be or not to be\n")
    folder.mkdir()
    (folder / "1.png").write_text("one")
    assert value("data", file) == hashlib.sha256(file.read_bytes()).hexdigest()
    first = value("data", folder)
    (folder / "1.png").rename(folder / "2.png")
    renamed = value("data", folder)
    (folder / "2.png").write_text("two")
    assert len({first, renamed, value("data", folder)}) == 3
    assert value("data", tmp_path / "nowhere") is None


def test_the_newest_revision_of_a_cached_repository_is_the_one_that_runs_read(tmp_path: Path) -> None:
    """Of two snapshots the later modified one is returned; a folder without snapshots is None."""
    for age, revision in enumerate(("newer", "older")):
        (tmp_path / "snapshots" / revision).mkdir(parents=True)
        os.utime(tmp_path / "snapshots" / revision, (1_000_000 - age, 1_000_000 - age))
    assert value("snapshot", tmp_path) == "newer"
    assert value("snapshot", tmp_path / "snapshots") is None
