"""Which kernel limits a container can have here: a host that cannot raise one refuses to start the container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from labctl import scale, trials
from labctl.engines import Daemon
from labctl.errors import HostError, on_host
from labctl.hardware import HERE
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


def granted(
    settings: Settings,
    directory: Path,
    image: str,
    daemons: Mapping[str, Daemon | None],
    warn: Callable[[str], None],
) -> Limits:
    """The wanted limits less those that some host's daemon cannot give, which stay at its own default, with a warning.

    What was found is kept per daemon, and doctor tries again what was refused; without an engine, limits never probed
    are left out.
    """
    limits = wanted(settings)
    pairs = [("memlock", limits.memlock), ("stack", limits.stack), ("nofile", limits.nofile)]
    asked = {f"{name}={value}": (name, value) for name, value in pairs if value is not None}
    refused: set[str] = set()
    # A host that does not answer and was never asked takes nothing from those that do.
    heard = {host: engine for host, engine in daemons.items() if engine or trials.kept(directory, host, None)}
    for host, engine in (heard or daemons).items():
        with on_host(host):
            refused.update(refused_on(host, engine, settings, directory, image, asked, warn))
    given = {name: None if name in refused else value for name, value in pairs}
    return replace(limits, memlock=given["memlock"], stack=given["stack"], nofile=given["nofile"])


def with_files(lab: Lab, daemons: Mapping[str, Daemon | None]) -> Lab:
    """The lab with as many open files as its hosts allow, where they refused to raise that and the usual is too few."""
    if lab.limits.nofile is not None or scale.files_needed(lab) <= scale.USUAL_FILES:
        return lab
    allowed = []
    for host, engine in daemons.items():
        with on_host(host):
            allowed.append(most_files(lab, host, engine))
    least = min((most for most in allowed if most), default=None)
    return replace(lab, limits=replace(lab.limits, nofile=least))


def most_files(lab: Lab, host: str, engine: Daemon | None) -> int | None:
    """Open files that a process in a container of this host may have at most; None where nobody asked yet."""
    known: int | None = trials.kept(lab.directory, host, engine).get("files")
    if known is None and engine:
        known = engine.most_files(lab.name, lab.image)
        trials.keep(lab.directory, host, engine, files=known)
    return known


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


def refused_on(
    host: str,
    engine: Daemon | None,
    settings: Settings,
    directory: Path,
    image: str,
    asked: dict[str, tuple[str, int]],
    warn: Callable[[str], None],
) -> list[str]:
    """The names of those limits that one host cannot give, or was never asked for."""
    known: dict[str, bool] = trials.kept(directory, host, engine).get("limits", {})
    unknown = [key for key in asked if key not in known]
    if engine and unknown:
        known |= _probe(engine, settings.text("LAB_NAME"), image, {key: asked[key] for key in unknown})
        trials.keep(directory, host, engine, limits=known)
    refused = [name for key, (name, _) in asked.items() if not known.get(key)]
    if engine and unknown and refused:
        who = "this host" if host == HERE else host
        warn(f"{who} cannot raise {', '.join(refused)} for a container: its own limit stays in force")
    return refused


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
