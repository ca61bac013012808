"""Network interfaces of hosts: counts those that are up, and finds changes since an earlier count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

SCRIPT = Path(__file__).with_name("interfaces.sh").read_text(encoding="utf-8")


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface with hardware."""

    name: str
    up: bool
    """Up, with a carrier."""
    speed: int = -1
    """Mbit/s; -1 if the kernel does not know it."""


def read(output: str, *, interfaces: str = ".*", driver: str = ".*") -> dict[str, Interface]:
    """Parse the script's output: by name, the interfaces whose name and driver match. ValueError for other output."""
    by_name = {}
    for line in output.splitlines():
        name, its_driver, state, carrier, speed = line.split(" ")
        if re.fullmatch(interfaces, name) and re.fullmatch(driver, its_driver):
            # Drivers that keep no state report "unknown".
            up = state in ("up", "unknown") and carrier == "1"
            by_name[name] = Interface(name=name, up=up, speed=int(speed))
    return by_name


def up(interfaces: Mapping[str, Interface]) -> int:
    """Return the number of interfaces that are up."""
    return sum(interface.up for interface in interfaces.values())


def down(interfaces: Iterable[Interface]) -> str:
    """Render ``A, B are down`` for the interfaces that are down; empty if none is."""
    names = [interface.name for interface in interfaces if not interface.up]
    if not names:
        return ""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} down"


def changes(before: Mapping[str, Interface], after: Mapping[str, Interface]) -> list[str]:
    """List the interfaces that are worse than before: gone, down or slower."""
    worse = []
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            worse.append(f"{name} is gone")
        elif old.up and not new.up:
            worse.append(f"{name} went down")
        elif new.up and 0 < new.speed < old.speed:
            worse.append(f"{name} fell from {old.speed} to {new.speed} Mbit/s")
    return worse
