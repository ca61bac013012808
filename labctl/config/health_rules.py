"""Rules of a site for `labctl health`: ``health.yml`` in the lab directory."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from labctl.config.yaml_reader import Schema, Value, compose
from labctl.health.model import OwnCheck, Rules

NAME = "health.yml"
_OPERATORS = frozenset((";", "|", "||", "&", "&&", ">", ">>", "<"))
_CHECK = r"[a-z0-9][a-z0-9-]{0,62}"


def load(directory: Path) -> Rules:
    """Return the rules of the lab's ``health.yml``, none without the file. ConfigError, with line, if it is invalid."""
    path = directory / NAME
    if not path.exists():
        return Rules()
    fields: Schema = {"checks": _checks, "ignore": _ignored, "own": _own}
    entries = compose(path, NAME, hint="write checks, ignore or own").read(fields)
    off, limits = entries.get("checks", (frozenset(), {}))
    return Rules(off=off, limits=limits, ignored=entries.get("ignore", ()), own=entries.get("own", ()))


def _checks(value: Value) -> tuple[frozenset[str], dict[str, float]]:
    """Return the checks that are off, and the limits of others. ConfigError for other values."""
    off, limits = set(), {}
    for name, entry in value.entries().items():
        if entry.node.id == "scalar" and entry.node.value in ("off", "false"):
            off.add(name)
        elif entry.node.id != "mapping":
            raise entry.error(f"`{name}` must be `off` or a limit", hint=f"{name}: {{limit: 5}}")
        else:
            limits[name] = entry.read({"limit": Value.number}, required=("limit",))["limit"]
    return frozenset(off), limits


def _ignored(value: Value) -> tuple[str, ...]:
    """Return the patterns of kernel lines to ignore. ConfigError for one that is no regular expression."""
    patterns = []
    for item in value.items():
        pattern = item.text()
        try:
            re.compile(pattern)
        except re.error as error:
            raise item.error(f"`{pattern}` is not a regular expression: {error}") from None
        patterns.append(pattern)
    return tuple(patterns)


def _own(value: Value) -> tuple[OwnCheck, ...]:
    """Return the site's own checks, in order. ConfigError for a bad name or command."""
    return tuple(_own_check(name, entry) for name, entry in value.entries().items())


def _own_check(name: str, entry: Value) -> OwnCheck:
    """Return an own check: its command, and the seconds that it may take."""
    if not re.fullmatch(_CHECK, name):
        raise entry.error(f"`{name}` must be at most 63 of a-z, 0-9 and `-`")
    fields: Schema = {"command": _command, "seconds": _seconds}
    return OwnCheck(name=name, **entry.read(fields, required=("command",)))


def _command(value: Value) -> tuple[str, ...]:
    """Return the words of a command, split as a shell does. ConfigError if it has none."""
    try:
        words = tuple(shlex.split(value.text()))
    except ValueError as error:
        raise value.error(f"`{value.name}` is not a command: {error}") from None
    if not words:
        raise value.error(f"`{value.name}` is empty")
    if operators := [word for word in words if word in _OPERATORS or word.endswith(";")]:
        hint = f"command: sh -c {shlex.quote(value.text())}"
        raise value.error(f"`{operators[0]}` needs a shell, and it is run without one", hint=hint)
    return words


def _seconds(value: Value) -> float:
    """Return the seconds that a command may take. ConfigError unless above 0: for timeout(1), 0 is no limit."""
    seconds = value.number()
    if seconds <= 0:
        raise value.error(f"`{value.name}` must be above 0")
    return seconds


def unknown(rules: Rules, known: Mapping[str, float | None], path: str = NAME) -> str:
    """Return a warning of checks that ``health.yml`` names and nobody knows, and of limits without effect; or "".

    ``known`` has the limit of each check; None for one that has none, as own checks.
    """
    limits = {**known, **dict.fromkeys(own.name for own in rules.own)}
    unknown = sorted((rules.off | rules.limits.keys()) - limits.keys())
    unused = sorted(name for name in rules.limits.keys() & limits.keys() if limits[name] is None)
    texts = [f"no check is called {', '.join(unknown)}"] if unknown else []
    texts += [f"{', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no limit"] if unused else []
    return f"{path}: {'; '.join(texts)}" if texts else ""
