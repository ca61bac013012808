"""Network interfaces of hosts: which are up, and what has changed since they were counted last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

SCRIPT = Path(__file__).with_name("interfaces.sh").read_text(encoding="utf-8")


class Interface(Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    """Whether it is up and has a carrier."""
    speed: int = -1
    """Mbit/s; -1 where the kernel does not know it."""


def read(output: str, *, interfaces: str = ".*", driver: str = ".*") -> dict[str, Interface]:
    """The interfaces that the script lists, by name, whose name and driver match. ValueError for another output."""
    found = {}
    for line in output.splitlines():
        name, its_driver, state, carrier, speed = line.split(" ")
        if re.fullmatch(interfaces, name) and re.fullmatch(driver, its_driver):
            # Drivers that do not keep a state say that it is unknown.
            up = state in ("up", "unknown") and carrier == "1"
            found[name] = Interface(name=name, up=up, speed=int(speed))
    return found


def up(interfaces: Mapping[str, Interface]) -> int:
    return sum(one.up for one in interfaces.values())


def down(interfaces: Iterable[Interface]) -> str:
    """Those that are down, as text; empty if none is."""
    names = [one.name for one in interfaces if not one.up]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} down" if names else ""


def changes(before: Mapping[str, Interface], after: Mapping[str, Interface]) -> list[str]:
    """What is worse than before."""
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
