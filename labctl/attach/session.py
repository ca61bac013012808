"""One command on many workers at once: the launcher logs in to all of them, and labctl enters the launcher alone."""

from __future__ import annotations

import json
import secrets
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from labctl.engines.agent import AGENT
from labctl.errors import ConfigError, HostError
from labctl.system import files, process

# What the agent knows a run's processes by; its value here is a mark of one command.
RUN_VARIABLE = "LABCTL_RUN_ID"
# Seconds between TERM and KILL for what a killed labctl has left.
GRACE = "2"
# Docker holds the first key back until the next, and always has such a sequence: its own begins with Ctrl-P.
DETACH_KEYS = "ctrl-^,ctrl-_,ctrl-^,ctrl-_"
# Seconds for docker to say what a container is.
LOOKING = 60
# What docker itself ends with when it lets go of a command.
LET_GO = 1
# What docker and shells end with where a command cannot be run: it is not there, or may not be.
NOT_RUN = (126, 127)
# Runs in a node's container.
SCRIPT = Path(__file__).with_name("in_node.sh").read_text(encoding="utf-8")


class CommandNotFound(ConfigError):
    """The node has no such command; ends with the code of a shell."""

    exit_code = process.NOT_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecTarget:
    """A node's container with its processes, and where in it the person stands: None where that is not mounted."""

    container: str
    directory: str | None
    user: str
    """Numeric user and group of the lab's processes in it."""
    docker: tuple[str, ...] = ("docker",)
    """The command that reaches its daemon."""
    owner: str = ""
    """The lab's directory, as its label says."""
    maker: str = ""
    """``person@machine`` that made it, as its label says."""
    paused: bool = False


def look(
    lab: str,
    container: str,
    docker: tuple[str, ...] = ("docker",),
    moved: tuple[Path, str] | None = None,
    *,
    apart: bool = False,
) -> ExecTarget | None:
    """The container, if it runs and is the lab's. Asked of the program that is called next: the SDK takes longer.

    ``moved`` is a directory here and where the container's host has it, ``apart`` whether that is another machine.
    HostError with docker's own words where it does not say.
    """
    shown = process.run((*docker, "container", "inspect", container), timeout=LOOKING, check=False)
    if shown.code and "no such container" not in shown.err.lower():
        raise HostError(f"docker container inspect {container}: {shown.err.strip()}", hint="labctl doctor")
    found = json.loads(shown.out or "[]")
    # A paused one has its processes too.
    if not found or found[0]["Config"]["Labels"].get("labctl.lab") != lab or not found[0]["State"]["Running"]:
        return None
    owner = found[0]["Config"]["Labels"].get("labctl.directory", "")
    variables = dict(one.partition("=")[::2] for one in found[0]["Config"]["Env"])
    mounts = ((mount["Source"], mount["Destination"]) for mount in found[0]["Mounts"] if mount["Type"] == "bind")
    try:
        here = Path.cwd()
        if moved and here.is_relative_to(moved[0]):
            here = moved[1] / here.relative_to(moved[0])
        directory = mounted_at(here, mounts, apart=apart)
    except FileNotFoundError:
        # The person's directory was removed while they stood in it.
        directory = None
    return ExecTarget(
        container=container,
        directory=directory,
        user=f"{variables['LAB_UID']}:{variables['LAB_GID']}",
        docker=docker,
        owner=owner,
        maker=found[0]["Config"]["Labels"].get("labctl.owner", ""),
        paused=found[0]["State"].get("Paused", False),
    )


def mounted_at(directory: Path, mounts: Iterable[tuple[str, str]], *, apart: bool = False) -> str | None:
    """Where a directory of the host is in a container that has these mounts (source and target), None if nowhere.

    Links on the way to a source are this machine's, unless the host stands ``apart``.
    """
    holding = [(Path(source) if apart else Path(source).resolve(), target) for source, target in mounts]
    holding = [(source, target) for source, target in holding if directory.is_relative_to(source)]
    if not holding:
        return None
    source, target = max(holding, key=lambda mount: len(mount[0].parts))
    return str(PurePosixPath(target, directory.relative_to(source)))


