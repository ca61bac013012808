"""A script that starts its ranks by itself: it runs once, in the launcher container.

It reads the nodes from ``$LABCTL_HOSTFILE``, and every rank must report in with ``labctl: rank R of W on NODE``;
``script:once`` is for a program that starts none.
"""

from __future__ import annotations

from collections.abc import Mapping

from labctl.launchers import LaunchSpec, first_slots_only, hostfile

PROGRAM = ""
WAYS = ("script", "once")
OPTIONS: Mapping[str, int] = {}
RESERVED: frozenset[str] = frozenset()


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number."""
    first_slots_only("script", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the command for the launcher container: the program itself."""
    return (launch.program,)


files = hostfile
