"""``compose.override.yml`` in a lab's directory: what a person adds to the services, in Docker Compose's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labctl.config.yaml_reader import Value, compose
from labctl.errors import ConfigError, did_you_mean
from labctl.model import Pairs

FILE = "compose.override.yml"
# Keys of a service whose values are paths: Compose would take them from the directory of the file that labctl writes.
PATHS = ("volumes", "env_file", "extends", "build")


def read(directory: Path, services: tuple[str, ...]) -> Pairs:
    """Each service that the file adds to, and what that is as JSON; under the empty name what is for all.

    ConfigError for what is no YAML, and for a service that the lab does not have.
    """
    sections = _sections(directory)
    if "name" in sections or "include" in sections:
        key = "name" if "name" in sections else "include"
        raise sections[key].error(f"`{key}` is labctl's own", hint="remove it")
    found = sections.pop("services").entries() if "services" in sections else {}
    for name, service in found.items():
        if name not in services:
            raise service.error(f"no service `{name}` in this lab", hint=did_you_mean(name, services))
        _require_absolute(service)
    shared = {name: section.data() for name, section in sections.items()}
    return (*((name, _json(one.data())) for name, one in found.items()), *((("", _json(shared)),) if shared else ()))


def services(directory: Path) -> tuple[str, ...]:
    """Those that the file adds to, of any lab. ConfigError as ``read``."""
    sections = _sections(directory)
    return tuple(sections["services"].entries()) if "services" in sections else ()


def text(override: Pairs, services: tuple[str, ...]) -> str:
    """The part for some services as a compose file, which YAML takes JSON for; empty where there is none."""
    parts = dict(override)
    mine = {name: json.loads(parts[name]) for name in services if name in parts}
    if not mine:
        return ""
    return f"{json.dumps({'services': mine, **json.loads(parts.get('', '{}'))}, indent=2)}\n"


def _sections(directory: Path) -> dict[str, Value]:
    path = directory / FILE
    if not path.exists():
        return {}
    return compose(path, FILE, hint="write `services:`, as for docker compose, or remove the file").entries()


def _require_absolute(service: Value) -> None:
    for key, value in service.entries().items():
        if key in PATHS and (relative := next(filter(_is_relative, _texts(value.data())), "")):
            raise value.error(f"`{relative}` is a relative path", hint="write it from the root, or with ${HOME}")


def _is_relative(text: str) -> bool:
    return text.startswith((".", "~"))


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FILE}: {error}", hint="quote dates and the like") from error
