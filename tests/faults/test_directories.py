"""Directories as people have them: with odd names, read-only, closed, full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab

from docker import DockerClient

pytestmark = pytest.mark.docker


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system at a new directory, until the test ends."""
    if os.geteuid():
        pytest.skip("to mount a file system takes root")
    made: list[Path] = []

    def mount(*words: str) -> Path:
        made.append(tmp_path / f"mounted-{len(made)}")
        made[-1].mkdir()
        subprocess.run(["mount", *words, str(made[-1])], check=True)
        return made[-1]

    yield mount
    for path in made:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no room on the disk of this directory."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


def test_a_full_disk_is_named_and_loses_nothing(
    mounted: Callable[..., Path], engine: DockerClient, image: str, family: str
) -> None:
    disk = mounted("-t", "tmpfs", "-o", "size=160m", "tmpfs")
    lab = Lab.make(disk / "lab", f"{family}-full", engine, {"LAB_IMAGE": image})
    greedy = lab.path / "workloads/greedy"
    greedy.mkdir()
    (greedy / "workload.yml").write_text(
        "description: fills the disk\nlauncher: mpirun\nscript: greedy.sh\ntimeout: 2m\n"
    )
    (greedy / "greedy.sh").write_text("#!/bin/bash\ncat /dev/zero > $LABCTL_RUN_DIR/big\nyes | head -c 1000000\n")
    (greedy / "greedy.sh").chmod(0o755)
    try:
        filler = fill(disk)
        error = lab.call("up", "--json").expect(3).json["error"]
        assert "No space left on device" in error["message"]
        assert str(lab.path) in error["message"]
        assert lab.labelled() == []
        filler.unlink()
        lab.call("up").expect(0)
        lab.call("run", "hello").expect(0)
        (earlier,) = lab.run_ids()
        before, nodes = (lab.path / "runs" / earlier / "result.json").read_bytes(), lab.identities()
        filler = fill(disk)
        error = lab.call("run", "hello", "--json").expect(3).json["error"]
        assert f"0 MiB free at {lab.path}" in error["message"]
        filler.unlink()
        error = lab.call("run", "greedy", "--json").expect(3).json["error"]
        (run_id,) = lab.run_ids()[-1:]
        assert "No space left on device" in error["message"]
        assert str(lab.path / "runs" / run_id) in error["message"]
        assert lab.processes_of(run_id) == []
        for path in (lab.path / "runs").rglob("big"):
            path.unlink()
        assert (lab.path / "runs" / earlier / "result.json").read_bytes() == before
        lab.call("run", "hello").expect(0)
        lab.call("up").expect(0)
        assert lab.identities() == nodes
    finally:
        lab.destroy()


def test_directories_with_odd_names_are_mounted(fresh_lab: FreshLab, tmp_path: Path) -> None:
    cache, clone = tmp_path / "a cache: $HOME #1", tmp_path / "crème 'brûlée' \"漢字\" \\ {}"
    for path in (cache, clone):
        path.mkdir()
        (path / "here").write_text(path.name)
    lab = fresh_lab(HOST_CACHE_PATH=str(cache), HOST_REPO_PATH=str(clone))
    lab.call("up").expect(0)
    for node in ("launcher", "worker-1"):
        assert lab.inside(node, "cat", "/workspace/.cache/here") == cache.name
        assert lab.inside(node, "cat", "/workspace/DeepSpeedExamples/here") == clone.name


def test_a_clone_on_a_read_only_file_system_is_mounted(mounted: Callable[..., Path], fresh_lab: FreshLab) -> None:
    disk = mounted("-t", "tmpfs", "tmpfs")
    (disk / "here").write_text("here")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    lab = fresh_lab(HOST_REPO_PATH=str(disk))
    lab.call("up").expect(0)
    assert lab.inside("worker-0", "cat", "/workspace/DeepSpeedExamples/here") == "here"


def test_links_in_a_circle_are_refused_before_anything_is_made(fresh_lab: FreshLab, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    lab = fresh_lab(HOST_CACHE_PATH=str(tmp_path / "one"))
    answer = lab.call("up", "--json")
    assert answer.code in (2, 3)
    assert str(tmp_path / "one") in answer.json["error"]["message"]
    assert lab.labelled() == []
