"""``compose.override.yml`` in a lab's directory: what a person adds to the services, in Docker Compose's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labctl.config.yaml_reader import Value, compose
from labctl.errors import ConfigError, did_you_mean
from labctl.model import Pairs

FILE = "compose.override.yml"
TAGS = ("!reset", "!override")
"""Compose's own: what a value of the lab's files becomes."""
# Compose would take other paths from the directory of the file that labctl writes. A build may be of a repository.
ABSOLUTE = re.compile(r"[/$]|\w+://|git@")
FILES = ("configs", "secrets")


def read(directory: Path, services: tuple[str, ...]) -> Pairs:
    """Each service that the file adds to, and what that is as JSON; under the empty name what is for all.

    ConfigError for what is no YAML, for a service that the lab does not have, and for a relative path.
    """
    sections = _sections(directory)
    if "name" in sections or "include" in sections:
        key = "name" if "name" in sections else "include"
        raise sections[key].error(f"`{key}` is labctl's own", hint="remove it")
    found = sections.pop("services").entries() if "services" in sections else {}
    for name, service in found.items():
        if name not in services:
            raise service.error(f"no service `{name}` in this lab", hint=did_you_mean(name, services))
        for key, value in service.entries().items():
            _require_absolute(value, _paths(key, _untagged(value.data(TAGS))))
    for name in FILES:
        for one in sections[name].entries().values() if name in sections else ():
            _require_absolute(one, _members(_untagged(one.data(TAGS)), "file"))
    parts = {name: one.data(TAGS) for name, one in found.items()}
    if shared := {name: section.data(TAGS) for name, section in sections.items()}:
        parts[""] = shared
    return tuple((name, _json(part)) for name, part in parts.items())


def services(directory: Path) -> tuple[str, ...]:
    """Those that the file adds to, of any lab. ConfigError as ``read``."""
    sections = _sections(directory)
    return tuple(sections["services"].entries()) if "services" in sections else ()


def text(override: Pairs, services: tuple[str, ...]) -> str:
    """The part for some services as a compose file; empty where there is none."""
    parts = dict(override)
    mine = {name: json.loads(parts[name]) for name in services if name in parts}
    if not mine:
        return ""
    return f"{_yaml({'services': mine, **json.loads(parts.get('', '{}'))})}\n"


def _sections(directory: Path) -> dict[str, Value]:
    path = directory / FILE
    if not path.exists():
        return {}
    return compose(path, FILE, hint="write `services:`, as for docker compose, or remove the file").entries()


def _require_absolute(value: Value, paths: Iterator[Any]) -> None:
    for path in paths:
        if isinstance(path, str) and not ABSOLUTE.match(path):
            raise value.error(f"`{path}` is a relative path", hint="write it from the root, or with ${HOME}")


def _paths(key: str, value: Any) -> Iterator[Any]:
    """What a key of a service names of the host; empty where that is no path."""
    if key == "env_file":
        for one in value if isinstance(value, list) else [value]:
            yield from _members(one, "path") if isinstance(one, dict) else [one]
    elif key == "extends":
        yield from _members(value, "file")
    elif key == "build":
        yield from _members(value, "context") if isinstance(value, dict) else [value]
    elif key == "volumes" and isinstance(value, list):
        for one in value:
            if isinstance(one, dict) and one.get("type") == "bind":
                yield from _members(one, "source")
            elif isinstance(one, str) and ("/" in (source := one.partition(":")[0]) or source.startswith((".", "~"))):
                yield one


def _members(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict) and key in value:
        yield value[key]


def _untagged(value: Any) -> Any:
    return next(iter(value.values())) if _tag(value) else value


def _tag(value: Any) -> str:
    """The tag that a value was read with; empty without one."""
    return next((tag for tag in TAGS if isinstance(value, dict) and tag in value), "")


def _yaml(value: Any, margin: str = "\n") -> str:
    """As JSON, which YAML takes, with Compose's tags before what has them."""
    if tag := _tag(value):
        return f"{tag} {_yaml(value[tag], margin)}"
    deeper = f"{margin}  "
    if isinstance(value, dict):
        # Compose merges by a bare `<<` alone.
        named = ((key if key == "<<" else json.dumps(key), one) for key, one in value.items())
        ends, inner = "{}", [f"{key}: {_yaml(one, deeper)}" for key, one in named]
    elif isinstance(value, list):
        ends, inner = "[]", [_yaml(one, deeper) for one in value]
    else:
        return json.dumps(value)
    return f"{ends[0]}{deeper}{f',{deeper}'.join(inner)}{margin}{ends[1]}" if inner else ends


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FILE}: {error}", hint="quote dates and the like") from error
