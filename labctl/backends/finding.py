"""Result of a check of `labctl doctor`, or of a check that stops a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from msgspec import Struct

from labctl.model import HERE

LIMIT = 10.0
"""Default time limit of a check, in seconds."""
Level = Literal["ok", "warn", "error"]


class Finding(Struct, frozen=True):
    """Result of a check. ``node`` is a container or a host; ``local`` is this machine.

    ``fix`` is a command to type in the lab's directory. If ``auto_fixable``, it is simple commands joined by ``&&``
    that change only labctl's own resources: ``--fix`` may run it.
    """

    code: str
    level: Level
    node: str
    summary: str
    impact: str = ""
    fix: str = ""
    auto_fixable: bool = False


def ok(code: str, summary: str, node: str = HERE) -> Finding:
    return Finding(code, "ok", node, summary)


def problem(
    level: Level, code: str, summary: str, impact: str, fix: str, *, node: str = HERE, auto_fixable: bool = False
) -> Finding:
    """Return the Finding of a failed check, at level ``warn`` or ``error``, with impact and fix."""
    return Finding(code, level, node, summary, impact, fix, auto_fixable)


warn, error = partial(problem, "warn"), partial(problem, "error")

Receiver = Callable[[Sequence[Finding]], object]
"""Gets the findings of a check when it has ended."""


def ignore(_: Sequence[Finding]) -> None:
    """Do nothing with findings until all checks have ended."""
