"""``compose.override.yml`` in the lab directory: the user's additions to the services, in Docker Compose's syntax."""

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
"""Compose's tags: remove or replace a value of the lab's files."""
# Compose would resolve relative paths from the directory of the file that labctl writes. A build context may be a URL.
ABSOLUTE = re.compile(r"[/$]|\w+://|git@")
FILES = ("configs", "secrets")


def read(directory: Path, services: tuple[str, ...]) -> Pairs:
    """Read compose.override.yml as JSON by service, ``""`` for other sections. ConfigError if it cannot be used.

    It is raised for invalid YAML, ``name``, ``include``, a service that the lab does not have, and a relative path.
    """
    sections = _sections(directory)
    if "name" in sections or "include" in sections:
        key = "name" if "name" in sections else "include"
        raise sections[key].error(f"`{key}` is set by labctl", hint="remove it")
    additions = sections.pop("services").entries() if "services" in sections else {}
    for name, service in additions.items():
        if name not in services:
            raise service.error(f"no service `{name}` in this lab", hint=did_you_mean(name, services))
        _require_absolute_paths(service)
    for section in (sections[name] for name in FILES if name in sections):
        _require_absolute_files(section)
    parts = {name: service.data(TAGS) for name, service in additions.items()}
    if shared := {name: section.data(TAGS) for name, section in sections.items()}:
        parts[""] = shared
    return tuple((name, _json(part)) for name, part in parts.items())


def services(directory: Path) -> tuple[str, ...]:
    """Return the names of services in compose.override.yml; none without it. ConfigError for invalid YAML."""
    sections = _sections(directory)
    return tuple(sections["services"].entries()) if "services" in sections else ()


def text(override: Pairs, services: tuple[str, ...]) -> str:
    """Return a compose file's text with the additions for these services; empty if there are none."""
    parts = dict(override)
    mine = {name: json.loads(parts[name]) for name in services if name in parts}
    if not mine:
        return ""
    return f"{_yaml({'services': mine, **json.loads(parts.get('', '{}'))})}\n"


def _sections(directory: Path) -> dict[str, Value]:
    """Return the top-level sections of compose.override.yml; empty without the file. ConfigError if invalid YAML."""
    path = directory / FILE
    if not path.exists():
        return {}
    return compose(path, FILE, hint="write `services:`, as for docker compose, or remove the file").entries()


def _require_absolute_paths(service: Value) -> None:
    """Raise ConfigError if a host path in a service is relative."""
    for key, value in service.entries().items():
        _require_absolute(value, _paths(key, _untagged(value.data(TAGS))))


def _require_absolute_files(section: Value) -> None:
    """Raise ConfigError if the file of a config or secret is a relative path."""
    for entry in section.entries().values():
        _require_absolute(entry, _members(_untagged(entry.data(TAGS)), "file"))


def _require_absolute(value: Value, paths: Iterator[Any]) -> None:
    """Raise ConfigError, with the value's line, for the first of these paths that is relative."""
    for path in paths:
        if isinstance(path, str) and not ABSOLUTE.match(path):
            raise value.error(f"`{path}` is a relative path", hint="write it from the root, or with ${HOME}")


def _paths(key: str, value: Any) -> Iterator[Any]:
    """Yield the host paths in a service's env_file, extends, build or volumes value; none for other keys."""
    if key == "env_file":
        for file in value if isinstance(value, list) else [value]:
            yield from _members(file, "path") if isinstance(file, dict) else [file]
    elif key == "extends":
        yield from _members(value, "file")
    elif key == "build":
        yield from _members(value, "context") if isinstance(value, dict) else [value]
    elif key == "volumes" and isinstance(value, list):
        yield from _volume_sources(value)


def _volume_sources(volumes: list[Any]) -> Iterator[Any]:
    """Yield volumes that name a path: a bind mapping's source, a text as a whole; named volumes are left out."""
    for volume in volumes:
        if isinstance(volume, dict) and volume.get("type") == "bind":
            yield from _members(volume, "source")
        elif isinstance(volume, str):
            source = volume.partition(":")[0]
            if "/" in source or source.startswith((".", "~")):
                yield volume


def _members(value: Any, key: str) -> Iterator[Any]:
    """Yield the value of a key if the value is a mapping that has it."""
    if isinstance(value, dict) and key in value:
        yield value[key]


def _untagged(value: Any) -> Any:
    """Return the value under a Compose tag, or the value itself if it has none."""
    return next(iter(value.values())) if _tag(value) else value


def _tag(value: Any) -> str:
    """Return the Compose tag of a value read as ``{tag: value}``; empty without one."""
    return next((tag for tag in TAGS if isinstance(value, dict) and tag in value), "")


def _yaml(value: Any, margin: str = "\n") -> str:
    """Render a value as indented YAML in JSON style, with Compose's tags before tagged values."""
    if tag := _tag(value):
        return f"{tag} {_yaml(value[tag], margin)}"
    deeper = f"{margin}  "
    if isinstance(value, dict):
        # Compose merges by an unquoted `<<` only.
        named = ((key if key == "<<" else json.dumps(key), item) for key, item in value.items())
        ends, inner = "{}", [f"{key}: {_yaml(item, deeper)}" for key, item in named]
    elif isinstance(value, list):
        ends, inner = "[]", [_yaml(item, deeper) for item in value]
    else:
        return json.dumps(value)
    return f"{ends[0]}{deeper}{f',{deeper}'.join(inner)}{margin}{ends[1]}" if inner else ends


def _json(value: Any) -> str:
    """Return a value as JSON. ConfigError for types that JSON does not have, such as dates."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FILE}: {error}", hint="quote dates and the like") from error
