"""prepare.sh of hello-mpi: one compilation per source and compiler, with a compiler that only records its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "workloads/hello-mpi"
# Says what it is as mpicc does; what it makes is the source.
COMPILER = """#!/bin/sh
case $1 in -show) echo "gcc {flags}"; exit ;; --version) echo 1.0; exit ;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && to=$2; shift; done
[ -e ../broken ] && exit 1
cp "$1" "$to" && chmod +x "$to"
"""


class Node:
    """A node's home directory and its MPI."""

    def __init__(self, path: Path) -> None:
        """Copy the workload and install a compiler that copies its source."""
        self.path, self.folder = path, path / "hello-mpi"
        shutil.copytree(FOLDER, self.folder)
        self.program = path / "home/.cache/labctl/hello-mpi/hello_mpi"
        self.install("-O2")

    def install(self, flags: str) -> None:
        """Write an mpicc that shows these flags and copies its source."""
        mpicc = self.path / "bin/mpicc"
        mpicc.parent.mkdir(exist_ok=True)
        mpicc.write_text(COMPILER.replace("{flags}", flags))
        mpicc.chmod(0o755)

    def prepare(self) -> subprocess.CompletedProcess[str]:
        """Run prepare.sh with this home and PATH; return its end."""
        environ = {"HOME": str(self.path / "home"), "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        argv = ["./prepare.sh"]
        return subprocess.run(argv, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)

    def compiles(self) -> bool:
        """Run prepare.sh; return True if it compiled."""
        done = self.prepare()
        assert done.returncode == 0, done.stderr
        return "compiling" in done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a Node at tmp_path."""
    return Node(tmp_path)


def test_the_second_time_compiles_nothing(node: Node) -> None:
    """Prepare twice: compiled once."""
    assert node.compiles()
    assert node.program.read_bytes() == (FOLDER / "hello_mpi.c").read_bytes()
    assert not node.compiles()


def test_a_newer_file_of_the_same_text_compiles_nothing(node: Node) -> None:
    """Touch the source: not compiled again."""
    assert node.compiles()
    os.utime(node.folder / "hello_mpi.c")
    assert not node.compiles()


def test_another_text_is_compiled_even_if_it_looks_older(node: Node) -> None:
    """Change the source and make it old: compiled again."""
    assert node.compiles()
    source = node.folder / "hello_mpi.c"
    source.write_text(source.read_text() + "/* changed */\n")
    os.utime(source, (0, 0))
    assert node.compiles()
    assert node.program.read_bytes() == source.read_bytes()


def test_another_mpi_compiles_anew(node: Node) -> None:
    """Install another compiler: compiled again."""
    assert node.compiles()
    node.install("-O2 -I/opt/other")
    assert node.compiles()


def test_a_compilation_that_fails_leaves_nothing_that_passes_for_done(node: Node) -> None:
    """Fail a compilation: the next one compiles."""
    (node.path / "broken").touch()
    assert node.prepare().returncode != 0
    (node.path / "broken").unlink()
    assert node.compiles()
