"""Programs of a repository that is none of labctl's: by script, module and command, from its root."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import repository as repositories
from support.harness import Lab
from support.repository import WORDS, said

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with a script, a module and a command that print how they were started; return its path."""
    return repositories.make(tmp_path_factory.mktemp("projects") / "my repo")


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
@pytest.mark.parametrize("program", [("--script", "src/train.py"), ("-m", "package.says")], ids=["script", "module"])
def test_a_program_runs_from_the_root_of_its_repository(
    lab: Lab, repository: Path, launcher: str, program: tuple[str, ...]
) -> None:
    """A script or module, under each launcher, has its arguments, files and modules on both ranks."""
    command = ("run", *program, "--launcher", launcher, "--json", "--", *WORDS)
    shown = said(lab, lab.call(*command, here=repository).expect(0).json)
    assert [(entry["rank"], entry["world"]) for entry in shown] == [("0", "2"), ("1", "2")]
    for entry in shown:
        assert (entry["argv"], entry["cwd"], entry["config"]) == ([*WORDS], "my repo", "lr: 0.1\n")
        assert entry["word"] == "of the package"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [(("--per-rank",), ["0", "1"]), (("--per-node",), ["0", "1"]), (("--once",), [None])],
    ids=["per rank", "per node", "once"],
)
def test_a_command_runs_as_often_as_it_is_said(
    lab: Lab, repository: Path, flags: tuple[str, ...], ranks: list[str | None]
) -> None:
    """A command runs per rank, per node or once, with its arguments unchanged."""
    result = lab.call("run", *flags, "--json", "--", "./tool", *WORDS, here=repository).expect(0).json
    shown = said(lab, result)
    assert [entry["rank"] for entry in shown] == ranks
    assert all(entry["argv"] == [*WORDS] for entry in shown)


def test_torchrun_by_hand_starts_the_ranks_of_its_node(lab: Lab, repository: Path) -> None:
    """`run -- torchrun` runs once on each node, which stderr says, and makes two ranks."""
    answer = lab.call("run", "--json", "--", "torchrun", "src/train.py", *WORDS, here=repository).expect(0)
    assert "it starts its ranks itself, so it runs once on each node" in answer.err
    assert [(entry["rank"], entry["world"]) for entry in said(lab, answer.json)] == [("0", "2"), ("1", "2")]


def test_mpirun_by_hand_starts_the_ranks_of_all_nodes(lab: Lab, repository: Path) -> None:
    """`run --once` of mpirun with $LABCTL_HOSTFILE starts a process on both workers."""
    command = "mpirun --hostfile $LABCTL_HOSTFILE uname -n"
    answer = lab.call("run", "--once", "--json", "--", "sh", "-c", command, here=repository).expect(0)
    log = (lab.path / "runs" / answer.json["run_id"] / "output.log").read_text()
    # Open MPI warns if a child has set its process group before its parent does.
    lines = [line for line in log.splitlines() if "plm:rsh: Warning: setpgid" not in line]
    assert sorted(lines) == ["worker-0", "worker-1"]


def test_a_projects_package_is_installed_for_the_run(lab: Lab, repository: Path) -> None:
    """`run --install` installs the project's setup.py from the run's copy; both ranks run its command."""
    (repository / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='says', version='1', packages=['package'],\n"
        "      entry_points={'console_scripts': ['says = package.words:main']})\n"
    )
    words = repository / "package/words.py"
    words.write_text("WORD = 'of the package'\n\ndef main():\n    print('it is installed:', __file__)\n")
    result = lab.call("run", "--install", "--json", "--", "says", here=repository).expect(0).json
    log = (lab.path / "runs" / result["run_id"] / "output.log").read_text()
    assert log.count("it is installed: ") == 2
    assert f"{result['run_id']}/work/my repo/package/words.py" in log
