"""shell, exec, logs."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from labctl import attach, render, shell
from labctl.cli.common import HERE, Directory, Setting, answering, named
from labctl.containers import Container, elsewhere
from labctl.context import Context
from labctl.errors import ConfigError, HostError, Interrupted
from labctl.output import say

NodeOption = Annotated[str, typer.Option("--node", "-n", help="launcher, or a worker.")]


def shell_command(
    node: Annotated[str, typer.Argument(help="launcher, or a worker.")] = render.LAUNCHER,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output:
        inside = enter(*named(directory, output, setting), node)
        if not on_terminal():
            raise ConfigError("a shell needs a terminal", hint=f"labctl exec -n {node} -- COMMAND")
        resume = () if inside.directory else ("LABCTL_RESUME=1",)
        sys.exit(attach.run(inside, ("bash",), terminal=True, environment=resume))


def exec_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command and its arguments.")],
    node: NodeOption = render.LAUNCHER,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    with answering() as output:
        inside = enter(*named(directory, output, setting), node)
        code = attach.run(inside, tuple(command), terminal=on_terminal())
        if code in attach.NOT_RUN and attach.lacks(inside, command[0]):
            output.error(ConfigError(f"{node} has no command `{command[0]}`", node=node))
            code = shell.NOT_FOUND
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
        from labctl import notebook

        where, name = named(directory, output, setting)
        inside = enter(where, name, node)
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
        plain = () if sys.stdout.isatty() else ("--ansi", "never")
        lines = (
            "docker",
            "compose",
            *plain,
            "-p",
            render.project_name(name),
            "logs",
            *(("--follow",) if follow else ()),
        )
        container_of(where, name, node or render.LAUNCHER)
        shell.replace((*lines, *((node,) if node else ())))


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def enter(where: Context, name: str, node: str) -> attach.Inside:
    """A node's running container; errors say which nodes there are, or what became of this one."""
    inside = attach.look(name, render.container_of(name, node))
    if not inside:
        container = container_of(where, name, node)
        raise HostError(f"{node} is {container.state}", hint=f"labctl logs {node}; labctl up", node=node)
    require_own(where, name, inside.owner)
    if inside.paused:
        raise HostError(f"{node} is paused", hint=f"docker unpause {inside.container}", node=node)
    return inside


def container_of(where: Context, name: str, node: str) -> Container:
    """A node's container, in whatever state; HostError when there is none, or it is another directory's."""
    from labctl.engines.docker_engine import DockerEngine

    observed = DockerEngine().observe(name)
    container = observed.container(node)
    if container:
        require_own(where, name, container.directory)
        return container
    if observed.containers:
        names = ", ".join(one.node for one in observed.containers)
        raise ConfigError(f"lab {name} has no node `{node}`", hint=f"it has {names}", node=node)
    raise HostError(f"lab {name} is down", hint="labctl up", node=node)


def require_own(where: Context, name: str, directory: str) -> None:
    """HostError for a container that another directory's lab of this name has, as its label says."""
    if owner := elsewhere(directory, where.directory):
        hint = f"to go into that one: -C {shlex.quote(owner.name)}; for a lab here, set another LAB_NAME in .env"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)
