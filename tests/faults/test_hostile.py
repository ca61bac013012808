"""A hostile workload: only its own directory changes, and none of its processes are left."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import Lab

from docker import DockerClient

pytestmark = pytest.mark.docker

TOKEN = "hf_" + "CANARY" * 5
# Program that runs labctl and prints its peak memory in KiB on the last line.
MEASURED = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home directory with three files; return it."""
    made = tmp_path_factory.mktemp("home")
    (made / ".ssh").mkdir()
    for name in (".ssh/authorized_keys", ".bashrc", "thesis.tex"):
        (made / name).write_text("mine\n")
    return made


@pytest.fixture(scope="module")
def attacked(
    home: Path, family: str, engine: DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """Yield a lab of two nodes with a token, up, whose labctl prints its peak memory in KiB last."""
    settings = {"LAB_IMAGE": image, "LAB_NODES": "2", "HF_TOKEN": TOKEN}
    path = tmp_path_factory.mktemp("labs") / "lab"
    lab = Lab.make(path, f"{family}-attacked", engine, settings, prefix=(sys.executable, "-c", MEASURED))
    lab.environ["HOME"] = str(home)
    lab.call("up").expect(0)
    yield lab
    lab.destroy()


@pytest.fixture(scope="module")
def earlier(attacked: Lab) -> Path:
    """Return the record directory of a passed run of `hello`."""
    return attacked.path / "runs" / str(attacked.call("run", "hello", "--json").expect(0).json["run_id"])


def tree(path: Path) -> str:
    """Return one hash of everything below a directory: names, modes, links and contents."""
    digest = hashlib.sha256()
    for entry in sorted(path.rglob("*")):
        content = (
            str(entry.readlink()).encode() if entry.is_symlink() else entry.read_bytes() if entry.is_file() else b""
        )
        digest.update(f"{entry.relative_to(path)} {entry.lstat().st_mode:o} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("workload", "launcher", "code", "verdict", "line"),
    [
        # pdsh takes time quadratic in the length of a line.
        ("hostile", "mpirun", 0, "PASS", 60 << 20),
        pytest.param("hostile", "mpirun", 0, "PASS", 600 << 20, marks=pytest.mark.slow),
        ("hostile-crash", "deepspeed", 4, "ERROR", 0),
    ],
)
def test_a_hostile_workload_changes_nothing_but_its_own_directory(
    attacked: Lab,
    home: Path,
    earlier: Path,
    stranger: Callable[[], bool],
    workload: str,
    launcher: str,
    code: int,
    verdict: str,
    line: int,
) -> None:
    """Home, earlier run and other processes stay; labctl takes below 150 MiB; no token leaks."""
    before, ran, nodes = tree(home), tree(earlier), attacked.processes()
    argv = ("run", workload, "--launcher", launcher, "--json", "--set", f"home={home}", "--set", f"line={line}")
    answer = attacked.call(*argv).expect(code)
    result = answer.json
    record = attacked.path / "runs" / result["run_id"]
    assert (result["verdict"], result["cause"]) == (verdict, "rank-crashed" if code else None)
    assert f"run {result['run_id']}: not moved, because it is not a file of the run or its name is taken" in answer.err
    assert (tree(home), tree(earlier)) == (before, ran)
    assert attacked.left_since(nodes) == []
    assert stranger()
    assert int(answer.err.splitlines()[-1]) < 150 * 1024
    assert TOKEN not in answer.out + answer.err
    # Secrets in the workload's own files are allowed.
    ours = (path for path in record.rglob("*") if path.is_file() and path.parent.name != "ranks.was")
    assert not [path for path in ours if TOKEN.encode() in path.read_bytes()]
    shown = attacked.call("show", "--json").expect(0).json
    assert (shown["run_id"], shown["verdict"]) == (result["run_id"], verdict)
    assert attacked.call("runs", "--json").expect(0).json["runs"][0]["verdict"] == verdict
    attacked.call("run", "hello").expect(0)
    attacked.call("up").expect(0)
    assert tree(home) == before
