"""Files that list Python packages, a requirement a line, as `pip install --requirement` reads them."""

from __future__ import annotations

import re
from pathlib import Path

from labctl.config.settings import require_requirement
from labctl.errors import ConfigError

LARGEST = 1 << 20


def read(path: Path, source: str) -> tuple[str, ...]:
    """Return a file's requirements without spaces and comments. ConfigError if unreadable or a line is invalid."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{source}: {path}: cannot be read: {reason}", hint="name a file of requirements") from error
    packages = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = without_spaces(re.sub(r"(^|\s)#.*", "", line))
        if not word:
            continue
        try:
            require_requirement(word)
        except ValueError as error:
            hint = "options, URLs and markers are not taken; build an image of your own for them: docs/images.md"
            raise ConfigError(f"{path}:{number}: {error.args[0]}", hint=hint) from None
        packages.append(word)
    return tuple(packages)


def without_spaces(requirement: str) -> str:
    """Return a requirement without spaces around its operators and ends."""
    return re.sub(r"\s*([=<>!~,]+)\s*", r"\1", requirement).strip()
