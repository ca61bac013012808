"""Where a command works: the lab's directory, the process's environment, flags that override settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labctl.config import settings
from labctl.model import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the command line hands to a flow; ``emit`` takes progress."""

    directory: Path
    environ: Mapping[str, str]
    emit: Callable[[Event], None]
    flags: Mapping[str, str]

    def settings(self) -> settings.Settings:
        """The settings in force; ConfigError with ``file:line`` for what cannot be read."""
        found = settings.load(self.directory, self.environ, self.flags)
        for warning in found.warnings:
            self.warn(warning)
        return found

    def warn(self, text: str) -> None:
        self.emit(Event(kind="warning", text=text))

    def notice(self, text: str) -> None:
        self.emit(Event(kind="notice", text=text))

    def waits(self, text: str) -> None:
        self.emit(Event(kind="waiting", text=text))

    def line(self, text: str) -> None:
        self.emit(Event(kind="line", text=text))
