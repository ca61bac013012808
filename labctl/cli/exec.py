"""Commands shell, exec, jupyter and logs."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, Setting, answering, context
from labctl.cli.output import has_colors, say, say_printed
from labctl.errors import ConfigError, Interrupted
from labctl.model import LAUNCHER

NODE = "Launcher or a worker."
NODES = re.compile(r"launcher|worker-\d+(,worker-\d+)*")
"""Pattern of the nodes that `exec` takes."""


def shell_command(
    node: Annotated[str, typer.Argument(metavar="NODE", autocompletion=complete.node, help=NODE)] = LAUNCHER,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    """`labctl shell`: open a shell in a node; exit with its code."""
    with answering() as output:
        sys.exit(flows.shell(context(directory, output, setting), node, terminal=on_terminal()))


def exec_command(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[NODE] -- COMMAND",
            autocompletion=complete.node,
            help="Launcher, a worker or several, as for -n; then the command with its arguments.",
        ),
    ],
    node: Annotated[
        str,
        typer.Option(
            "--node",
            "-n",
            metavar="NODE",
            autocompletion=complete.node,
            help="Launcher, a worker, or several workers: worker-0,worker-3.",
        ),
    ] = LAUNCHER,
    everywhere: Annotated[
        bool, typer.Option("--all", help="Run on all workers in parallel; lines are prefixed with the node.")
    ] = False,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    """`labctl exec`: run a command in nodes; exit with its code."""
    with answering() as output:
        lab = context(directory, output, setting)
        if command[1:2] == ["--"] and NODES.fullmatch(command[0]) and node == LAUNCHER:
            node, _, *command = command
        if everywhere:
            output.begin(f"running {shlex.join(command)} on all workers")
        sys.exit(flows.execute(lab, tuple(command), node, everywhere=everywhere, terminal=on_terminal()))


def jupyter_command(
    node: Annotated[
        str, typer.Option("--node", "-n", metavar="NODE", autocompletion=complete.node, help=NODE)
    ] = "worker-0",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Port on 127.0.0.1 (default: first free from 8888)."),
    ] = None,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    """`labctl jupyter`: serve notebooks from a node until Ctrl-C."""
    with answering() as output:
        try:
            flows.jupyter(context(directory, output, setting), node, port, say)
        except KeyboardInterrupt:
            output.note("stopped")
            sys.exit(Interrupted.exit_code)


def logs_command(
    node: Annotated[
        str | None,
        typer.Argument(metavar="NODE", autocompletion=complete.node, help="Launcher or a worker (default: all)."),
    ] = None,
    run: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            autocompletion=complete.run,
            help="Show the output of this run: `latest`, -1, or an id or its end.",
        ),
    ] = "",
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show only this rank of the run.")] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Show the time of each line of the run.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output.")] = False,
    directory: Directory = HERE,
    setting: Setting = None,
) -> None:
    """`labctl logs`: show logs of containers, or the output of a run."""
    with answering() as output:
        try:
            lab = context(directory, output, setting)
            if not run and (timestamps or rank is not None):
                asked = f"--rank {rank}" if rank is not None else "--timestamps"
                raise ConfigError(f"{asked} is of a run", hint=f"labctl logs --run latest {asked}")
            if run:
                flows.run_logs(lab, run, say_printed, follow=follow, rank=rank, timestamps=timestamps)
            else:
                flows.logs(lab, node, say_printed, follow=follow, colors=has_colors(sys.stdout))
        except KeyboardInterrupt:
            sys.exit(Interrupted.exit_code)


def on_terminal() -> bool:
    """Tell if both stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
