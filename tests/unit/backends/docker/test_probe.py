"""Throw-away containers, against a stand-in for the docker command that answers and records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.builders import devices

from labctl.backends.docker import probe
from labctl.errors import HostError
from labctl.model import DeviceMapping

DOCKER = """#!/bin/sh
echo "$*" >> "$0.log"
case $1 in create) echo c0ffee; exit;; rm) exit;; esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `docker` on PATH that logs its calls, with a limit of 1 s; return its path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(probe, "PATIENCE", 1)
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    return program


def at_start(docker: Path, text: str) -> None:
    """Add this text, which runs at `docker start`, to the stand-in."""
    docker.write_text(f"{DOCKER}{text}\n")


def calls(docker: Path) -> list[str]:
    """Return the logged calls of docker."""
    return Path(f"{docker}.log").read_text().splitlines()


def test_a_container_that_never_starts_is_given_up_and_removed(docker: Path) -> None:
    """refusal() of a container that never starts tells the limit, and the container is removed."""
    at_start(docker, "exec sleep 60")
    assert "timed out after 1 s" in probe.refusal(("docker",), "demo", "image", ())
    assert calls(docker)[-1] == "rm --force c0ffee"


def test_a_refusal_is_told_by_its_words_and_any_other_is_an_error(docker: Path) -> None:
    """refusal() returns docker's error, refused() is True for the expected one and raises HostError for others."""
    at_start(docker, "echo 'Error: no such driver' >&2; echo 'Error: failed to start containers: c0ffee' >&2; exit 1")
    assert probe.refusal(("docker",), "demo", "image", ()) == "Error: no such driver"
    assert probe.refused(("docker",), "demo", "image", (), because="such driver")
    with pytest.raises(HostError, match="cannot start a container: Error: no such driver"):
        probe.refused(("docker",), "demo", "image", (), because="rlimit")
    assert [line for line in calls(docker) if line.startswith("rm")] == ["rm --force c0ffee"] * 3


@pytest.mark.parametrize(("output", "files"), [("20000", 20_000), ("unlimited", sys.maxsize)])
def test_a_container_says_how_many_files_it_may_open(docker: Path, output: str, files: int) -> None:
    """most_files() returns the number that the container prints, or the largest for unlimited; an error raises."""
    at_start(docker, f"echo {output}")
    assert probe.most_files(("docker",), "demo", "image") == files
    at_start(docker, "echo 'no such image' >&2; exit 125")
    with pytest.raises(HostError, match="no such image"):
        probe.most_files(("docker",), "demo", "image")


def test_a_removal_that_fails_hides_nothing(docker: Path) -> None:
    """A `docker rm` that hangs does not change refusal(), which is empty."""
    docker.write_text(DOCKER.replace("rm) exit", "rm) exec sleep 60"))
    assert probe.refusal(("docker",), "demo", "image", ()) == ""


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        (DeviceMapping(driver="cdi", requests=("g=0", "g=1")), ("--device", "g=0", "--device", "g=1")),
        (DeviceMapping(driver="nvidia", requests=("0", "1")), ("--gpus", 'driver=nvidia,"device=0,1"')),
        (DeviceMapping(runtime="r", environment=(("IDS", "0,1"),)), ("--env", "IDS=0,1", "--runtime", "r")),
        (DeviceMapping(devices=devices("/dev/a"), paths=("/dev/a",)), ("--device", "/dev/a")),
    ],
)
def test_devices_are_asked_for_as_a_node_asks(mapping: DeviceMapping, options: tuple[str, ...]) -> None:
    """device_options() gives --device, --gpus, or --env and --runtime as the mapping requests devices."""
    assert probe.device_options(mapping) == options
