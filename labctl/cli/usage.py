"""Command lines that cannot be parsed: what is wrong with them, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

from labctl.errors import nearest

ELSEWHERE = {
    "create": "init",
    "describe": "show",
    "destroy": "down",
    "history": "runs",
    "inspect": "show",
    "kill": "stop",
    "launch": "run",
    "list": "status",
    "ls": "status",
    "ps": "status",
    "rm": "down",
    "ssh": "shell",
    "start": "up",
    "submit": "run",
    "train": "run",
}
"""labctl's command for commands of Docker, Compose and batch systems."""

COMPLETION = ("completion", "completions")
"""Commands of other programs that set up completion."""

PROGRAMS = ("accelerate", "bash", "deepspeed", "lm_eval", "python", "python3", "torchrun")
"""Programs that people put where a workload's name belongs."""

WITH_VALUE = ("-C", "--directory", "-s", "--setting", "-n", "--node")
"""Options of many commands, which people put before the command; their value may be the name of one."""

CLOSE = 0.8
"""Likeness of a misspelt option, of 1; less like each other are options such as ``--nodes`` and ``--per-node``."""

LIST = "`labctl --help` lists all commands"


def correct(error: Any, arguments: list[str], commands: Collection[str]) -> tuple[str, str]:
    """Return the message of a usage error of the parser, and the hint."""
    first = arguments[0]
    if first.startswith("-"):
        return _before_command(arguments, commands)
    if first not in commands:
        return _unknown_command(first, commands)
    if error.format_message().startswith("options follow the subcommand"):
        return _before_subcommand(error, arguments)
    explain = next((explain for pattern, explain in KINDS if re.match(pattern, error.format_message())), None)
    if not explain:
        return error.format_message(), f"labctl {first} --help"
    message, hint = explain(error)
    if explain is _of_option and first == "run" and (line := _of_script(error, arguments)):
        near = f"{hint} Else " if hint.startswith("did you mean") else ""
        return message, f"{near}{line}"
    is_misspelt = hint.startswith("did you mean")
    if explain in (_of_option, _of_extra) and not is_misspelt:
        hint = _of_command(arguments) or hint
    return message, hint or f"labctl {first} --help"


def _before_command(arguments: list[str], commands: Collection[str]) -> tuple[str, str]:
    """Explain an option before the command, or without one."""
    option = arguments[0]
    words = enumerate(pairwise(arguments), 1)
    place = next((place for place, (before, word) in words if word in commands and before not in WITH_VALUE), 0)
    if place:
        moved = shlex.join([arguments[place], *arguments[:place], *arguments[place + 1 :]])
        return f"`{option}` is before the command", f"options follow the command: labctl {moved}"
    if option in WITH_VALUE and len(arguments) > 2 and not arguments[2].startswith("-"):
        return _unknown_command(arguments[2], commands)
    if option in WITH_VALUE:
        return f"no command is named for `{option}`", f"name a command; options follow it; {LIST}"
    return f"no option `{option}`", LIST


def _before_subcommand(error: Any, arguments: list[str]) -> tuple[str, str]:
    """Explain options between a command and its subcommand, with the corrected line."""
    name, words = error.ctx.invoked_subcommand, enumerate(pairwise(arguments), 1)
    place = next(place for place, (before, word) in words if word == name and before not in WITH_VALUE)
    moved = [arguments[0], name, *arguments[1:place], *arguments[place + 1 :]]
    return error.format_message(), f"labctl {shlex.join(moved)}"


def _unknown_command(word: str, commands: Collection[str]) -> tuple[str, str]:
    """Explain a word that is no command."""
    message = f"no command `{word}`"
    if word in COMPLETION:
        return message, "labctl --install-completion sets up completion in your shell"
    if word in ELSEWHERE:
        return message, f"labctl {ELSEWHERE[word]}; {LIST}"
    near = nearest(word, (*commands, *_workloads()))
    typed = near if near in commands else f"run {near}"
    return message, f"did you mean `labctl {typed}`?" if near else LIST


def _workloads() -> Collection[str]:
    """Return the names of the nearest lab's workloads; none if they cannot be read."""
    from labctl.cli import complete

    nowhere: Any = SimpleNamespace(params={})
    return complete.workload(nowhere, "")


def _help(error: Any) -> str:
    """Return how to see the options of a usage error's command."""
    return f"{error.ctx.command_path} --help"


def _of_option(error: Any) -> tuple[str, str]:
    """Explain an option that the command does not have."""
    option = re.split(r"[\s'()]+", error.format_message().removeprefix("No such option").lstrip(": '"))[0]
    names = chain.from_iterable(each.opts for each in error.ctx.command.params)
    known = [name for name in names if name.startswith("--")]
    if option in known:
        return f"`{option}` after `--` is an argument, not an option", f"`{_help(error)}` lists the options"
    near = nearest(option, known, CLOSE)
    hint = f"did you mean `{near}`?" if near else f"`{_help(error)}` lists the options"
    return f"`{error.ctx.command_path}` has no option `{option}`", hint


