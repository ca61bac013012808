"""A lab whose directory has no room left: one error that names it, nothing lost, and it goes on with room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import Answer, Lab

from docker import DockerClient

pytestmark = [pytest.mark.docker, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")]


@pytest.fixture
def small(engine: DockerClient, image: str, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    path = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "labctl-tests", path], check=True)
    lab = Lab.make(path / "lab", f"{family}-small", engine, {"LAB_IMAGE": image, "LAB_NODES": "1"})
    yield lab
    lab.destroy()
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(lab: Lab) -> Path:
    """A file of the lab's file system that takes all the room it has."""
    ballast = lab.path.parent / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            return ballast
    raise AssertionError("no file system is endless")


def content(lab: Lab) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in lab.path.rglob("*") if path.is_file() and not path.is_symlink()}


def refused(answer: Answer, lab: Lab, why: str = ": No space left on device") -> None:
    """It ended with one plain error that names a path of the lab."""
    answer.expect(3)
    (error,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert str(lab.path) in error
    assert why in error
    assert "hint: " in answer.err


def test_a_full_lab_directory_is_one_error_that_names_it_and_loses_nothing(small: Lab) -> None:
    before, ballast = content(small), fill(small)
    refused(small.call("up"), small)
    assert content(small).items() >= before.items()
    assert small.labelled() == []
    ballast.unlink()
    small.call("up").expect(0)
    small.call("run", "hello").expect(0)
    before, ballast = content(small), fill(small)
    refused(small.call("run", "hello"), small, "(LAB-DISK-003)")
    assert content(small) == before
    ballast.unlink()
    small.call("up").expect(0)
    small.call("run", "hello").expect(0)
