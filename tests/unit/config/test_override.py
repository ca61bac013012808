"""The user's additions to the compose files of a lab."""

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
    """Write compose.override.yml; return the directory."""
    (directory / override.FILE).write_text(text)
    return directory


def test_a_lab_without_the_file_adds_nothing(tmp_path: Path) -> None:
    """Read a directory without the file: nothing, and an empty text."""
    assert override.read(tmp_path, SERVICES) == ()
    assert override.text((), SERVICES) == ""


def test_each_node_gets_its_own_part_and_what_is_for_all(tmp_path: Path) -> None:
    """Read additions for worker-1: they are in its text alone, with the volumes."""
    read = override.read(write(tmp_path, OWN), SERVICES)
    assert override.text(read, ("worker-0", "launcher")) == ""
    assert json.loads(override.text(read, ("worker-1",))) == {
        "services": {"worker-1": {"environment": {"GREETING": "${HOME}"}, "volumes": ["/data:/data:ro", "kept:/kept"]}},
        "volumes": {"kept": {}},
    }


TAGGED = """\
services:
  worker-1:
    ports: !reset null
    tmpfs: !reset []
    user: !reset
    environment: !override {GREETING: hello}
    labels:
      a: !reset "1"
      <<: {b: "2"}
"""


def test_composes_own_tags_and_merge_keys_reach_it(tmp_path: Path) -> None:
    """Read !reset, !override and merge keys: they stand unchanged in the text."""
    written = override.text(override.read(write(tmp_path, TAGGED), SERVICES), ("worker-1",))
    assert " ".join(written.split()) == (
        '{ "services": { "worker-1": { "ports": !reset null, "tmpfs": !reset [], "user": !reset null, '
        '"environment": !override { "GREETING": "hello" }, "labels": { "a": !reset "1", <<: { "b": "2" } } } } }'
    )


def relative(value: str) -> str:
    """Return additions to worker-1 with this line as the third."""
    return f"services:\n  worker-1:\n    {value}\n"


@pytest.mark.parametrize(
    "text",
    [
        relative("env_file: conf.env"),
        relative("env_file: [{path: conf.env}]"),
        relative("extends: {file: other.yml, service: x}"),
        relative("build: image"),
        relative("build: {context: .}"),
        relative("volumes: [data/x:/data]"),
        relative("volumes: [.:/data]"),
        relative("volumes: [~:/data]"),
        relative("volumes: !override [{type: bind, source: data, target: /data}]"),
        "x-a: {}\n\nsecrets: {token: {file: token.txt}}",
        "x-a: {}\n\nconfigs: {app: {file: ./app.yml}}",
    ],
)
def test_a_relative_path_is_named_by_its_line(tmp_path: Path, text: str) -> None:
    """Read relative paths: ConfigError names line 3 and the path."""
    with pytest.raises(ConfigError, match=r"^compose\.override\.yml:3: `\S+` is a relative path$"):
        override.read(write(tmp_path, text), SERVICES)


@pytest.mark.parametrize(
    "text",
    [
        relative("env_file: [/etc/lab.env, {path: '$HOME/lab.env', required: false}]"),
        relative("extends: base"),
        relative("build: https://github.com/docker/buildx.git#main"),
        relative("build: {context: '${HOME}/image', dockerfile: my/Dockerfile}"),
        relative("volumes: [kept:/kept, /scratch, '${HOME}/a:/a', {type: volume, source: kept, target: /b}]"),
        relative("command: [./start.sh, ../x]"),
        "secrets: {token: {environment: TOKEN}, other: {file: /run/token}}",
    ],
)
def test_what_is_no_relative_path_of_the_host_is_taken(tmp_path: Path, text: str) -> None:
    """Read absolute paths, volumes and URLs: accepted."""
    assert override.read(write(tmp_path, text), SERVICES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services:\n  worker-7: {}\n", "compose.override.yml:2: no service `worker-7` in this lab"),
        (
            "services:\n  worker-1:\n    volumes: [./data:/data]\n",
            "compose.override.yml:3: `./data:/data` is a relative",
        ),
        ("services:\n  worker-1: 5\n", "compose.override.yml:2: `worker-1` must be a mapping"),
        ("services:\n  worker-1:\n    ports: !resett null\n", "compose.override.yml:3: unknown tag `!resett`"),
        ("services:\n  worker-1:\n    x-date: 2026-99-99\n", "compose.override.yml:3: `x-date` cannot be read as "),
        ("name: mine\n", "compose.override.yml:1: `name` is set by labctl"),
        ("services: [\n", "compose.override.yml:2: not YAML"),
        ("", "compose.override.yml:1: is empty"),
    ],
)
def test_what_cannot_be_added_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    """Read invalid additions: ConfigError with line and reason."""
    with pytest.raises(ConfigError) as caught:
        override.read(write(tmp_path, text), SERVICES)
    assert caught.value.message.startswith(message)
