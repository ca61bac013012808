"""The command line: flags -> one flow -> output. The only place that exits and that reads the process's environment.

Only the command that was asked for is imported; the list of commands is printed without any of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labctl.cli.output import Output, say
from labctl.errors import ConfigError, Interrupted, OutputClosed

if TYPE_CHECKING:
    import typer


# name -> (module with a function of that name, one line of help)
COMMANDS = {
    "init": ("host", "write .env, hosts.txt, hostfiles and workloads into a directory"),
    "setup": ("host", "make this host able to run a lab: Docker Engine, buildx, compose"),
    "doctor": ("host", "diagnose hosts, Docker and the lab, and suggest fixes"),
    "devices": ("devices", "accelerators, cores and fabrics of this host, and the node that gets each"),
    "config": ("host", "the settings in force and where each came from"),
    "render": ("lab", "write the files of every node and stop"),
    "build": ("lab", "build the lab's image, or a workload's"),
    "up": ("lab", "bring the lab up, until the launcher reaches every worker"),
    "bundle": ("bundle", "save the lab with its image into one file, or load it, for a site without network"),
    "status": ("lab", "what runs, as Docker says"),
    "devcontainer": ("lab", "write what attaches VS Code to the launcher"),
    "shell": ("exec", "a prompt in the launcher, or in a node, in the directory where you stand"),
    "exec": ("exec", "run one command in the launcher, or in a node"),
    "jupyter": ("exec", "serve notebooks from a node on a loopback port, with a token, until Ctrl-C"),
    "logs": ("exec", "what the containers print"),
    "workloads": ("run", "list what can be run"),
    "cache": ("cache", "fetch a workload's weights and data ahead into the shared cache"),
    "fit": ("fit", "the memory that a workload takes, part by part, and whether it is there"),
    "run": ("run", "run a workload and judge it"),
    "runs": ("run", "list the runs"),
    "show": ("run", "one run in full"),
    "down": ("lab", "remove the lab's containers and network"),
    "clean": ("lab", "down, and remove the lab's keys and rendered files"),
}

USAGE = """\
labctl: a Docker Compose lab for distributed training

usage: labctl COMMAND [OPTIONS] [ARGS]

{commands}

labctl COMMAND --help says more. --version; --install-completion for the shell's.
exit codes: 0 pass, 2 usage or settings, 3 environment, 4 the workload broke, 5 it missed its criteria,
            124 time out, 130 interrupted, 1 a bug in labctl
"""


def main() -> None:
    """The console script."""
    try:
        sys.exit(dispatch(sys.argv[1:]))
    except OutputClosed:
        sys.exit(OutputClosed.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)


def dispatch(arguments: list[str]) -> int:
    """The exit code of a command line; only the module of its command is imported."""
    if completing():
        return execute(set(COMMANDS))
    if arguments in ([], ["--help"], ["-h"], ["help"]):
        print_usage()
    elif arguments == ["--version"]:
        from importlib.metadata import version

        say(f"labctl {version('labctl')}")
    else:
        asked = next((word for word in arguments if word in COMMANDS), None)
        return execute({asked} if asked and arguments[0] == asked else set(COMMANDS))
    return 0


def completing() -> bool:
    """Whether a shell asks for completions, which it does through the environment and without arguments."""
    return any(name.startswith("_LABCTL") for name in os.environ)


def execute(names: set[str]) -> int:
    """Run the command line with these commands; a usage error is said in the form that was asked for."""
    import typer

    try:
        return int(application(names)(prog_name="labctl", standalone_mode=False) or 0)
    except _usage_error() as error:
        if "--json" in sys.argv:
            said = error.format_message()
            Output(as_json=True).error(ConfigError(said, hint="labctl --help"))
        else:
            error.show()
        return ConfigError.exit_code
    except typer.Abort:
        return Interrupted.exit_code


def _usage_error() -> type[Any]:
    """What Typer raises for a command line it cannot use; it has no public name."""
    import typer

    return typer.BadParameter.__bases__[0]


def print_usage() -> None:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    say(USAGE.format(commands="\n".join(lines)).rstrip())


def application(names: set[str]) -> typer.Typer:
    """A Typer application with these commands; all of them where completion or an error message needs them."""
    import typer

    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=len(names) > 1 or completing(),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)
    for name, (module, text) in COMMANDS.items():
        if name in names:
            function = getattr(import_module(f"labctl.cli.{module}"), f"{name}_command")
            if isinstance(function, typer.Typer):
                app.add_typer(function, name=name, help=text[0].upper() + text[1:] + ".")
                continue
            options = {"ignore_unknown_options": True, "allow_interspersed_args": False} if name == "exec" else {}
            app.command(name, help=text[0].upper() + text[1:] + ".", context_settings=options)(function)
    return app
