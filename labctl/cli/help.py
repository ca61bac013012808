"""Help as text: of labctl, and of a command; commands are of these classes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from labctl.cli.output import USUAL_WIDTH, width_of, wrap

WIDEST = 120
"""Columns of a help at most."""
GAP = 2
"""Blanks before each column of a list."""

SAYING_NOTHING = ("None", "", "False", "0", ".")
"""Defaults that say nothing, as text."""

Row = tuple[str, str]
"""Name and description of an entry of a list."""


def page_width() -> int:
    """Return the columns of a help on stdout."""
    return min(width_of(sys.stdout) or USUAL_WIDTH, WIDEST)


def listed(rows: Sequence[Row], width: int, column: int = 0) -> list[str]:
    """Render rows as two columns, the second wrapped; a name that is too long for its column has its own line.

    ``column``: width of the first column, if it is to be the same in several lists.
    """
    column = column or min(max(len(name) for name, _ in rows), width * 2 // 5)
    lines = []
    for name, text in rows:
        described = wrap(text, width, " " * (column + 2 * GAP)) or [""]
        begin = f"{' ' * GAP}{name:<{column}}{' ' * GAP}"
        if len(name) > column and text:
            lines += [begin.rstrip(), *described]
        else:
            lines += [(begin + described[0].lstrip()).rstrip(), *described[1:]]
    return lines


class CommandHelp:
    """Help of a command, read from its parameters: usage, description and rows of each list."""

    def __init__(self, ctx: Any) -> None:
        """Read the command of a context of its parser."""
        command = ctx.command
        self.path = ctx.command_path
        self.usage = " ".join((self.path, *command.collect_usage_pieces(ctx)))
        self.description = command.help or ""
        parameters = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
        self.arguments = [argument_row(each) for each in parameters if each.param_type_name == "argument"]
        self.options = [option_row(each) for each in parameters if each.param_type_name == "option"]
        subcommands = getattr(command, "commands", {})
        self.commands = [(name, subcommands[name].help or "") for name in subcommands]

    def examples(self) -> Sequence[Row]:
        """Return the examples, each a line to type and what it does."""
        from labctl.cli.examples import EXAMPLES

        return EXAMPLES[self.path.removeprefix("labctl ")]

    def text(self, width: int) -> str:
        """Render the help in this many columns; examples are never broken."""
        lines = wrap(f"Usage: {self.usage}", width, "", " " * len("Usage: "))
        lines += ["", *wrap(self.description, width)]
        for title, rows in (("Commands", self.commands), ("Arguments", self.arguments), ("Options", self.options)):
            lines += ["", f"{title}:", *listed(rows, width)] if rows else []
        lines += ["", "Examples:"]
        for line, what in self.examples():
            lines += [*wrap(f"# {what}", width, "  ", "  # "), f"  {line}"]
        return "\n".join(lines)


def argument_row(argument: Any) -> Row:
    """Return an argument's metavar without brackets around it, and its help with its default."""
    name = argument.metavar or argument.name.upper()
    return re.sub(r"^\[([\w.]+)\](\.\.\.)?$", r"\1\2", name), described(argument)


def option_row(option: Any) -> Row:
    """Return an option's names with its metavar, and its help with its default."""
    short = [name for name in option.opts if not name.startswith("--")]
    long = [name for name in option.opts if name.startswith("--")]
    names = ", ".join((*short, *long)) if short else f"    {', '.join(long)}"
    return (names if option.is_flag else f"{names} {option.metavar}"), described(option)


def described(parameter: Any) -> str:
    """Return a parameter's help, ``(required)`` for a required option, else with a default that says something."""
    text = str(getattr(parameter, "help", None) or "")
    if parameter.param_type_name == "option" and parameter.required:
        return f"{text.removesuffix('.')} (required)."
    default = str(parameter.default)
    is_silent = default in SAYING_NOTHING or callable(parameter.default) or not parameter.show_default
    return text if is_silent or "(default" in text else f"{text.removesuffix('.')} (default: {default})."


def usage_pieces(command: Any) -> Iterable[str]:
    """Yield the words of a command's usage after its name: required options, ``[OPTIONS]`` and arguments."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.required:
            yield option_row(parameter)[0].strip()
    yield "[OPTIONS]"
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            yield name if parameter.required or name.startswith("[") else f"[{name}]"