def _of_script(error: Any, arguments: list[str]) -> str:
    """Return the hint to put options after `--` where `run` is given a program that may take them; else nothing."""
    known = {name: parameter for parameter in error.ctx.command.params for name in parameter.opts}
    own, rest = _parted(arguments[1:], known)
    program = any(word.partition("=")[0] in ("--script", "-m", "--module") for word in own)
    workload = own[:1] and not own[0].startswith("-")
    if not (rest and (program or workload)):
        return ""
    ranks = "; LAB_NODES and LAB_SLOTS in .env set the number of ranks" if re.match("--?n", rest[0]) else ""
    return f"arguments of the script follow `--`: labctl run {shlex.join([*own, '--', *rest])}{ranks}"


def _parted(words: list[str], known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words that the command takes, and from the first unknown option on those that it does not."""
    own: list[str] = []
    rest: list[str] = []
    takes_value = False
    for place, word in enumerate(words):
        if word == "--":
            return own, [*rest, *words[place + 1 :]]
        option, equals, _ = word.partition("=")
        is_own = takes_value or option in known or not (rest or word.startswith("-"))
        (own if is_own else rest).append(word)
        takes_value = not takes_value and option in known and not equals and not known[option].is_flag
    return own, rest


def _of_extra(error: Any) -> tuple[str, str]:
    """Explain arguments of which the command takes fewer."""
    extra = re.sub(r"^.*? \((.*)\)$", r"\1", error.format_message())
    return f"unexpected argument `{extra}`", error.ctx.get_usage().replace("Usage:", "usage:", 1)


def _of_missing(error: Any) -> tuple[str, str]:
    """Explain a required argument or option that is missing, with the command's first example."""
    from labctl.cli.examples import EXAMPLES
    from labctl.cli.help import argument_row, option_row

    path = error.ctx.command_path
    row = option_row if error.param.param_type_name == "option" else argument_row
    example, _ = EXAMPLES[path.removeprefix("labctl ")][0]
    return f"`{path}` needs {row(error.param)[0].strip()}", f"{example}; `{_help(error)}` has more"


def _of_value(error: Any) -> tuple[str, str]:
    """Explain a value of an option or argument that it cannot have."""
    from labctl.cli.help import argument_row

    parameter = error.param
    is_option = parameter.param_type_name == "option"
    name = max(parameter.opts, key=len) if is_option else argument_row(parameter)[0]
    value = re.match(r"'?(.*?)'? is not ", error.message)
    reason = allowed(parameter.type)
    if not value or not reason:
        return f"{name}: {error.message}", _help(error)
    return f"{name} {value[1]}: must be {reason}", _help(error)


def allowed(kind: Any) -> str:
    """Render the values of a type of the parser: choices, a number or its range; empty for other types."""
    if choices := [getattr(choice, "value", choice) for choice in getattr(kind, "choices", ())]:
        return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    number = {"int": "a whole number", "flo": "a number"}.get(kind.name[:3], "")
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if low is not None and high is not None:
        return f"{number} from {low} to {high}"
    return f"{number} of at least {low}" if low is not None else number


def _of_lone_option(error: Any) -> tuple[str, str]:
    """Explain an option whose value is missing; the parser does not say of which command."""
    return f"{error.option_name} needs a value", ""


def _of_subcommand(error: Any) -> tuple[str, str]:
    """Explain a subcommand that the command does not have."""
    word = re.split("'", error.format_message())[1]
    path, known = error.ctx.command_path, error.ctx.command.commands
    near = nearest(word, known)
    return f"`{path}` has no command `{word}`", f"did you mean `{path} {near}`?" if near else f"{path} --help"


KINDS: tuple[tuple[str, Callable[[Any], tuple[str, str]]], ...] = (
    ("No such option", _of_option),
    ("Got unexpected extra argument", _of_extra),
    ("Missing (argument|option)", _of_missing),
    ("Invalid value for", _of_value),
    ("Option '.*' requires an argument", _of_lone_option),
    ("No such command", _of_subcommand),
)
"""Pattern of the beginning of a parser's message, and the function that explains it."""


def _of_command(arguments: list[str]) -> str:
    """Return the hint for words that people give to `run` and `up` though they belong elsewhere; else nothing."""
    command, *words = arguments
    if command == "up":
        return "`labctl up -h` lists the options; the number of nodes is a setting: labctl up -s LAB_NODES=3"
    if command != "run":
        return ""
    if words[0] in PROGRAMS:
        return f"a command follows `--`: labctl run -- {shlex.join(words)}"
    ranks = "LAB_NODES and LAB_SLOTS in .env set the number of ranks"
    return f"arguments of the script follow `--`: labctl run --script FILE -- ARGUMENTS; {ranks}"
