"""HTML pages: self-contained files with style and charts, from templates that extend ``page.html.j2``."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from labctl.system import human

HERE = Path(__file__).parent


def render(name: str, *folders: Path, **data: object) -> str:
    """Render a template of these folders or of this one; all text is escaped."""
    text: str = _environment((*folders, HERE)).get_template(name).render(data)
    return text


def static(name: str) -> str:
    """Return a script or a style of the pages."""
    return (HERE / "static" / name).read_text(encoding="utf-8")


def policy(scripts: Iterable[str]) -> str:
    """Return the part of a page's Content-Security-Policy that lets these scripts run, and no other."""
    hashes = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    return "; script-src " + " ".join(f"'sha256-{digest}'" for digest in hashes)


def finite(value: float | None) -> float | None:
    """Return the number; None for nan and infinity."""
    return value if value is not None and math.isfinite(value) else None


def _prose(text: str) -> Any:
    """Render text as HTML, with `commands` in backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (it is escaped)


@lru_cache(maxsize=2)
def _environment(folders: tuple[Path, ...]) -> Any:
    """Create the Jinja environment of these folders' templates, with labctl's filters; cached."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    environment.filters["number"] = human.number
    environment.filters["duration"] = human.duration
    environment.filters["memory"] = human.memory
    environment.filters["share"] = human.share
    environment.filters["listed"] = human.listed
    return environment
