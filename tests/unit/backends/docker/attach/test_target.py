"""Lookup of the node that a session enters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from labctl import accelerators
from labctl.accelerators import Detection
from labctl.backends.docker.attach import target
from labctl.config.context import Context
from labctl.errors import ConfigError


@pytest.mark.parametrize("hosts", ["red", "red\nblue"])
def test_a_node_that_no_listed_host_is_to_have_is_unknown(tmp_path: Path, hosts: str) -> None:
    """entered() raises ConfigError for worker-5 of a lab of one node, with one host or two listed.

    A container of that node may still exist on the only host: no listed host leads to it.
    """
    (tmp_path / ".env").write_text("LAB_NAME=demo\nLAB_NODES=1\nLAB_HOSTS=hosts.txt\n")
    (tmp_path / "hosts.txt").write_text(f"{hosts}\n")
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    with (
        pytest.raises(ConfigError, match="lab demo has no node `worker-5`"),
        target.entered(context, "demo", "worker-5"),
    ):
        pass


@pytest.mark.parametrize(
    ("environ", "stdin", "expected"),
    [
        ({"TERM": "tmux-256color"}, "terminal", ("TERM=xterm-256color",)),
        ({"TERM": "xterm-kitty", "COLORTERM": "truecolor"}, "terminal", ("TERM=xterm-256color",)),
        ({"TERM": "xterm"}, "terminal", ()),
        ({}, "terminal", ()),
        ({"TERM": "xterm-256color"}, "pipe", ()),
    ],
)
def test_a_shell_has_the_colors_of_the_terminal(
    tmp_path: Path, environ: dict[str, str], stdin: Literal["terminal", "pipe"], expected: tuple[str, ...]
) -> None:
    """Ask for a shell's TERM: with 256 colors where this terminal has them, by a name that every image knows."""
    context = Context(directory=tmp_path, environ=environ, emit=lambda _: None, flags={})
    assert target.colors(context, stdin) == expected


def lab_with(directory: Path, text: str) -> Context:
    """Return the context of a lab with these lines of .env."""
    (directory / ".env").write_text(f"LAB_NAME=demo\n{text}\n")
    return Context(directory=directory, environ={}, emit=lambda _: None, flags={})


def test_a_program_that_shows_devices_is_sent_to_a_worker(tmp_path: Path) -> None:
    """Run nvidia-smi in the launcher: ConfigError with the command for a worker, before an engine is asked."""
    where = lab_with(tmp_path, "LAB_ACCELERATOR=nvidia")
    with pytest.raises(ConfigError, match="the launcher has no devices for `nvidia-smi`") as caught:
        target.attach(where, ("launcher",), ("nvidia-smi", "-L"), stdin="pipe", prompt=False)
    assert caught.value.hint == "labctl exec worker-0 -- nvidia-smi -L"


@pytest.mark.parametrize(
    ("text", "here", "known"),
    [
        ("LAB_ACCELERATOR=cpu", "nvidia", False),
        ("LAB_ACCELERATOR=nvidia", "cpu", True),
        ("LAB_ACCELERATOR=auto", "cpu", False),
        ("LAB_ACCELERATOR=auto", "nvidia", True),
        ("LAB_ACCELERATOR=auto\nLAB_HOSTS=hosts.txt", "cpu", True),
    ],
)
def test_programs_that_show_devices_are_those_of_vendors_that_workers_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, here: str, known: bool
) -> None:
    """List programs that show devices, by the setting, else by this machine's devices; with hosts those of all."""
    monkeypatch.setattr(accelerators, "detect_accelerator", lambda _: Detection(name=here, devices=(), why=""))
    assert ("nvidia-smi" in target._programs(lab_with(tmp_path, text))) is known
