from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import host, lab, workload

from labctl.errors import ConfigError
from labctl.jobs import inputs
from labctl.model import Lab, Mount

RUN = "/workspace/runs/r1"


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Create a cache, a folder whose name begins alike, and a clone; return a lab that mounts cache and clone."""
    for name in ("cache/mnist", "cache-of-others", "clone"):
        (tmp_path / name).mkdir(parents=True)
    mounts = (
        Mount(source=str(tmp_path / "cache"), target="/workspace/.cache"),
        Mount(source=str(tmp_path / "clone"), target="/workspace/DeepSpeedExamples"),
    )
    return lab(mounts=mounts)


def resolved(of: Lab, kind: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments after resolving --data-path as an input of this kind."""
    return inputs.resolve(of, workload(inputs=(("data-path", kind),), arguments=arguments)).arguments


def test_a_path_of_the_host_becomes_the_containers(of: Lab, tmp_path: Path) -> None:
    """Resolve a path of the host in the cache: the container's path."""
    given = ("--epochs", "2", "--data-path", str(tmp_path / "cache/mnist"))
    assert resolved(of, "directory", *given) == ("--epochs", "2", "--data-path", "/workspace/.cache/mnist")


@pytest.mark.parametrize("value", ["mnist", "/workspace/.cache/mnist", "../cache/mnist"])
def test_a_path_may_be_relative_to_the_cache_or_a_containers_own(of: Lab, value: str) -> None:
    """Resolve relative and container paths: the container's path."""
    assert resolved(of, "directory", "--data-path", value) == ("--data-path", "/workspace/.cache/mnist")


@pytest.mark.parametrize("word", ["--data-path=mnist", "--data_path=mnist"])
def test_every_spelling_of_the_argument_is_seen(of: Lab, word: str) -> None:
    """Resolve --data-path=X and --data_path=X: the value is replaced in both."""
    assert resolved(of, "directory", word) == (word.replace("=mnist", "=/workspace/.cache/mnist"),)


def test_a_default_that_is_replaced_need_not_be_there(of: Lab) -> None:
    """Give the argument twice, first with a missing path: only the last one is resolved."""
    given = ("--data-path", "nowhere", "--data_path=mnist")
    assert resolved(of, "directory", *given) == ("--data-path", "nowhere", "--data_path=/workspace/.cache/mnist")


def test_other_arguments_are_left_alone(of: Lab) -> None:
    """Give another argument: unchanged."""
    assert resolved(of, "directory", "--data", "/nowhere") == ("--data", "/nowhere")


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("directory", "nowhere", "no such directory"),
        ("file", "mnist", "no such file"),
        ("path", "nowhere", "no such file or directory"),
        ("model", "nowhere", "no such directory"),
        ("model", "mnist", "no config.json"),
    ],
)
def test_what_is_not_there_is_refused_with_the_place_that_was_looked_at(
    of: Lab, tmp_path: Path, kind: str, value: str, reason: str
) -> None:
    """Resolve missing paths of each kind: ConfigError with the reason, the hint has the host's path."""
    with pytest.raises(ConfigError, match=reason) as caught:
        resolved(of, kind, "--data-path", value)
    assert str(tmp_path / "cache" / value) in caught.value.hint


def test_a_model_is_a_directory_with_its_configuration(of: Lab, tmp_path: Path) -> None:
    """Resolve a model: ConfigError if config.json is no JSON, else its path."""
    config = tmp_path / "cache/mnist/config.json"
    config.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        resolved(of, "model", "--data-path", "mnist")
    config.write_text("{}", encoding="utf-8")
    assert resolved(of, "model", "--data-path", "mnist") == ("--data-path", "/workspace/.cache/mnist")


