"""What probes found out about engines, kept in the lab's directory until the next probe."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl.backends.docker.compose import render
from labctl.backends.docker.engine import Capabilities
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import Lab, Limits
from labctl.system.files import write
from labctl.system.hostpath import HostPath

FILES = ".lab/engine-cache"
"""A file for each host."""


def kept(directory: Path, host: str, engine: Capabilities | None) -> dict[str, Any]:
    """What is kept of this host's engine, or of the last one there where none is asked; empty where it was another."""
    try:
        found = json.loads((directory / FILES / f"{host}.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or (engine and found.get("daemon") != engine.identity()):
        return {}
    return found


def keep(directory: Path, host: str, engine: Capabilities, **found: Any) -> None:
    """Keep more of what was found out; of another engine nothing is kept."""
    document = {**kept(directory, host, engine), "daemon": engine.identity(), **found}
    write(directory / FILES / f"{host}.json", json.dumps(document, indent=2) + "\n")


NEIGHBOURS = "proc/sys/net/ipv4/neigh/default/gc_thresh3"


def wanted(settings: Settings) -> Limits:
    """The limits that the settings ask for."""
    return Limits(
        memlock=settings.number("LAB_MEMLOCK"),
        stack=settings.number("LAB_STACK"),
        nofile=settings.number("LAB_NOFILE"),
        pids=settings.number("LAB_PIDS"),
    )


def pairs(settings: Settings) -> dict[str, tuple[str, int]]:
    """Those of the wanted limits that a daemon may refuse, by the word under which its answer is kept."""
    return {f"{name}={value}": (name, value) for name, value in wanted(settings).ulimits.items()}


def probe(settings: Settings, directory: Path, image: str, host: str, engine: Capabilities) -> tuple[str, ...]:
    """Ask a daemon for those limits that it was never asked for, and keep what it says; the names of those it refuses.

    What was found is kept per daemon, and doctor tries again what was refused.
    """
    found = kept(directory, host, engine)
    if not (unknown := unprobed(settings, found)):
        return ()
    lab, known = settings.text("LAB_NAME"), found.get("limits", {})
    # One by one only where a throw-away container with all of them fails.
    together = engine.grants(lab, image, tuple(unknown.values()))
    known |= {key: together or engine.grants(lab, image, (pair,)) for key, pair in unknown.items()}
    keep(directory, host, engine, limits=known)
    return tuple(name for key, (name, _) in pairs(settings).items() if not known[key])


def unprobed(settings: Settings, found: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The limits that were never asked for, by what is ``kept`` of a daemon."""
    return {key: pair for key, pair in pairs(settings).items() if key not in found.get("limits", {})}


def granted(settings: Settings, directory: Path, hosts: Collection[str]) -> Limits:
    """The wanted limits less those that some host's daemon refused or was never asked for: its own default stays."""
    found = [kept(directory, host, None) for host in hosts]
    # A host that was never asked for any takes nothing from those that were.
    known = [one.get("limits", {}) for one in found if one] or [{}]
    refused = [name for key, (name, _) in pairs(settings).items() if not all(one.get(key) for one in known)]
    left_out: dict[str, Any] = dict.fromkeys(refused)
    return replace(wanted(settings), **left_out)


def with_files(lab: Lab) -> Lab:
    """The lab with as many open files as its hosts are known to allow, where that matters."""
    if not lacks_files(lab):
        return lab
    allowed = [kept(lab.directory, host.name, None).get("files") for host in lab.hosts]
    least = min((most for most in allowed if most), default=None)
    return replace(lab, limits=replace(lab.limits, nofile=least))


def lacks_files(lab: Lab) -> bool:
    """Whether hosts refused to raise the number of open files, and the usual is too few."""
    return lab.limits.nofile is None and render.files_needed(lab) > render.USUAL_FILES


def ask_files(lab: Lab, host: str, engine: Capabilities) -> None:
    """Find out, once, how many open files a process in a container of this host may have at most."""
    if kept(lab.directory, host, engine).get("files") is None:
        keep(lab.directory, host, engine, files=engine.most_files(lab.name, lab.image))


def require_files(lab: Lab) -> None:
    """HostError where a launcher of this lab would run out of files: it says how many that takes and what raises it."""
    needed, allowed = render.files_needed(lab), lab.limits.nofile
    if allowed is not None and allowed < needed:
        ranks = sum(node.slots for node in lab.nodes)
        raise HostError(
            f"{ranks} ranks take {needed} open files in one process, and containers here may have {allowed}",
            hint="LAB_NOFILE in .env asks for more; `labctl doctor` says what raises it on a host that refuses",
        )


def neighbours_lacking(lab: Lab, root: HostPath) -> tuple[int, int] | None:
    """Entries that this host's neighbour table has, and those that the lab takes, where that is more.

    The kernel has one table for all containers together: arp(7), gc_thresh3.
    """
    try:
        allowed = int((root / NEIGHBOURS).read_text())
    except (OSError, ValueError):
        return None
    needed = render.neighbours_needed(lab)
    return (allowed, needed) if needed > allowed else None


def try_again(settings: Settings, lab: Lab, host: str, engine: Capabilities, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these limits, refused before, that this host can raise now; they are in force from the next `up`."""
    asked = {name: int(getattr(wanted(settings), name)) for name in names}
    granted = [name for name, value in asked.items() if engine.grants(lab.name, lab.image, ((name, value),))]
    if granted:
        known = kept(lab.directory, host, engine).get("limits", {})
        keep(lab.directory, host, engine, limits=known | {f"{name}={asked[name]}": True for name in granted})
    return tuple(granted)