def run(
    inside: ExecTarget,
    argv: tuple[str, ...],
    *,
    terminal: bool,
    environment: tuple[str, ...] = (),
    hidden: Mapping[str, str] | None = None,
    reads: bool = True,
) -> int:
    """Run a command on this process's own input and output; returns its code, 128+n where signal n ended it.

    One that ``reads`` nothing leaves what is to be read here alone. Its ``hidden`` variables are in no argument.

    INT, TERM and HUP reach it and all that it started. If this process is killed, they are ended.
    HostError when the connection to it is lost, also by docker's own keys for that: then they are ended too.
    """
    mark = new_mark()
    flags = ("-it", "--detach-keys", DETACH_KEYS) if terminal else ("-i",) if reads else ()
    with process.guarded(agent(inside, "reap", mark, GRACE)), process.begun() as begin:

        def forward(number: signal.Signals) -> None:
            begin(agent(inside, "signal", mark, str(int(number))))

        words = (*entering(inside, mark, flags, (*environment, *(hidden or ()))), *argv)
        code = process.attached(words, forward, env=hidden)
        if terminal and code == LET_GO and still_there(inside, mark):
            raise HostError(f"docker let go of {shlex.join(argv)} in {inside.container}; it is ended")
        return code


def lacks(inside: ExecTarget, command: str) -> bool:
    """Whether the node has no such command, for what ended with one of NOT_RUN."""
    where = ("--workdir", inside.directory) if inside.directory else ()
    look = ("sh", "-c", SCRIPT, "sh", "has_command", command)
    return (
        process.run((*inside.docker, "exec", "--user", inside.user, *where, inside.container, *look), check=False).code
        == 1
    )


def follow(inside: ExecTarget, argv: tuple[str, ...], on_line: Callable[[str], None], hidden: Mapping[str, str]) -> int:
    """Run a command that reads nothing, handing on each line; returns its code. Its ``hidden`` variables are in no
    argument. Whatever ends this, KeyboardInterrupt or SIGKILL, ends the command and all that it started too."""
    mark = new_mark()
    with process.guarded(agent(inside, "reap", mark, GRACE)):
        words = (*entering(inside, mark, (), tuple(hidden)), *argv)
        return process.stream(words, on_line, env=hidden, check=False).code


def entering(inside: ExecTarget, mark: str, flags: tuple[str, ...], environment: tuple[str, ...]) -> tuple[str, ...]:
    """The docker command that runs something in a node as the lab's user, in their directory, and marks it."""
    variables = (word for one in (f"{RUN_VARIABLE}={mark}", *environment) for word in ("--env", one))
    where = ("--workdir", inside.directory) if inside.directory else ()
    return execute_in(inside, *flags, *where, *variables)


def still_there(inside: ExecTarget, mark: str) -> bool:
    """Whether the marked command runs; what it left in the background does not count."""
    look = ("sh", "-c", SCRIPT, "sh", "runs", f"{RUN_VARIABLE}={mark}")
    return process.run((*execute_in(inside), *look), check=False).code == 0


def agent(inside: ExecTarget, *words: str) -> tuple[str, ...]:
    """The command by which the node's own agent does something to what was marked."""
    return (*execute_in(inside), *AGENT, *words)


def execute_in(inside: ExecTarget, *options: str) -> tuple[str, ...]:
    """The docker command that runs what follows it in a node as the lab's user."""
    return (*inside.docker, "exec", *options, "--user", inside.user, inside.container)


def new_mark() -> str:
    return f"person-{secrets.token_hex(8)}"


PROGRAM = "LABCTL_FANOUT"
RUN_IT = f"import os; exec(os.environ.pop({PROGRAM!r}))"


def run_on_nodes(launcher: ExecTarget, nodes: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Run it on these workers, all where none is named; returns the largest of their codes, 255 of one not reached.

    It reads nothing; each line of its output is marked with the node. Signals, and the death of this process, end it
    everywhere, as ``attach.run`` ends what runs in one node.
    """
    # It is handed over, so any image will do; not as an argument, or every list of processes would show it in full.
    program = files.path("docker", "fanout.py").read_text(encoding="utf-8")
    argv = ("/usr/bin/python3", "-I", "-c", RUN_IT, ",".join(nodes), *command)
    return run(launcher, argv, terminal=False, hidden={PROGRAM: program}, reads=False)
