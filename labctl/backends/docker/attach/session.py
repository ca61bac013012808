"""Run a command in a node as the lab's user, or on many workers at once, to which the launcher logs in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends.docker.agent import IN_NODE
from labctl.backends.docker.engine import Engine
from labctl.backends.state import Container
from labctl.errors import ConfigError
from labctl.model import HERE
from labctl.system import files, process
from labctl.system.mounts import mounted_at

# Exit codes of docker and shells if a command is not executable or not found.
NOT_RUN = (126, 127)


class CommandNotFound(ConfigError):
    """The node has no such command; labctl ends with the exit code of a shell."""

    exit_code = process.NOT_FOUND


class ExecTarget(Struct, frozen=True, kw_only=True):
    """A node's container, the user of its processes, and the user's directory in it: None if not mounted."""

    engine: Engine
    container: str
    directory: str | None
    user: str
    """Numeric user and group of the lab's processes in it."""


def here_in(container: Container, moved: tuple[Path, str] | None = None) -> str | None:
    """Return the path of the current directory in a container, or None if it is removed or not mounted there.

    ``moved``: a directory of this machine, and its path on the container's host.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        # The current directory was removed.
        return None
    if moved and here.is_relative_to(moved[0]):
        here = moved[1] / here.relative_to(moved[0])
    return mounted_at(here, container.mounts, apart=container.host != HERE)


def run(inside: ExecTarget, argv: tuple[str, ...], **options: Any) -> int:
    """Run a command in a node's container by ``Engine.attach``, with its options; return the exit code."""
    return inside.engine.attach(inside.container, argv, user=inside.user, workdir=inside.directory, **options)


def lacks(inside: ExecTarget, command: str) -> bool:
    """Return True if a node does not have a command; asked after a command ended with an exit code of NOT_RUN."""
    look = ("sh", "-c", IN_NODE, "sh", "has_command", command)
    return inside.engine.exec(inside.container, look, user=inside.user, workdir=inside.directory).code == 1


PROGRAM = "LABCTL_FANOUT"
RUN_IT = f"import os; exec(os.environ.pop({PROGRAM!r}))"


def run_on_nodes(launcher: ExecTarget, nodes: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Run a command on these workers, on all if none is named; return the largest exit code, 255 for unreachable.

    Its input is empty; each line of its output is marked with the node. Signals, and the death of this process, end it
    everywhere, as in a single node.
    """
    # Passed along, so that any image will do; by environment, as process lists show arguments in full.
    program = files.path("docker", "fanout.py").read_text(encoding="utf-8")
    argv = ("/usr/bin/python3", "-I", "-c", RUN_IT, ",".join(nodes), *command)
    return run(launcher, argv, secret_env={PROGRAM: program}, stdin="none")
