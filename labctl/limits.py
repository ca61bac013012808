"""Which kernel limits a container can have here: a host that cannot raise one refuses to start the container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from labctl import trials
from labctl.engines import Daemon
from labctl.hardware import HERE
from labctl.model import Lab, Limits
from labctl.settings import Settings


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
    for host, engine in daemons.items():
        refused.update(refused_on(host, engine, settings, directory, image, asked, warn))
    given = {name: None if name in refused else value for name, value in pairs}
    return replace(limits, memlock=given["memlock"], stack=given["stack"], nofile=given["nofile"])


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
