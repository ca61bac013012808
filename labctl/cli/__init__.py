"""Command line: parse flags, run one flow, print its answer. Only this package exits and reads the environment.

Only the module of the command that runs is imported; `labctl --help` imports none.
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


COMMANDS = {
    "init": ("host", "create a lab directory: .env, hosts.txt, hostfiles and workloads"),
    "setup": ("host", "install Docker Engine, buildx and compose on this host"),
    "doctor": ("host", "diagnose hosts, Docker and the lab, and suggest fixes"),
    "health": ("health", "tell whether the hosts are fit to run: hardware, links, kernel, disks, clocks"),
    "devices": ("devices", "list accelerators, cores and fabrics of the hosts, and the node of each"),
    "config": ("host", "show effective settings and their origin"),
    "render": ("lab", "write the files of all nodes without starting them"),
    "build": ("lab", "build the lab's image, or a workload's"),
    "up": ("lab", "create and start the lab, and wait until every worker is reachable"),
    "k8s": ("k8s", "write, submit or import jobs for Kubernetes: MPIJob or TrainJob"),
    "bundle": ("bundle", "save the lab with its image to a file, or load it, for offline use"),
    "keys": ("lab", "replace the lab's ssh keys"),
    "status": ("lab", "show the lab's containers and their health"),
    "devcontainer": ("lab", "write a devcontainer.json that attaches VS Code to the launcher"),
    "shell": ("exec", "open a shell in the launcher or a node"),
    "exec": ("exec", "run a command in the launcher, a node or all workers"),
    "jupyter": ("exec", "serve notebooks from a node on 127.0.0.1, until Ctrl-C"),
    "logs": ("exec", "show the logs of containers, or the output of a run"),
    "workloads": ("run", "list workloads"),
    "cache": ("cache", "download models and datasets, of a workload or by name, and copy them to the hosts"),
    "fit": ("fit", "tell if a workload fits in memory, and which settings make it fit"),
    "run": ("run", "run a workload and check its criteria"),
    "attach": ("run", "follow a run that is detached, or whose labctl has ended"),
    "top": ("top", "watch a run: steps, loss, throughput, time left, and usage of nodes and devices"),
    "stacks": ("run", "tell what the ranks of a run wait for, and where in their code they are"),
    "stop": ("run", "stop a run"),
    "runs": ("run", "list runs, or remove old ones"),
    "show": ("run", "show the result of a run"),
    "compare": ("results", "compare runs: settings that differ, and whether their metrics differ more than usual"),
    "report": ("results", "write an HTML report of runs: verdict, curves, machine and log; charts also as PNG"),
    "export": ("results", "export a run to TensorBoard or JUnit XML"),
    "replay": ("reproduce", "repeat a run with the recorded image, code, settings and data, or list what has changed"),
    "freeze": ("reproduce", "record images, packages, files, data and devices of the lab in lab.lock"),
    "verify": ("reproduce", "compare the lab with lab.lock"),
    "hostfiles": ("batch", "split a list of machines into hostfiles, one per group"),
    "batch": ("batch", "run a workload on each hostfile of a set, in parallel on disjoint nodes"),
    "bisect": ("batch", "find slow or failing nodes and links by running groups of nodes"),
    "eval": ("eval", "judge the logs of a batch, per job and per node"),
    "validate": ("validate", "check hosts, network and devices with real runs, and find bad nodes"),
    "baseline": ("validate", "validate, and record the figures for later validations to compare with"),
    "down": ("lab", "remove the lab's containers and network"),
    "clean": ("lab", "remove the lab with its keys and rendered files; runs are kept"),
}
"""Module and line of help per command; the module has a function ``NAME_command``."""

USAGE = """\
labctl: a Docker Compose lab for distributed training

usage: labctl COMMAND [OPTIONS] [ARGS]

{commands}

labctl COMMAND --help for options; --version; --install-completion for shell completion.
exit codes: 0 pass, 2 usage or settings, 3 environment, 4 workload failed, 5 criteria not met, 6 unsure,
            7 retries that get no further, 124 timed out, 130 interrupted, 1 a bug in labctl
"""


def program() -> None:
    """Run the command line with open streams and exit by os._exit, without Python's slow teardown."""
    # Python has None for a stream that is closed.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(end.code, int):
            os._exit(end.code)
        raise


def main() -> None:
    """Run sys.argv and exit with its code, also after Ctrl-C or when the reader of the output is gone."""
    # Objects of a command live to its end: collecting garbage after every 700 of them takes 10 ms.
    gc.set_threshold(50_000)
    try:
        sys.exit(dispatch(sys.argv[1:]))
    except OutputClosed:
        sys.exit(OutputClosed.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)


def dispatch(arguments: list[str]) -> int:
    """Print help or version, or run the named command with the imports it needs; return the exit code."""
    if completing():
        return execute(set(COMMANDS))
    if arguments in ([], ["--help"], ["-h"], ["help"]):
        print_usage()
    elif arguments == ["--version"]:
        from labctl.cli.version import print_version

        print_version()
    else:
        return execute({arguments[0]} if arguments[0] in COMMANDS else set(COMMANDS))
    return 0


def completing() -> bool:
    """Tell if a shell asks for completions, which it does by environment variables."""
    return any(name.startswith("_LABCTL") for name in os.environ)


def execute(names: set[str]) -> int:
    """Run sys.argv with only these commands; return its exit code, or exit. Usage errors are JSON with --json."""
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
    """Return Typer's private base class of usage errors."""
    import typer

    return typer.BadParameter.__bases__[0]


def print_usage() -> None:
    """Print labctl's usage to stdout: all commands with a line of help each, and the exit codes."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    say(USAGE.format(commands="\n".join(lines)).rstrip())


def application(names: set[str]) -> typer.Typer:
    """Return a Typer application with only the commands of these names; completion needs all of them."""
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
