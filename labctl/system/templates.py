"""Templates of files, rendered by jinja2 with compiled templates kept between commands."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from labctl.system import files


def template(path: Path) -> Any:
    """Return the Jinja template of a file, by absolute path or by name in ``compose/``."""
    return _environment().get_template(str(path))


@lru_cache(maxsize=4096)
def yaml_string(value: str) -> str:
    """Quote a value as a YAML string for compose, each ``$`` doubled so that compose keeps it."""
    value = value.replace("$", "$$")
    if value.isascii() and value.isprintable():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    import yaml

    return str(yaml.safe_dump(value, default_style='"', width=float("inf"), allow_unicode=False)).rstrip("\n")


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Create the Jinja environment, once; keep compiled templates if labctl's own folder is writable."""
    from jinja2 import Environment, FileSystemBytecodeCache, FunctionLoader, StrictUndefined
    from jinja2.bccache import Bucket

    class Kept(FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: Bucket) -> None:
            """Write the compiled template; ignore OSError."""
            with suppress(OSError):  # The disk is full, or the quota.
                super().dump_bytecode(bucket)

    def read(name: str) -> str:
        """Return a template's text: an absolute path, or a file of ``compose/``."""
        path = Path(name)
        return (path if path.is_absolute() else files.path("compose", name)).read_text(encoding="utf-8")

    # Compiled templates are kept beside compiled modules, where only those write who may change labctl itself.
    kept = Path(__file__).with_name("__pycache__")
    cache = Kept(str(kept)) if os.access(kept, os.W_OK) else None
    # Autoescaping is for HTML; every value here goes through `q` (YAML) or `sh` (bash) instead.
    environment = Environment(  # noqa: S701
        undefined=StrictUndefined, keep_trailing_newline=True, loader=FunctionLoader(read), bytecode_cache=cache
    )
    environment.filters["q"] = yaml_string
    environment.filters["sh"] = shlex.quote
    return environment
