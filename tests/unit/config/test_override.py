"""What a person adds to the compose files of a lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labctl.config import override
from labctl.errors import ConfigError

SERVICES = ("launcher", "worker-0", "worker-1")
OWN = """\
services:
  worker-1:
    environment: {GREETING: "${HOME}"}
    volumes: [/data:/data:ro, kept:/kept]
volumes:
  kept: {}
"""


def write(directory: Path, text: str) -> Path:
    (directory / override.FILE).write_text(text)
    return directory


def test_a_lab_without_the_file_adds_nothing(tmp_path: Path) -> None:
    assert override.read(tmp_path, SERVICES) == ()
    assert override.text((), SERVICES) == ""


def test_each_node_gets_its_own_part_and_what_is_for_all(tmp_path: Path) -> None:
    read = override.read(write(tmp_path, OWN), SERVICES)
    assert override.text(read, ("worker-0", "launcher")) == ""
    assert json.loads(override.text(read, ("worker-1",))) == {
        "services": {"worker-1": {"environment": {"GREETING": "${HOME}"}, "volumes": ["/data:/data:ro", "kept:/kept"]}},
        "volumes": {"kept": {}},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  worker-7: {}\n", "compose.override.yml:2: no service `worker-7` in this lab"),
        (
            "services:\n  worker-1:\n    volumes: [./data:/data]\n",
            "compose.override.yml:3: `./data:/data` is a relative",
        ),
        ("services:\n  worker-1: 5\n", "compose.override.yml:2: `worker-1` must be a mapping"),
        ("name: mine\n", "compose.override.yml:1: `name` is labctl's own"),
        ("services: [\n", "compose.override.yml:2: is not YAML"),
        ("", "compose.override.yml:1: is empty"),
    ],
)
def test_what_cannot_be_added_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override.read(write(tmp_path, text), SERVICES)
    assert caught.value.message.startswith(said)
