"""shell, exec, logs."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from labctl import model, naming
from labctl.attach import session
from labctl.attach.target import entered, meant, reached
from labctl.cli.common import HERE, Directory, Setting, answering, named
from labctl.cli.output import say
from labctl.errors import ConfigError, Interrupted
from labctl.system import process

NodeOption = Annotated[str, typer.Option("--node", "-n", help="launcher, or a worker.")]


def shell_command(
    node: Annotated[str, typer.Argument(help="launcher, or a worker.")] = model.LAUNCHER,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output, entered(*named(directory, output, setting), node) as inside:
        if not on_terminal():
            raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")
        resume = () if inside.directory else ("LABCTL_RESUME=1",)
        sys.exit(session.run(inside, ("bash",), stdin="terminal", environment=resume))


def exec_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command and its arguments.")],
    node: Annotated[
        str, typer.Option("--node", "-n", help="launcher, or a worker; or workers: worker-0,worker-3.")
    ] = model.LAUNCHER,
    everywhere: Annotated[
        bool, typer.Option("--all", help="On all workers at once; lines are marked with the node.")
    ] = False,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output:
        if everywhere and node != model.LAUNCHER:
            raise ConfigError("--all and -n: one or the other", hint=f"labctl exec --all -- {shlex.join(command)}")
        several = everywhere or "," in node
        where, name = named(directory, output, setting)
        with entered(where, name, model.LAUNCHER if several else node) as inside:
            if several:
                sys.exit(session.run_on_nodes(inside, () if everywhere else tuple(node.split(",")), tuple(command)))
            code = session.run(inside, tuple(command), stdin="terminal" if on_terminal() else "pipe")
            if code in session.NOT_RUN and session.lacks(inside, command[0]):
                hint = meant(where, *command)
                output.error(ConfigError(f"{node} has no command `{command[0]}`", hint=hint, node=node))
                code = process.NOT_FOUND
            sys.exit(code)


def jupyter_command(
    node: Annotated[
        str, typer.Option("--node", "-n", help="launcher, or a worker: they have the devices.")
    ] = "worker-0",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of 127.0.0.1; by default the first free from 8888.")
    ] = None,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output:
        from labctl.attach import jupyter as notebook

        where, name = named(directory, output, setting)
        if where.settings().text("LAB_HOSTS"):
            hint = f"labctl exec -n {node} -- jupyter lab, and `ssh -L` to its port"
            raise ConfigError("labctl jupyter serves from nodes on this machine, and LAB_HOSTS lists others", hint=hint)
        with entered(where, name, node) as inside:
            try:
                notebook.serve(where, inside, node, port, say)
            except KeyboardInterrupt:
                output.note("stopped")
                sys.exit(Interrupted.exit_code)


def logs_command(
    node: Annotated[str | None, typer.Argument(help="launcher, or a worker; all by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they print.")] = False,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output:
        where, name = named(directory, output, setting)
        color = sys.stdout.isatty()
        try:
            with reached(where, name, node) as engine:
                engine.logs(naming.project_name(name), say, node=node or "", follow=follow, color=color)
        except KeyboardInterrupt:
            sys.exit(Interrupted.exit_code)


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
