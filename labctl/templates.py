"""The templates in ``compose/``; every value that they place goes through a filter that makes it data."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Any

from labctl import resources


def template(name: str) -> Any:
    """A template by its file name; ``render`` it with what it names."""
    return _environment().get_template(name)


@lru_cache(maxsize=4096)
def yaml_string(value: str) -> str:
    """A value as a double-quoted YAML string that compose reads back byte for byte: compose's ``$`` is doubled."""
    value = value.replace("$", "$$")
    if value.isascii() and value.isprintable():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    import yaml

    return str(yaml.safe_dump(value, default_style='"', width=float("inf"), allow_unicode=False)).rstrip("\n")


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Autoescaping is for HTML; every value here goes through `q` (YAML) or `sh` (bash) instead.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(resources.path("compose")), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["q"] = yaml_string
    environment.filters["sh"] = shlex.quote
    return environment
