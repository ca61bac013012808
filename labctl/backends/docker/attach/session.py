"""A command in a node as the lab's user, or on many workers at once: then the launcher logs in to all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends.docker.agent import IN_NODE
from labctl.backends.docker.engine import Backend
from labctl.backends.state import Container
from labctl.errors import ConfigError
from labctl.model import HERE
from labctl.system import files, process
from labctl.system.mounts import mounted_at

# What docker and shells end with where a command cannot be run: it is not there, or may not be.
NOT_RUN = (126, 127)


class CommandNotFound(ConfigError):
    """The node has no such command; ends with the code of a shell."""

    exit_code = process.NOT_FOUND


class ExecTarget(Struct, frozen=True, kw_only=True):
    """A node's container with its processes, and where in it the person stands: None where that is not mounted."""

    engine: Backend
    container: str
    directory: str | None
    user: str
    """Numeric user and group of the lab's processes in it."""


def here_in(container: Container, moved: tuple[Path, str] | None = None) -> str | None:
    """Where in a container the person's directory is; ``moved`` is a directory here and where its host has it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        # It was removed while they stood in it.
        return None
    if moved and here.is_relative_to(moved[0]):
        here = moved[1] / here.relative_to(moved[0])
    return mounted_at(here, container.mounts, apart=container.host != HERE)


def run(inside: ExecTarget, argv: tuple[str, ...], **options: Any) -> int:
    """Run a command there; options, code and errors as ``Backend.attach``."""
    return inside.engine.attach(inside.container, argv, user=inside.user, workdir=inside.directory, **options)


def lacks(inside: ExecTarget, command: str) -> bool:
    """Whether the node has no such command, for what ended with one of NOT_RUN."""
    look = ("sh", "-c", IN_NODE, "sh", "has_command", command)
    return inside.engine.exec(inside.container, look, user=inside.user, workdir=inside.directory).code == 1


PROGRAM = "LABCTL_FANOUT"
RUN_IT = f"import os; exec(os.environ.pop({PROGRAM!r}))"


def run_on_nodes(launcher: ExecTarget, nodes: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Run it on these workers, all where none is named; returns the largest of their codes, 255 of one not reached.

    It reads nothing; each line of its output is marked with the node. Signals, and the death of this process, end it
    everywhere, as what runs in one node.
    """
    # It is handed over, so any image will do; not as an argument, or every list of processes would show it in full.
    program = files.path("docker", "fanout.py").read_text(encoding="utf-8")
    argv = ("/usr/bin/python3", "-I", "-c", RUN_IT, ",".join(nodes), *command)
    return run(launcher, argv, secret_env={PROGRAM: program}, stdin="none")
