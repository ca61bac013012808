"""The project of a run, and where its ranks start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from labctl.errors import ConfigError
from labctl.jobs import project
from labctl.model import Project


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a git repository with `src/train.py`, `configs/` and an ignored folder `scratch/`; return it."""
    root = tmp_path / "mine"
    for folder in ("src", "configs", "scratch"):
        (root / folder).mkdir(parents=True)
    (root / "src/train.py").touch()
    (root / ".gitignore").write_text("scratch/\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


@pytest.mark.parametrize(
    ("here", "start"), [(".", "."), ("configs", "configs"), ("src", "src"), ("..", "src")], ids=lambda text: text
)
def test_a_scripts_repository_starts_where_the_person_stands_in_it_else_in_the_scripts_folder(
    repository: Path, here: str, start: str
) -> None:
    """Choose a script's repository: it starts where the person stands in it, else in the script's folder."""
    chosen = project.choose(repository / "src/train.py", here=repository / here)
    assert chosen == Project(root=repository, start=start)


def test_a_project_that_is_given_starts_in_its_root(repository: Path, tmp_path: Path) -> None:
    """Choose a given project: it starts in its root, or where the person stands in it."""
    script = repository / "src/train.py"
    assert project.choose(script, given=repository / "src", here=tmp_path) == Project(root=repository / "src")
    here = repository / "configs"
    assert project.choose(script, given=repository, here=here) == Project(root=repository, start="configs")


def test_a_module_takes_the_repository_that_the_person_stands_in_else_the_folder(
    repository: Path, tmp_path: Path
) -> None:
    """Choose a project without script: the repository around the person, else the folder."""
    assert project.choose(None, here=repository / "src") == Project(root=repository, start="src")
    (tmp_path / "plain/sub").mkdir(parents=True)
    assert project.choose(None, here=tmp_path / "plain/sub") == Project(root=tmp_path / "plain/sub")


def test_what_a_repository_ignores_is_no_part_of_it(repository: Path) -> None:
    """Choose a script in an ignored folder: that folder is the project."""
    chosen = project.choose(repository / "scratch/a.py", here=repository)
    assert chosen == Project(root=repository / "scratch")


def test_a_lab_in_the_project_is_no_place_to_start_in(repository: Path) -> None:
    """Choose a script from a lab inside its repository: the start is not the lab."""
    lab = repository / "lab"
    lab.mkdir()
    (lab / ".env").write_text("LAB_NAME=demo\n")
    assert project.choose(repository / "src/train.py", here=lab) == Project(root=repository, start="src")
    copy = lab / "runs/r1/work/mine"
    copy.mkdir(parents=True)
    assert project.choose(copy / "train.py", here=lab) == Project(root=copy)


def test_the_home_directory_is_no_project(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose in the home directory: never it; a folder below it, None, or ConfigError if it is given."""
    monkeypatch.setenv("HOME", str(repository))
    assert project.choose(repository / "src/train.py", here=repository) == Project(root=repository / "src")
    assert project.choose(repository / "train.py", here=repository) is None
    assert project.choose(None, here=repository) is None
    for given in (repository, repository.parent, Path("/")):
        with pytest.raises(ConfigError, match="not a single project"):
            project.choose(None, given=given, here=repository)
    with pytest.raises(ConfigError, match="no project to install"):
        project.choose(None, here=repository, install=True)


def test_a_project_without_the_script_is_refused(repository: Path) -> None:
    """Give a project without the script, or a missing one: ConfigError."""
    with pytest.raises(ConfigError, match="is not in the project"):
        project.choose(repository / "src/train.py", given=repository / "configs")
    with pytest.raises(ConfigError, match="not a directory"):
        project.choose(None, given=repository / "nowhere")


def test_it_is_said_if_the_home_directory_is_not_copied(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the remark in the home directory: nothing is copied; empty for a script or without a person."""
    monkeypatch.setenv("HOME", str(repository))
    said = f"nothing is copied into the run: {repository} is not a single project; --project DIR names one"
    assert project.remark(None, script=None, here=repository) == said
    assert project.remark(None, script=repository / "train.py", here=repository) == ""
    assert project.remark(None, script=None, here=None) == ""


def test_it_is_said_if_a_folder_is_a_project_alone_as_its_repository_ignores_it(repository: Path) -> None:
    """Ask for the remark on an ignored folder: it is the project alone; empty for others."""
    script = repository / "scratch/a.py"
    alone = project.choose(script, here=repository)
    assert project.remark(alone, script=script, here=repository) == (
        f"the project is {repository}/scratch alone, as its repository ignores it; --project {repository} has all"
    )
    script = repository / "src/train.py"
    assert project.remark(project.choose(script, here=repository), script=script, here=repository) == ""
