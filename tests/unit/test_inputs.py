"""Paths that a person names for a run: required ones, wrong ones, and how containers see them."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import lab, workload

from labctl import inputs
from labctl.errors import ConfigError
from labctl.model import Lab, Mount, Workload


@pytest.fixture
def cached(tmp_path: Path) -> Lab:
    """A lab with a cache that holds a model, a folder that is none, and a file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").touch()
    return lab(mounts=(Mount(source=str(tmp_path), target="/workspace/.cache"),))


def task(*arguments: str, requires: tuple[str, ...] = ()) -> Workload:
    kinds = (("model", "model"), ("data", "path"))
    return workload(name="tune", inputs=kinds, requires=requires, arguments=arguments)


@pytest.mark.parametrize("name", ["text.json", "folder"])
def test_a_path_is_a_file_or_a_directory(cached: Lab, name: str) -> None:
    assert inputs.resolve(cached, task("--data", name)).arguments == ("--data", f"/workspace/.cache/{name}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--data", "nowhere"), "there is no such file or directory"),
        (("--model", "folder"), "no config.json"),
        (("--model=nowhere",), "there is no such directory"),
    ],
)
def test_what_is_not_what_it_should_be_is_refused(cached: Lab, arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        inputs.resolve(cached, task(*arguments))


def test_an_input_that_is_required_must_be_given(cached: Lab) -> None:
    with pytest.raises(ConfigError, match="tune needs a path of yours for --model") as caught:
        inputs.resolve(cached, task("--data", "text.json", requires=("model",)))
    assert "--set model=PATH" in (caught.value.hint or "")
    for given in (("--model", "model"), ("--model=model",)):
        inputs.resolve(cached, task(*given, requires=("model",)))
