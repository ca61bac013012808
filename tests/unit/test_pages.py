"""The pages for people: README, docs and the files beside it. Their links, readers, settings and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import typer

from labctl import cli
from labctl.config import dotenv

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
FOR_USERS = [page for page in PAGES if page.parent == ROOT / "docs"]
LINK = re.compile(r"(?:\[[^\]]*\]\(|src=\")([^)\s\"]+)")
JOINED = re.compile(r"&& |; | \| ")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IN_CODE = re.compile(r"\b(docs/[\w/.-]+\.md(?:#[\w-]+)?)")
# Typer has a private copy of click.
USAGE_ERROR: type[Any] = typer.BadParameter.__bases__[0]
USAGE_OF_GROUP = {"--help", "-h", "help", "--version", "-V", "--install-completion", "COMMAND"}


def name_of(page: Path) -> str:
    """Return a page's path below the repository."""
    return str(page.relative_to(ROOT))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in words)


def is_broken(target: str, page: Path) -> bool:
    """Tell if a relative link of a page names no file, or no heading in it."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or bool(anchor and file.suffix == ".md" and anchor not in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_anchor_resolves(page: Path) -> None:
    """Follow each relative link of a page: file and heading are there."""
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [target for target in links if "://" not in target and is_broken(target, page)] == []


def test_every_page_that_the_code_names_is_there() -> None:
    """Search labctl, the settings' template and the Makefile for names of pages: file and heading are there."""
    sources = (*ROOT.glob("labctl/**/*.py"), ROOT / "env.example", ROOT / "Makefile")
    named = {target for source in sources for target in IN_CODE.findall(source.read_text(encoding="utf-8"))}
    assert {"docs/kubernetes.md"} < named
    # A document of NVSentinel, as the sentence there says.
    assert [target for target in named if "designs/" not in target and is_broken(target, ROOT / "README.md")] == []


@pytest.mark.parametrize("page", FOR_USERS, ids=name_of)
def test_every_page_for_users_names_its_reader_and_is_in_the_readme(page: Path) -> None:
    """Read the first paragraph of a page: it begins with "For"; the README links to it."""
    _, paragraph, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert paragraph.startswith("For ")
    assert f"({name_of(page)}" in (ROOT / "README.md").read_text(encoding="utf-8")


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [ROOT / "README.md", *FOR_USERS], ids=name_of)
def test_every_setting_of_a_page_is_known_and_written_as_env_takes_it(page: Path) -> None:
    """Compare a page's keys with env.example; read its lines for .env as labctl does."""
    text, example = page.read_text(encoding="utf-8"), (ROOT / "env.example").read_text(encoding="utf-8")
    known = {*re.findall(r"^#?(\w+)=", example, re.MULTILINE), "LAB_K8S_"}
    named = set(re.findall(r"\b(?:LAB|HOST)_[A-Z0-9_]+", text))
    assert [key for key in sorted(named - known) if not key.startswith("LAB_ENV_")] == []
    lines = re.findall(r"^ {4}((?:LAB|HOST|HF)_\w+=.*?)(?: {2,}.*)?$", text, re.MULTILINE)
    assert all(dotenv.parse(line, name_of(page)) for line in lines)


# --- commands ------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[str]:
    """Return the labctl commands of a page: those in its code blocks and those in its code spans."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(line.strip() for line in re.findall(r"^(?: {4}|\$ ).*$", text, re.MULTILINE))
    lines = re.sub(r" *\\\n *", " ", blocks.replace("\n$ ", "\n").removeprefix("$ ")).splitlines()
    spans = re.findall(r"`(labctl [^`]+)`", FENCE.sub("", text).replace("\n", " "))
    typed = [re.split(r" +# ", part.strip())[0] for line in lines for part in re.split(JOINED, line)]
    named = [part.strip() for span in spans for part in re.split(JOINED, span)]
    # Not the usage of a command, as docs/commands.md has it.
    return [line for line in (*typed, *named) if line.startswith("labctl ") and "[OPTIONS]" not in line]


@cache
def application() -> Any:
    """Return labctl's command line with all commands."""
    return typer.main.get_command(cli.application(set(cli.COMMANDS)))


def parse(line: str) -> None:
    """Parse a command line as labctl does, without running it; raise typer's usage error. A name alone only exists."""
    # A command's output as an argument, a placeholder for a number, and the file that output goes to.
    simple = re.sub(r" >>? ?\S+$", "", re.sub(r"\$\([^()]*\)", "RUN", line))
    words = ["1" if word == "N" else word for word in shlex.split(simple)[1:]]
    if words[0] in USAGE_OF_GROUP:
        return
    command = application().commands[words.pop(0)]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if words:
        with suppress(typer.Exit):
            command.make_context("labctl", words)


REMARK = re.compile(
    r"^ {4}(?:(?:labctl|make|pipx|sudo|docker|kubectl|cd) |nvidia-smi|LAB_\w+=).*?\S {2,}(?!# )\S.*$", re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_remark_behind_a_command_is_a_comment(page: Path) -> None:
    """Search a page's blocks for words that stand apart behind a command: each begins with #, as blocks are copied."""
    assert REMARK.findall(page.read_text(encoding="utf-8")) == []


def test_a_remark_without_a_mark_is_noticed() -> None:
    """Write a remark behind a command with and without #: the second is found."""
    assert REMARK.findall("    labctl up  # start\n    labctl up  start\n") == ["    labctl up  start"]


def refused(lines: list[str]) -> Iterator[str]:
    """Yield the lines that labctl would not take, with its words."""
    for line in lines:
        try:
            parse(line)
        except (USAGE_ERROR, KeyError, ValueError) as error:
            yield f"{line}: {error}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_labctl_takes_every_command_of_a_page(page: Path) -> None:
    """Parse each command of a page: command, options and number of arguments are labctl's."""
    # A table of what people type wrongly.
    lines = [] if page.name == "mistakes.md" else commands_of(page)
    assert list(refused(lines)) == []


def test_commands_of_pages_are_found_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    """Write a page with commands of each form: all are found, and those with a wrong option or command refused."""
    page = tmp_path / "page.md"
    page.write_text(
        "Type `labctl up --nonsense`, or:\n\n    labctl run a \\\n      --detach    # leaves it\n\n"
        "```console\n$ labctl init b && cd b\nwrote\n$ labctl nothing  # exit 2\n```\n",
        encoding="utf-8",
    )
    found = commands_of(page)
    assert sorted(found) == ["labctl init b", "labctl nothing", "labctl run a --detach", "labctl up --nonsense"]
    assert len(list(refused(found))) == 2


# --- output --------------------------------------------------------------------------------------------------


def test_output_of_commands_is_written_below_them() -> None:
    """Run a block that changes directory and fails as announced: its old output is replaced, a wrong exit raises."""
    make: Any = run_path(str(ROOT / "docs/make.py"))
    with make["Session"]() as session:
        text = session.transcript("$ mkdir lab && cd lab\nold\n$ pwd\n$ seq 40\n$ false  # exit 1\n")
        with pytest.raises(SystemExit, match="exit 3"):
            session.transcript("$ exit 3\n")
    assert text.startswith("$ mkdir lab && cd lab\n$ pwd\n~/lab\n$ seq 40\n1\n")
    assert text.endswith("\n5\n...\n29\n" + "".join(f"{number}\n" for number in range(30, 41)) + "$ false  # exit 1\n")
