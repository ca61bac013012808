"""Files of a clone that are sent to hosts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import builders
from support.nearby import Nearby

from labctl import naming
from labctl.backends.docker.deploy import clones
from labctl.backends.docker.hosts import push
from labctl.errors import ConfigError
from labctl.model import Lab, Mount


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a git work tree with tracked, untracked and ignored files; return it."""
    root = tmp_path / "DeepSpeedExamples"
    for name in ("training/main.py", "training/run.sh", "notes.txt", "data/big.bin", "gone.py", "moved/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("data/\n")
    (root / "training/run.sh").chmod(0o755)
    (root / "latest").symlink_to("training")
    git(root, "init", "-q")
    git(root, "add", "training", ".gitignore", "gone.py", "latest", "moved")
    return root


def git(root: Path, *arguments: str) -> None:
    """Run git in this directory; raise CalledProcessError if it fails."""
    subprocess.run(["git", "-C", root, *arguments], check=True)


def names(root: Path) -> set[str]:
    """Return the paths of all files and links that would be sent of a clone."""
    return {entry.path for entry in clones.read(root).entries if entry.kind != "dir"}


TRACKED = {".gitignore", "training/main.py", "training/run.sh", "latest", "moved/x.py", "gone.py"}


def test_what_git_tracks_is_sent_as_it_is_in_the_working_tree(clone: Path) -> None:
    """Only tracked files are read, with edits that are not committed and without removed ones."""
    before = clones.read(clone)
    assert names(clone) == TRACKED
    (clone / "training/main.py").write_text("edited, and not committed")
    (clone / "gone.py").unlink()
    assert names(clone) == TRACKED - {"gone.py"}
    changed = {entry.path for entry in set(clones.read(clone).entries) ^ set(before.entries)}
    assert changed == {"training/main.py", "gone.py"}


def test_what_has_the_place_of_a_tracked_folder_or_file_now_is_not_sent(clone: Path) -> None:
    """A tracked folder replaced by a link, or a file replaced by a folder, is not read."""
    shutil.rmtree(clone / "moved")
    (clone / "moved").symlink_to("data")
    (clone / "gone.py").unlink()
    (clone / "gone.py").mkdir()
    (clone / "gone.py/private").write_text("")
    assert names(clone) == TRACKED - {"moved/x.py", "gone.py"}


def test_a_directory_in_no_repository_is_sent_whole(clone: Path) -> None:
    """Without .git all files of the directory are read."""
    shutil.rmtree(clone / ".git")
    assert names(clone) == {*TRACKED, "notes.txt", "data/big.bin"}


def test_submodules_come_along(clone: Path, tmp_path: Path) -> None:
    """Files of a submodule are read, without its .git."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "module.py").write_text("")
    git(other, "init", "-q")
    git(other, "add", "module.py")
    git(other, "-c", "user.name=ann", "-c", "user.email=ann@desk", "commit", "-q", "-m", "first")
    git(clone, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "deps")
    assert names(clone) >= {"deps/module.py", ".gitmodules"}
    assert not any(name.startswith("deps/.git") for name in names(clone))


def test_a_clone_that_is_too_large_says_how_large_and_what_to_do(clone: Path) -> None:
    """Tracked files of 312 MB raise ConfigError with the size and what to do; untracked they are not read."""
    with (clone / "training/main.py").open("wb") as large:
        large.truncate(312_000_000)
    with pytest.raises(ConfigError, match=f"{clone} holds 312 MB without .git, and .* at most 200 MB") as caught:
        clones.read(clone)
    assert "clone it on each host at that path" in caught.value.hint
    git(clone, "rm", "-q", "-f", "--cached", "training/main.py")
    assert "training/main.py" not in names(clone)


def lab_with(clone: Path, directory: str) -> Lab:
    """Return a lab on host red with this directory there, which mounts the clone and sends it."""
    host = builders.host(name="red", home="/home/ann", directory=directory)
    mounts = (Mount(source=str(clone), target="/workspace/DeepSpeedExamples", read_only=True),)
    return builders.lab(hosts=(host,), mounts=mounts, clones=((str(clone), "clones/DeepSpeedExamples"),))


def test_a_host_mounts_what_it_was_sent_and_one_that_shares_the_lab_the_clone_itself(clone: Path) -> None:
    """path_on() is the sent copy on a host with a directory of its own, else the clone itself."""
    lab = lab_with(clone, "/home/ann/.labctl/demo.red")
    assert naming.path_on(lab, lab.hosts[0], str(clone)) == "/home/ann/.labctl/demo.red/clones/DeepSpeedExamples"
    assert naming.path_on(lab, lab.hosts[0], f"{clone}/data") == f"{clone}/data"
    shared = lab_with(clone, "")
    assert naming.path_on(shared, shared.hosts[0], str(clone)) == str(clone)


def test_an_unchanged_clone_is_not_sent_again(clone: Path, tmp_path: Path) -> None:
    """A second push sends nothing; after an edit it sends that file alone."""
    lab, host = lab_with(clone, str(tmp_path / "red")), Nearby()
    sent = push.push(host, str(tmp_path / "red"), clones.scan(lab))
    assert "clones/DeepSpeedExamples/training/main.py" in sent
    assert (tmp_path / "red/clones/DeepSpeedExamples/latest/main.py").read_text() == "training/main.py"
    assert push.push(host, str(tmp_path / "red"), clones.scan(lab)) == ()
    (clone / "training/main.py").write_text("edited")
    assert push.push(host, str(tmp_path / "red"), clones.scan(lab)) == ("clones/DeepSpeedExamples/training/main.py",)
