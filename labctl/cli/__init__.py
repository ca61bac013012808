"""Command line: parse flags, run one flow, print its answer. Only this package exits and reads the environment.

Only the module of the command that runs is imported; `labctl --help` imports none.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labctl.cli.help import listed, page_width
from labctl.cli.output import Output, say, wrap, write
from labctl.errors import ConfigError, Interrupted, OutputClosed, OutputFailed

if TYPE_CHECKING:
    import typer


COMMANDS = {
    "init": ("host", "create a lab directory: .env, hosts.txt, hostfiles and workloads"),
    "setup": ("host", "install Docker Engine, buildx and compose on this host"),
    "doctor": ("host", "diagnose hosts, Docker and the lab, and suggest fixes"),
    "health": ("health", "check that hosts are fit to run: hardware, kernel, disks, clocks"),
    "devices": ("devices", "list accelerators, cores and fabrics, and the node of each"),
    "config": ("host", "show the settings that are set or decided, and their origin"),
    "render": ("lab", "write the files of all nodes without starting them"),
    "build": ("lab", "build the lab's image, or a workload's"),
    "up": ("lab", "create and start the lab, and wait until workers are reachable"),
    "k8s": ("k8s", "write, submit or import jobs for Kubernetes: MPIJob or TrainJob"),
    "bundle": ("bundle", "save the lab with its image to a file, and load it offline"),
    "keys": ("lab", "replace the lab's ssh keys"),
    "status": ("lab", "show the lab's containers and their health"),
    "devcontainer": ("lab", "write a devcontainer.json that attaches VS Code to the launcher"),
    "shell": ("exec", "open a shell in the launcher or a node"),
    "exec": ("exec", "run a command in the launcher, a node or all workers"),
    "jupyter": ("exec", "serve notebooks from a node on 127.0.0.1, until Ctrl-C"),
    "logs": ("exec", "show the logs of containers, or the output of a run"),
    "workloads": ("run", "list workloads"),
    "cache": ("cache", "download models and datasets, and copy them to the hosts"),
    "fit": ("fit", "tell if a workload fits in memory, and what makes it fit"),
    "run": ("run", "run a workload and check its criteria"),
    "attach": ("run", "follow a detached run until it ends"),
    "top": ("top", "watch a run: steps, loss, throughput, time left, nodes, devices"),
    "stacks": ("run", "show what the ranks of a run wait for, and where in their code"),
    "stop": ("run", "stop a run"),
    "runs": ("runs", "list runs, or remove old ones"),
    "show": ("run", "show the result of a run"),
    "note": ("note", "add a note to a run, or print it"),
    "compare": ("results", "compare runs: settings that differ, and whether their metrics differ more than usual"),
    "ui": ("ui", "show runs and the cluster in a browser; serves on 127.0.0.1 until Ctrl-C"),
    "report": ("results", "write an HTML report of runs: verdict, curves, machine and log"),
    "export": ("results", "export a run to CSV, TensorBoard, MLflow or JUnit XML"),
    "replay": ("reproduce", "repeat a run with the recorded image, code, settings and data, or list what has changed"),
    "freeze": ("reproduce", "record images, packages, files, data and devices in lab.lock"),
    "verify": ("reproduce", "compare the lab with lab.lock"),
    "hostfiles": ("batch", "split a list of machines into hostfiles, one per group"),
    "batch": ("batch", "run a workload on each hostfile of a directory, in parallel"),
    "bisect": ("batch", "find slow or failing nodes and links by running groups of nodes"),
    "eval": ("eval", "judge the logs of a batch, per job and per node"),
    "validate": ("validate", "check hosts, network and devices with real runs; find bad nodes"),
    "baseline": ("validate", "validate, and record the figures to compare later ones with"),
    "down": ("lab", "end runs under way, remove the lab's containers and network"),
    "clean": ("lab", "end runs under way, remove the lab with its keys and rendered files"),
}
"""Module and line of help per command; the module has a function ``NAME_command``."""

GROUPS = {
    "Lab": ("init", "up", "status", "shell", "exec", "logs", "jupyter", "devcontainer", "down", "clean"),
    "Run": ("run", "workloads", "fit", "cache", "top", "attach", "stacks", "stop"),
    "Results": ("runs", "show", "note", "ui", "compare", "report", "export", "replay"),
    "Many hosts and clusters": (
        "validate",
        "baseline",
        "health",
        "bisect",
        "hostfiles",
        "batch",
        "eval",
        "k8s",
    ),
    "Setup and maintenance": (
        "setup",
        "doctor",
        "devices",
        "config",
        "build",
        "render",
        "keys",
        "freeze",
        "verify",
        "bundle",
    ),
}
"""Commands by the heading that `labctl --help` lists them under, in its order."""

TAKING_RUNS = ("attach", "compare", "export", "note", "replay", "report", "show", "stacks", "stop", "top")
"""Commands whose arguments are runs, such as ``-1``, which is no option."""

WITHOUT_LAB = ("help", "--help", "-h", "version", "--version", "-V")
"""Words that ask for the help or the version of labctl as a whole."""

WITH_SUBCOMMANDS = ("bundle", "k8s", "keys", "runs")
"""Commands whose options follow a second word, their subcommand."""

TITLE = "labctl: a Docker Compose lab for distributed training"

EXAMPLES = (
    ("labctl run opt-tiny", "train a small OPT model on all nodes"),
    ("labctl init mylab && cd mylab && labctl up", "create and start a lab"),
    ("labctl run --script train.py -- --epochs 3", "run a script of yours"),
)
"""First command lines of `labctl --help`."""

FOOTER = (
    "`labctl COMMAND --help` has options and examples of a command.",
    "`labctl --version` prints the version; `labctl --install-completion` sets up completion in your shell.",
)
CODES = (
    "0 pass, 1 bug in labctl, 2 usage or settings, 3 environment, 4 workload failed, 5 criteria not met, 6 unsure,"
    " 7 retries that get no further, 124 timed out or stalled, 130 interrupted"
)


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
    except OutputFailed as error:
        Output().error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)


def dispatch(arguments: list[str]) -> int:
    """Print help or version, or run the named command with the imports it needs; return the exit code."""
    if completing():
        return execute(completed_commands(), arguments)
    arguments = with_directory_behind(arguments)
    if set(arguments) <= {"help", "--help", "-h"}:
        say(overview(page_width()))
    elif arguments[0] in ("help", "--help", "-h"):
        return dispatch([*arguments[1:], "--help"])
    elif arguments in (["--version"], ["-V"], ["version"]):
        from labctl.cli.version import print_version

        print_version()
    else:
        return execute({arguments[0]} if arguments[0] in COMMANDS else set(COMMANDS), arguments)
    return 0


def with_directory_behind(arguments: list[str]) -> list[str]:
    """Return the arguments with ``-C DIRECTORY`` behind the command, if it is before, as git and make take it.

    The version and the help of labctl need no directory.
    """
    named, rest = arguments[:2], arguments[2:]
    if named[:1] in (["-C"], ["--directory"]) and len(rest) == 1 and rest[0] in WITHOUT_LAB:
        return rest
    if named[:1] not in (["-C"], ["--directory"]) or not rest or rest[0] not in COMMANDS:
        return arguments
    words = rest[: 2 if rest[0] in WITH_SUBCOMMANDS else 1]
    command = [word for word in words if not word.startswith("-")]
    return [*command, *named, *rest[len(command) :]]


def completing() -> bool:
    """Tell if a shell asks for completions, which it does by environment variables."""
    return any(name.startswith("_LABCTL") for name in os.environ)


def completed_commands() -> set[str]:
    """Return the command of the line to complete if it is typed to its end, else all commands."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    # A word that nothing follows may go on: `run` is the beginning of `runs`.
    words = line.split()[1:2] if line[-1:].isspace() or len(line.split()) > 2 else []
    return {word for word in words if word in COMMANDS} or set(COMMANDS)