def test_a_models_configuration_that_a_container_planted_is_neither_waited_for_nor_breaks_labctl(
    of: Lab, tmp_path: Path
) -> None:
    """Plant config.json that is too deep, huge or a FIFO: ConfigError without blocking."""
    (tmp_path / "cache/mnist/config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        resolved(of, "model", "--data-path", "mnist")
    os.truncate(tmp_path / "cache/mnist/config.json", 1 << 40)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .*larger than"):
        resolved(of, "model", "--data-path", "mnist")
    (tmp_path / "cache/mnist/config.json").unlink()
    os.mkfifo(tmp_path / "cache/mnist/config.json")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolved(of, "model", "--data-path", "mnist")


@pytest.mark.parametrize("name", ["mnist", "text.json"])
def test_a_path_is_a_file_or_a_directory(of: Lab, tmp_path: Path, name: str) -> None:
    """Resolve an input of kind path: a file or a directory."""
    (tmp_path / "cache/text.json").touch()
    assert resolved(of, "path", "--data-path", name) == ("--data-path", f"/workspace/.cache/{name}")


def test_what_an_earlier_run_made_is_looked_for_here_whatever_hosts_read_it(of: Lab) -> None:
    """Resolve an output of an earlier run on other hosts: ConfigError if missing here; earlier() names the run."""
    runs = Mount(source=str(of.directory / "runs"), target="/workspace/runs")
    elsewhere = replace(of, mounts=(*of.mounts, runs), hosts=(host(directory="/home/ann/.labctl/demo"),))
    given = ("--data-path", f"{RUN}/reward")
    task = workload(inputs=(("data-path", "path"),), arguments=given)
    with pytest.raises(ConfigError, match="no such file or directory"):
        inputs.resolve(elsewhere, task)
    assert inputs.earlier(elsewhere, task) == ("r1",)
    assert (
        inputs.earlier(elsewhere, workload(inputs=(("data-path", "path"),), arguments=("--data-path", "mnist"))) == ()
    )


def test_an_input_that_is_required_must_be_given(of: Lab) -> None:
    """Leave out a required input: ConfigError with --set; accepted in both spellings."""
    task = workload(inputs=(("data-path", "directory"),), required_inputs=("data-path",))
    with pytest.raises(ConfigError, match="hello needs a path for --data-path") as caught:
        inputs.resolve(of, task)
    assert "--set data-path=PATH" in caught.value.hint
    for given in (("--data-path", "mnist"), ("--data_path=mnist",)):
        inputs.resolve(of, replace(task, arguments=given))


def test_what_no_container_sees_is_refused(of: Lab, tmp_path: Path) -> None:
    """Resolve a path that is not mounted: ConfigError, the hint names HOST_CACHE_PATH."""
    with pytest.raises(ConfigError, match="is not mounted in the containers") as caught:
        resolved(of, "directory", "--data-path", str(tmp_path / "cache-of-others"))
    assert "HOST_CACHE_PATH" in caught.value.hint


def test_a_link_out_of_the_cache_leads_nowhere_in_a_container(of: Lab, tmp_path: Path) -> None:
    """Resolve a link out of the cache: ConfigError."""
    (tmp_path / "cache/link").symlink_to(tmp_path / "cache-of-others")
    with pytest.raises(ConfigError, match="is not mounted in the containers"):
        resolved(of, "directory", "--data-path", "link")


def test_a_models_configuration_may_be_a_link_as_in_the_hubs_cache(of: Lab, tmp_path: Path) -> None:
    """Resolve a model whose config.json is a link in the cache: accepted."""
    (tmp_path / "cache/blob").write_text("{}")
    (tmp_path / "cache/mnist/config.json").symlink_to("../blob")
    assert resolved(of, "model", "--data-path", "mnist") == ("--data-path", "/workspace/.cache/mnist")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ((), ("--resume", f"{RUN}/work/ckpt.pt")),
        ((), (f"--data={RUN}",)),
        (("sh", "-c", f"train --data '{RUN}/a' --also /workspace/runs/gone"), ()),
    ],
)
def test_an_earlier_run_that_a_programs_words_name_is_sent_along(
    of: Lab, tmp_path: Path, command: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    """Name an earlier run in arguments or command: earlier() returns it, but no run that is gone."""
    (tmp_path / "runs/r1").mkdir(parents=True)
    runs = Mount(source=str(tmp_path / "runs"), target="/workspace/runs")
    mounted = replace(of, directory=tmp_path, mounts=(*of.mounts, runs))
    assert inputs.earlier(mounted, workload(command=command, arguments=arguments)) == ("r1",)
