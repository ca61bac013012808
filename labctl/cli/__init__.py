"""The command line: flags -> one flow -> output. Only this package exits and reads the process environment.

Only the module of the command is imported; `labctl --help` imports none.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labctl.cli.output import Output, say, write
from labctl.errors import ConfigError, Interrupted, OutputClosed

if TYPE_CHECKING:
    import typer


# name -> (module with a function of that name, one line of help)
COMMANDS = {
    "init": ("host", "create a lab directory: .env, hosts.txt, hostfiles and workloads"),
    "setup": ("host", "install Docker Engine, buildx and compose on this host"),
    "doctor": ("host", "diagnose hosts, Docker and the lab, and suggest fixes"),
    "devices": ("devices", "list accelerators, cores and fabrics of the hosts, and the node that gets each"),
    "config": ("host", "show effective settings and their origin"),
    "render": ("lab", "write the files of every node without starting it"),
    "build": ("lab", "build the lab's image, or a workload's"),
    "up": ("lab", "create and start the lab, and wait until every worker is reachable"),
    "k8s": ("k8s", "write, submit or import jobs for Kubernetes: MPIJob or TrainJob"),
    "bundle": ("bundle", "save the lab with its image as one file, or load it, for offline use"),
    "keys": ("lab", "replace the lab's ssh keys"),
    "status": ("lab", "show the lab's containers and their health"),
    "devcontainer": ("lab", "write the devcontainer.json that attaches VS Code to the launcher"),
    "shell": ("exec", "open a shell in the launcher or a node"),
    "exec": ("exec", "run a command in the launcher, a node or all workers"),
    "jupyter": ("exec", "serve notebooks from a node on 127.0.0.1, until Ctrl-C"),
    "logs": ("exec", "show container logs, or what a run has printed"),
    "workloads": ("run", "list workloads"),
    "cache": ("cache", "download models and datasets, a workload's or by name, and fill the hosts' caches"),
    "fit": ("fit", "estimate a workload's memory and whether it fits"),
    "run": ("run", "run a workload and check its criteria"),
    "attach": ("run", "follow a run that was detached, or whose labctl is gone, to its end"),
    "top": ("top", "watch a run: steps, loss, throughput, time left, and what its nodes and devices do"),
    "stop": ("run", "end a run"),
    "runs": ("run", "list runs, or remove old ones"),
    "show": ("run", "show the result of a run"),
    "compare": ("results", "say what differed between runs, what it did, and whether that is more than noise"),
    "report": ("results", "write a page with the verdict, curves, machine and log of runs, and its charts as PNG"),
    "export": ("results", "write a run for TensorBoard, or as JUnit XML"),
    "replay": ("reproduce", "run a recorded run again with the same everything, or say what cannot be had"),
    "freeze": ("reproduce", "write what the lab is now into lab.lock: images, packages, files, data, devices"),
    "verify": ("reproduce", "say what differs from lab.lock, and on which host or node"),
    "hostfiles": ("batch", "write a set of hostfiles, each for some machines of a list"),
    "batch": ("batch", "run a workload on each hostfile of a set, those on disjoint nodes at once"),
    "bisect": ("batch", "find slow or failing nodes and links by runs on groups of nodes"),
    "eval": ("eval", "judge the logs of a batch, per job and per node"),
    "validate": ("validate", "check hosts, network and devices with real runs, and name the bad node"),
    "baseline": ("validate", "record the figures of a validation, for later ones to compare with"),
    "down": ("lab", "remove the lab's containers and network"),
    "clean": ("lab", "remove the lab with its keys and rendered files; runs are kept"),
}

USAGE = """\
labctl: a Docker Compose lab for distributed training

usage: labctl COMMAND [OPTIONS] [ARGS]

{commands}

labctl COMMAND --help for options; --version; --install-completion for shell completion.
exit codes: 0 pass, 2 usage or settings, 3 environment, 4 workload failed, 5 criteria not met,
            124 timed out, 130 interrupted, 1 a bug in labctl
"""


def main() -> None:
    """The console script."""
    # What a command makes lives to its end: to look for garbage in it after every 700 objects takes 10 ms.
    gc.set_threshold(50_000)
    try:
        sys.exit(dispatch(sys.argv[1:]))
    except OutputClosed:
        sys.exit(OutputClosed.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)


def dispatch(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    if completing():
        return execute(set(COMMANDS))
    if arguments in ([], ["--help"], ["-h"], ["help"]):
        print_usage()
    elif arguments == ["--version"]:
        from importlib.metadata import version

        say(f"labctl {version('labctl')}")
    else:
        return execute({arguments[0]} if arguments[0] in COMMANDS else set(COMMANDS))
    return 0


def completing() -> bool:
    """Whether a shell asks for completions, which it does through the environment."""
    return any(name.startswith("_LABCTL") for name in os.environ)


def execute(names: set[str]) -> int:
    """Run the command line with these commands; a usage error is JSON with --json."""
    import typer

    try:
        return int(application(names)(prog_name="labctl", standalone_mode=False) or 0)
    except _usage_error() as error:
        from labctl.cli.usage import correct

        message, hint = correct(error.format_message(), sys.argv[1:], COMMANDS)
        if "--json" in sys.argv:
            Output(as_json=True).error(ConfigError(message, hint=hint or "labctl --help"))
        else:
            if message != error.format_message():
                error.message = message
            error.show()
            if hint:
                write(f"hint: {hint}", sys.stderr)
        return ConfigError.exit_code
    except typer.Abort:
        return Interrupted.exit_code


def _usage_error() -> type[Any]:
    """Typer's usage error, which has no public name."""
    import typer

    return typer.BadParameter.__bases__[0]


def print_usage() -> None:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    say(USAGE.format(commands="\n".join(lines)).rstrip())


def application(names: set[str]) -> typer.Typer:
    """A Typer application with these commands: all of them for completion and for error messages."""
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
            commands = import_module(f"labctl.cli.{module}")
            function = getattr(commands, f"{name}_command")
            if isinstance(function, typer.Typer):
                app.add_typer(function, name=name, help=text[0].upper() + text[1:] + ".")
                continue
            options = {"ignore_unknown_options": True, "allow_interspersed_args": False} if name == "exec" else {}
            cls = commands.WithArguments if name in ("run", "batch", "bisect") else None
            app.command(name, cls=cls, help=text[0].upper() + text[1:] + ".", context_settings=options)(function)
    return app
