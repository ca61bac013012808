"""Which kernel limits a container can have here: a host that cannot raise one refuses to start the container."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from labctl import scale, trials
from labctl.engines import Daemon
from labctl.errors import HostError
from labctl.model import Lab, Limits
from labctl.settings import Settings

NEIGHBOURS = "proc/sys/net/ipv4/neigh/default/gc_thresh3"


def wanted(settings: Settings) -> Limits:
    """The limits that the settings ask for."""
    memlock = settings.text("LAB_MEMLOCK")
    return Limits(
        memlock=-1 if memlock == "unlimited" else int(memlock),
        stack=settings.number("LAB_STACK"),
        nofile=settings.number("LAB_NOFILE"),
        pids=settings.number("LAB_PIDS"),
    )


def pairs(settings: Settings) -> dict[str, tuple[str, int]]:
    """Those of the wanted limits that a daemon may refuse, by the word under which its answer is kept."""
    limits = wanted(settings)
    asked = (("memlock", limits.memlock), ("stack", limits.stack), ("nofile", limits.nofile))
    return {f"{name}={value}": (name, value) for name, value in asked if value is not None}


def probe(settings: Settings, directory: Path, image: str, host: str, engine: Daemon) -> tuple[str, ...]:
    """Ask a daemon for those limits that it was never asked for, and keep what it says; the names of those it refuses.

    What was found is kept per daemon, and doctor tries again what was refused.
    """
    asked = pairs(settings)
    known: dict[str, bool] = trials.kept(directory, host, engine).get("limits", {})
    unknown = {key: pair for key, pair in asked.items() if key not in known}
    if not unknown:
        return ()
    known |= _probe(engine, settings.text("LAB_NAME"), image, unknown)
    trials.keep(directory, host, engine, limits=known)
    return tuple(name for key, (name, _) in asked.items() if not known[key])


def granted(settings: Settings, directory: Path, hosts: Collection[str]) -> Limits:
    """The wanted limits less those that some host's daemon refused or was never asked for: its own default stays."""
    # A host that was never asked for any takes nothing from those that were.
    heard = [host for host in hosts if trials.kept(directory, host, None)] or hosts
    known = [trials.kept(directory, host, None).get("limits", {}) for host in heard]
    refused = [name for key, (name, _) in pairs(settings).items() if not all(one.get(key) for one in known)]
    left_out: dict[str, Any] = dict.fromkeys(refused)
    return replace(wanted(settings), **left_out)


def with_files(lab: Lab) -> Lab:
    """The lab with as many open files as its hosts are known to allow, where that matters."""
    if not lacks_files(lab):
        return lab
    allowed = [trials.kept(lab.directory, host.name, None).get("files") for host in lab.hosts]
    least = min((most for most in allowed if most), default=None)
    return replace(lab, limits=replace(lab.limits, nofile=least))


def lacks_files(lab: Lab) -> bool:
    """Whether hosts refused to raise the number of open files, and the usual is too few."""
    return lab.limits.nofile is None and scale.files_needed(lab) > scale.USUAL_FILES


def ask_files(lab: Lab, host: str, engine: Daemon) -> None:
    """Find out, once, how many open files a process in a container of this host may have at most."""
    if trials.kept(lab.directory, host, engine).get("files") is None:
        trials.keep(lab.directory, host, engine, files=engine.most_files(lab.name, lab.image))


def require_files(lab: Lab) -> None:
    """HostError where a launcher of this lab would run out of files: it says how many that takes and what raises it."""
    needed, allowed = scale.files_needed(lab), lab.limits.nofile
    if allowed is not None and allowed < needed:
        ranks = sum(node.slots for node in lab.nodes)
        raise HostError(
            f"{ranks} ranks take {needed} open files in one process, and containers here may have {allowed}",
            hint="LAB_NOFILE in .env asks for more; `labctl doctor` says what raises it on a host that refuses",
        )


def neighbours_lacking(lab: Lab, root: Path) -> tuple[int, int] | None:
    """Entries that this host's neighbour table has, and those that the lab takes, where that is more.

    The kernel has one table for all containers together: arp(7), gc_thresh3.
    """
    try:
        allowed = int((root / NEIGHBOURS).read_text())
    except (OSError, ValueError):
        return None
    needed = scale.neighbours_needed(lab)
    return (allowed, needed) if needed > allowed else None


def try_again(settings: Settings, lab: Lab, engine: Daemon, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these limits, refused before, that this host can raise now; they are in force from the next `up`."""
    asked = {name: int(getattr(wanted(settings), name)) for name in names}
    granted = [name for name, value in asked.items() if engine.grants(lab.name, lab.image, ((name, value),))]
    if granted:
        known = trials.kept(lab.directory, engine.hosts[0], engine).get("limits", {})
        trials.keep(
            lab.directory, engine.hosts[0], engine, limits=known | {f"{name}={asked[name]}": True for name in granted}
        )
    return tuple(granted)


def _probe(engine: Daemon, lab: str, image: str, asked: dict[str, tuple[str, int]]) -> dict[str, bool]:
    """Start a throw-away container with all of them; one by one only where that fails."""
    if engine.grants(lab, image, tuple(asked.values())):
        return dict.fromkeys(asked, True)
    return {key: engine.grants(lab, image, (pair,)) for key, pair in asked.items()}
