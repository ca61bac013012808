"""The context of a command: lab directory, environment, flags that override settings, and progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from labctl.config import settings
from labctl.model import Event


class Context(Struct, frozen=True, kw_only=True):
    """What the command line passes to a flow; ``emit`` receives progress."""

    directory: Path
    environ: Mapping[str, str]
    emit: Callable[[Event], None]
    flags: Mapping[str, str]

    def settings(self) -> settings.Settings:
        """The effective settings; emits their warnings. ConfigError with ``file:line``."""
        loaded = settings.load(self.directory, self.environ, self.flags)
        for warning in loaded.warnings:
            self.warn(warning)
        return loaded

    def warn(self, text: str) -> None:
        self.emit(Event(kind="warning", text=text))

    def notice(self, text: str) -> None:
        self.emit(Event(kind="notice", text=text))

    def waits(self, text: str) -> None:
        self.emit(Event(kind="waiting", text=text))

    def line(self, text: str) -> None:
        self.emit(Event(kind="line", text=text))


def find_lab(directory: Path) -> Path:
    """The nearest directory upwards whose .env sets LAB_NAME, else the directory itself.

    Code below a lab directory may have a .env of its own.
    """
    for one in (directory, *directory.parents):
        with suppress(OSError):
            text = (one / ".env").read_text(encoding="utf-8", errors="replace")
            if re.search(r"^\s*(export\s+)?LAB_NAME\s*=", text, re.MULTILINE):
                return one
    return directory
