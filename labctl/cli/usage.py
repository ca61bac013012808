"""Hints for command lines that cannot be parsed."""

from __future__ import annotations

from collections.abc import Collection

ELSEWHERE = {
    "create": "init",
    "destroy": "down",
    "history": "runs",
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


def correct(message: str, arguments: list[str], commands: Collection[str]) -> tuple[str, str]:
    """Return a usage error's message, reworded for commands known from other tools, and a hint that may be empty."""
    first = arguments[0] if arguments else ""
    misplaced = "No such option" in message or "unexpected extra argument" in message
    if first.startswith("-"):
        example = "labctl status -C DIRECTORY" if first.startswith(("-C", "--dir")) else "labctl up -s LAB_NODES=3"
        return message, f"options follow the command: {example}" if misplaced else ""
    if first in ELSEWHERE:
        return f"No such command '{first}'.", f"labctl {ELSEWHERE[first]}; `labctl --help` lists all commands"
    if first not in commands:
        return message, "`labctl --help` lists all commands"
    if first == "run" and misplaced:
        ranks = "LAB_NODES and LAB_SLOTS in .env set the number of ranks"
        return message, f"arguments of the script follow `--`: labctl run --script FILE -- ARGUMENTS; {ranks}"
    if first == "up" and misplaced:
        return message, "`labctl up -h` lists the options; the number of nodes is a setting: labctl up -s LAB_NODES=3"
    return message, ""
