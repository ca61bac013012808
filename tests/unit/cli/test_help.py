"""Help of labctl and of each command: its form, its width, its examples, and the page made of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from support.commandline import Labctl

from labctl import cli, flows
from labctl.cli import help as helps
from labctl.cli.examples import EXAMPLES
from labctl.cli.help import CommandHelp
from labctl.config.context import Context

PAGE = Path(__file__).parents[3] / "docs/commands.md"
HEAD = """\
# Commands

For people who look up a command or an option: the help of each, as `labctl COMMAND --help` prints it.

## labctl

    labctl --help                  # list all commands
    labctl help run                # print the help of a command, as labctl run --help does
    labctl --version               # print the version
    labctl --install-completion    # complete commands, options, runs, nodes and settings; then open a new shell

| your shell | completion is written to |
|---|---|
| bash | `~/.bash_completions/labctl.sh`, and a line in `~/.bashrc` |
| zsh | `~/.zfunc/_labctl`, and lines in `~/.zshrc` |
| fish | `~/.config/fish/completions/labctl.fish` |

`NO_COLOR=1` turns colors off, `FORCE_COLOR=1` turns them on where the output is not a terminal."""


@cache
def root() -> Any:
    """Return the parser of all commands."""
    return typer.main.get_command(cli.application(set(cli.COMMANDS)))


def contexts(group: Any = None, parent: Any = None) -> Iterator[Any]:
    """Yield a context of each command and subcommand, a group before its commands."""
    group = group or root()
    parent = parent or group.make_context("labctl", [], resilient_parsing=True)
    for name, command in group.commands.items():
        ctx = command.make_context(name, [], parent=parent, resilient_parsing=True)
        yield ctx
        if hasattr(command, "commands"):
            yield from contexts(command, ctx)


HELPS = {ctx.command_path.removeprefix("labctl "): ctx for ctx in contexts()}
LINES = [line for rows in (cli.EXAMPLES, *EXAMPLES.values()) for line, _ in rows]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_its_width_and_cuts_no_word(width: int) -> None:
    """Render all helps in 60, 80 and 120 columns: no line is longer but one that is typed, and no word is lost."""
    texts = {"": (cli.overview(width), cli.overview(1000))}
    for name, ctx in HELPS.items():
        texts[name] = CommandHelp(ctx).text(width), CommandHelp(ctx).text(1000)
    for name, (text, unbroken) in texts.items():
        assert words(text) == words(unbroken), name
        too_long = [line for line in text.splitlines() if len(line) > width]
        assert [line for line in too_long if line.strip() not in LINES] == [], name


def words(text: str) -> list[str]:
    """Split a help into words, without the marks of comments, of which a wrapped one has several."""
    return [word for word in text.split() if word != "#"]


def test_without_a_terminal_a_page_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the width of a page: 80 without a terminal, that of a terminal, and at most 120; COLUMNS is not read."""
    monkeypatch.setenv("COLUMNS", "40")
    assert helps.page_width() == 80
    for columns, width in ((60, 60), (0, 80), (200, 120)):
        monkeypatch.setattr("os.get_terminal_size", lambda _, columns=columns: type("Size", (), {"columns": columns}))
        monkeypatch.setattr("sys.stdout", type("Terminal", (), {"fileno": lambda _: 1})())
        assert helps.page_width() == width


@pytest.mark.parametrize("name", HELPS)
def test_help_has_no_words_of_the_parser(name: str) -> None:
    """Read each help: no types of a library, every option has a metavar, and everything is described."""
    text = CommandHelp(HELPS[name]).text(1000)
    assert not re.search(r"<(str|int|path|float|text|file)|range>|x[<>]=|<=x|\{|\[default|\[required|; required", text)
    described = CommandHelp(HELPS[name])
    assert all(what for _, what in (*described.commands, *described.arguments, *described.options)), name
    assert described.description.endswith(".")
    for each in HELPS[name].command.params:
        assert getattr(each, "is_flag", False) or each.metavar, (name, each.name)


def test_every_command_has_examples() -> None:
    """Compare commands with examples: each has two to four, and no example is of another command."""
    assert sorted(EXAMPLES) == sorted(HELPS)
    for name, rows in EXAMPLES.items():
        assert 2 <= len(rows) <= 4, name
        assert all(line.startswith(f"labctl {name}") and what for line, what in rows), name


@pytest.mark.parametrize("line", LINES)
def test_every_example_can_be_typed(line: str) -> None:
    """Parse each line of an example with its command's parser; its workloads exist."""
    for typed in re.split(r" (?:\||>>?|&&) ", line):
        program, *arguments = shlex.split(typed)
        if program == "labctl":
            assert named_workloads(arguments) <= workloads()


def named_workloads(arguments: list[str]) -> set[str]:
    """Parse a command line; return the workloads that its arguments and options name."""
    name = next(name for name in (" ".join(arguments[:2]), arguments[0]) if name in HELPS)
    ctx = HELPS[name]
    parsed = ctx.command.make_context(name, arguments[len(name.split()) :], parent=ctx.parent)
    named = (parsed.params[each.name] for each in ctx.command.params if each.metavar == "WORKLOAD")
    return {word for value in named if value for word in ([value] if isinstance(value, str) else value)}


@cache
def workloads() -> set[str]:
    """Return the names of the workloads that labctl brings."""
    here = Context(directory=PAGE.parents[1], environ={}, emit=lambda _: None, flags={})
    return {workload.name for workload in flows.workloads(here).workloads}


def test_an_example_with_a_mistake_is_noticed() -> None:
    """Parse command lines with a wrong option and a wrong workload: an error, and a name that is none."""
    with pytest.raises(typer.BadParameter.__bases__[0], match="--dryrun"):
        named_workloads(["up", "--dryrun"])
    assert not named_workloads(["fit", "opt-tinny"]) <= workloads()


READING = [
    line for name in ("workloads", "config", "hostfiles") for line, _ in EXAMPLES[name] if "nodes.txt" not in line
]


@pytest.mark.parametrize("line", READING)
def test_examples_that_only_read_the_lab_succeed(line: str, labctl: Labctl) -> None:
    """Run the examples that need neither an engine nor a download: exit code 0 and an answer."""
    answer = labctl(*shlex.split(line)[1:])
    assert (answer.code, bool(answer.out)) == (0, True), answer.err


def test_the_page_of_commands_is_made_of_their_help(request: pytest.FixtureRequest) -> None:
    """Compare docs/commands.md with the helps; with --update-golden write it first."""
    text = page()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def page() -> str:
    """Render all helps as a page: a heading for each group, and for each command usage, examples and options."""
    parts = [HEAD]
    for title, names in cli.GROUPS.items():
        parts += [f"## {title}", ", ".join(f"[{name}](#labctl-{name})" for name in names)]
        for name in names:
            of_name = (ctx for path, ctx in HELPS.items() if path.split()[0] == name)
            parts += [part for ctx in of_name for part in section(CommandHelp(ctx))]
    return "\n\n".join(parts) + "\n"


def section(command: CommandHelp) -> list[str]:
    """Render a command's help as parts of a page."""
    examples = [line for typed, what in command.examples() for line in (f"    # {what}", f"    {typed}")]
    parts = [f"### {command.path}", command.description, f"    {command.usage}", "\n".join(examples)]
    rows = [*command.arguments, *command.options]
    cells = (f"| `{name.strip()}` | {what} |".replace("PASS|FAIL|ERROR", "PASS\\|FAIL\\|ERROR") for name, what in rows)
    return [*parts, "\n".join(("| | |", "|---|---|", *cells))]
