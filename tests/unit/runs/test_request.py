"""The options of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import workload

from labctl.runs import request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a workload whose script has two options."""
    (tmp_path / "hello.py").write_text('add("--learning-rate", type=float)\nadd("--steps", type=int)\n')
    return tmp_path


def warned(folder: Path, *keys: str, script: str = "hello.py") -> list[str]:
    options = request.RunOptions(arguments=tuple((key, "1") for key in keys))
    return list(request.unknown(replace(workload(), directory=folder, script=script), options))


def test_a_key_that_no_script_takes_is_named_with_the_nearest(folder: Path) -> None:
    (warning,) = warned(folder, "lerning-rate", "steps", "deepspeed.zero_optimization.stage")
    assert warning.startswith("--set lerning-rate: no script of hello has an option `--lerning-rate`")
    assert warning.endswith("; did you mean `learning-rate`?")


def test_scripts_below_are_read_and_what_cannot_be_read_is_none(folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "part/more.py").write_text('add("--epochs")\n')
    (folder / ".#hello.py").symlink_to("someone@somewhere.1234")
    assert warned(folder, "epochs") == []


def test_a_pipe_that_is_named_as_a_script_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    assert warned(folder, "steps") == []


def test_a_script_that_a_container_made_huge_is_passed_over(folder: Path) -> None:
    (folder / "huge.py").touch()
    os.truncate(folder / "huge.py", 1 << 40)
    assert warned(folder, "steps") == []


def test_a_key_may_be_the_beginning_of_an_option(folder: Path) -> None:
    assert warned(folder, "learn") == []


def test_what_a_script_elsewhere_takes_is_not_known(folder: Path, tmp_path: Path) -> None:
    assert warned(folder, "lerning-rate", script=str(tmp_path / "own.py")) == []
    (folder / "hello.py").write_text("print(1)")
    assert warned(folder, "lerning-rate") == []
