"""Classes of labctl's commands: their help and usage have its own form."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from labctl.cli.help import CommandHelp, page_width, usage_pieces

ARGUMENTS = "labctl.arguments"
"""Key in ``ctx.meta`` of the arguments after `--`."""
NO_OPTION = re.compile(r"-[^A-Za-z-].* ")
"""Pattern of an argument of several words that begins with a dash, but as no option does."""


class Command(TyperCommand):
    """Command with labctl's form of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(CommandHelp(ctx).text(page_width()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the words of the usage after the command's name."""
        return list(usage_pieces(self))


class WithArguments(Command):
    """Command that passes on the arguments after `--` in ``ctx.meta[ARGUMENTS]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before `--`; keep those after it in ``ctx.meta[ARGUMENTS]``."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGUMENTS] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage with the arguments after `--` added."""
        own = "[-- ARGUMENTS... | -- COMMAND...]" if self.name == "run" else "[-- ARGUMENTS...]"
        return [*super().collect_usage_pieces(ctx), own]


class WithText(Command):
    """Command with an argument of several words that may begin with a dash and a number, as ``-5 % slower``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; such a text goes behind `--`, or its letters would be options."""
        texts = [] if "--" in args else list(filter(NO_OPTION.match, args))
        others = [word for word in args if word not in texts]
        return super().parse_args(ctx, [*others, "--", *texts] if texts else args)


class Group(TyperGroup):
    """Command with subcommands, with labctl's form of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(CommandHelp(ctx).text(page_width()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the words of the usage after the command's name; a command that can stand alone needs none."""
        return [*usage_pieces(self), "[COMMAND]" if self.invoke_without_command else "COMMAND"]
