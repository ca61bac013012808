"""The user interface of labctl: commands, flags, settings, codes of doctor and keys of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEFORE = json.loads((Path(__file__).parents[1] / "golden/surface.json").read_text(encoding="utf-8"))
LABCTL = [sys.executable, "-c", "from labctl.cli import main; main()"]
# Dictionaries with keys chosen by a lab or a run.
NAMED_BY_THE_USER = {"metrics"}
JSON_COMMANDS = (
    "config", "devices", "render", "up --dry-run", "up", "status", "workloads", "fit opt-125m",
    "run hello-mpi --dry-run", "run hello-mpi", "runs", "show", "doctor", "devcontainer", "status --nonsense",
    "run no-such-workload", "down --dry-run", "down", "clean",
)  # fmt: skip


def of_source(package: Path) -> dict[str, Any]:
    """Return labctl's commands with their flags, and the codes of doctor that its source mentions."""
    import typer

    from labctl import cli

    codes: set[str] = set()
    for path in package.rglob("*.py"):
        codes |= set(re.findall(r"LAB-[A-Z]+-\d{3}", path.read_text(encoding="utf-8")))
    commands = dict(flags("", typer.main.get_command(cli.application(set(cli.COMMANDS)))))
    return {"commands": commands, "doctor": sorted(codes)}


def flags(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each command below this one by its full name, itself included, with its sorted options."""
    for parameter in command.params:
        parameter.opts = [*parameter.opts, *parameter.secondary_opts]
    yield name, sorted(option for parameter in command.params for option in parameter.opts)
    for inner, child in getattr(command, "commands", {}).items():
        yield from flags(f"{name} {inner}".strip(), child)


def settings(program: list[str], lab: Path) -> list[str]:
    """List the settings' keys from ``config --json``."""
    done = subprocess.run([*program, "config", "-C", lab, "--json"], capture_output=True, text=True, check=True)
    return sorted(setting["key"] for setting in json.loads(done.stdout)["settings"])


def json_keys(program: list[str], lab: Path) -> dict[str, list[str]]:
    """Run each of JSON_COMMANDS with --json; return the key paths of its document; fail if it prints none."""
    keys_by_command = {}
    for command in JSON_COMMANDS:
        argv = [*program, *command.split(), "--json"]
        done = subprocess.run(argv, cwd=lab, capture_output=True, text=True, check=False, timeout=600)
        try:
            keys_by_command[command] = sorted(set(paths(json.loads(done.stdout))))
        except ValueError as error:
            raise AssertionError(f"{command}: {done.stdout} {done.stderr}") from error
    return keys_by_command


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key in a JSON value, such as ``nodes.name``; a key that users name is ``*``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            named = prefix.rpartition(".")[2] in NAMED_BY_THE_USER
            path = f"{prefix}.{'*' if named else key}".lstrip(".")
            yield path
            yield from paths(inner, path)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, prefix)