def execute(names: set[str], arguments: list[str]) -> int:
    """Run arguments with only these commands; return the exit code, or exit. Usage errors are JSON with --json."""
    import typer

    try:
        return int(application(names)(arguments, prog_name="labctl", standalone_mode=False) or 0)
    except _usage_error() as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            write(error.message, sys.stderr)
            return ConfigError.exit_code
        from labctl.cli.usage import correct

        message, hint = correct(error, arguments, COMMANDS)
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        Output(as_json="--json" in own).error(ConfigError(message, hint=hint))
        return ConfigError.exit_code
    except typer.Abort:
        return Interrupted.exit_code


def _usage_error() -> type[Any]:
    """Return Typer's private base class of usage errors."""
    import typer

    return typer.BadParameter.__bases__[0]


def overview(width: int) -> str:
    """Return the help of labctl: the commands by group with a line of help each, examples and exit codes."""
    lines = [*wrap(TITLE, width, ""), "", "Usage: labctl COMMAND [OPTIONS] [ARGS]", "", "Examples:"]
    lines += listed(EXAMPLES, width, min(max(len(line) for line, _ in EXAMPLES), width * 3 // 5))
    column = max(map(len, COMMANDS))
    for title, names in GROUPS.items():
        rows = [(name, COMMANDS[name][1]) for name in names]
        lines += ["", f"{title}:", *listed(rows, width, column)]
    lines += [""]
    for text in (*FOOTER, f"Exit codes: {CODES}"):
        lines += wrap(text, width, "", "  ")
    return "\n".join(lines)


def application(names: set[str]) -> typer.Typer:
    """Return a Typer application with only the commands of these names; completion needs all of them."""
    import typer

    from labctl.cli.command import Command, WithArguments, WithText

    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=len(names) > 1 or completing(),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)
    classes = {"run": WithArguments, "batch": WithArguments, "bisect": WithArguments, "note": WithText}
    for name in filter(names.__contains__, COMMANDS):
        module, line = COMMANDS[name]
        function = getattr(import_module(f"labctl.cli.{module}"), f"{name}_command")
        text = f"{line[0].upper()}{line[1:]}."
        if isinstance(function, typer.Typer):
            add_group(app, name, text, function)
            continue
        options = {"ignore_unknown_options": name in ("exec", *TAKING_RUNS), "allow_interspersed_args": name != "exec"}
        app.command(name, cls=classes.get(name, Command), help=text, context_settings=options)(function)
    return app


def add_group(app: typer.Typer, name: str, text: str, group: typer.Typer) -> None:
    """Add a command with subcommands to an application, each with labctl's form of help."""
    from labctl.cli.command import Command, Group

    for subcommand in group.registered_commands:
        subcommand.cls = Command
    app.add_typer(group, name=name, help=text, cls=Group)
