"""Results of probes of engines, cached in the lab's directory until the next probe."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl.backends.docker.compose import render
from labctl.backends.docker.engine import Capabilities
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import Host, Lab, Limits
from labctl.system.files import write
from labctl.system.hostpath import HostPath

FILES = ".lab/engine-cache"
"""Folder of the cache, with a file per host; relative to the lab directory."""


def kept(directory: Path, host: str, engine: Capabilities | None) -> dict[str, Any]:
    """Return a host's cached results; {} without any, or if ``engine`` is given and they are of another."""
    try:
        results = json.loads((directory / FILES / f"{host}.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(results, dict) or (engine and results.get("daemon") != engine.identity()):
        return {}
    return results


def keep(directory: Path, host: str, engine: Capabilities, **results: Any) -> None:
    """Add results to a host's JSON cache file; results of another engine are dropped."""
    document = {**kept(directory, host, engine), "daemon": engine.identity(), **results}
    write(directory / FILES / f"{host}.json", json.dumps(document, indent=2) + "\n")


NEIGHBOURS = "proc/sys/net/ipv4/neigh/default/gc_thresh3"


def wanted(settings: Settings) -> Limits:
    """Return the limits that the settings ask for."""
    return Limits(
        memlock=settings.number("LAB_MEMLOCK"),
        stack=settings.number("LAB_STACK"),
        nofile=settings.number("LAB_NOFILE"),
        pids=settings.number("LAB_PIDS"),
    )


def pairs(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return name and value of each ulimit that the settings ask for, by the key of its cached result."""
    return {f"{name}={value}": (name, value) for name, value in wanted(settings).ulimits.items()}


def probe(settings: Settings, directory: Path, image: str, host: str, engine: Capabilities) -> tuple[str, ...]:
    """Probe an engine for limits not in its cache, and cache the results; return the refused ones, () if none is new.

    A refused limit is probed again by doctor only.
    """
    cached = kept(directory, host, engine)
    if not (unknown := unprobed(settings, cached)):
        return ()
    lab, limits = settings.text("LAB_NAME"), cached.get("limits", {})
    # One by one only if a throw-away container with all of them fails.
    together = engine.grants(lab, image, tuple(unknown.values()))
    limits |= {key: together or engine.grants(lab, image, (pair,)) for key, pair in unknown.items()}
    keep(directory, host, engine, limits=limits)
    return tuple(name for key, (name, _) in pairs(settings).items() if not limits[key])


def unprobed(settings: Settings, cached: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the limits that were never probed, given the cached results of a daemon."""
    return {key: pair for key, pair in pairs(settings).items() if key not in cached.get("limits", {})}


def granted(settings: Settings, directory: Path, hosts: Collection[str]) -> Limits:
    """Return the settings' limits, with None for each that not all probed hosts, at least one, have granted."""
    cached = [kept(directory, host, None) for host in hosts]
    # A host that was never probed does not restrict the others.
    probed = [results.get("limits", {}) for results in cached if results] or [{}]
    common = set.intersection(*map(_granted_keys, probed))
    refused = [name for key, (name, _) in pairs(settings).items() if key not in common]
    left_out: dict[str, Any] = dict.fromkeys(refused)
    return replace(wanted(settings), **left_out)


def _granted_keys(limits: Mapping[str, bool]) -> set[str]:
    return {key for key, is_granted in limits.items() if is_granted}


def with_files(lab: Lab) -> Lab:
    """Return the lab with nofile set to the hosts' lowest maximum, if they refused to raise a low default."""
    if not lacks_files(lab):
        return lab
    allowed = [kept(lab.directory, host.name, None).get("files") for host in lab.hosts]
    least = min((most for most in allowed if most), default=None)
    return replace(lab, limits=replace(lab.limits, nofile=least))


def lacks_files(lab: Lab) -> bool:
    """Return True if hosts refused to raise nofile, and the usual limit is too low for the lab."""
    return lab.limits.nofile is None and render.files_needed(lab) > render.USUAL_FILES


def ask_files(lab: Lab, host: str, engine: Capabilities) -> None:
    """Probe a host's maximum of open files in a container, and cache it, unless it is cached."""
    if kept(lab.directory, host, engine).get("files") is None:
        keep(lab.directory, host, engine, files=engine.most_files(lab.name, lab.image))


def needs(lab: Lab, host: Host) -> dict[str, str]:
    """Map each limit that has to be raised on a host for this lab to the reason; others are enough as they are."""
    files = render.files_needed(lab)
    reasons = {"memlock": "RDMA pins memory"} if host.infiniband else {}
    if files > (lab.limits.nofile or render.USUAL_FILES):
        reasons["nofile"] = f"a launcher opens up to {files} files"
    return reasons


def require_files(lab: Lab) -> None:
    """Raise HostError if a launcher of this lab needs more open files than containers may have."""
    needed, allowed = render.files_needed(lab), lab.limits.nofile
    if allowed is not None and allowed < needed:
        ranks = sum(node.slots for node in lab.nodes)
        raise HostError(
            f"{ranks} ranks take {needed} open files in one process, and containers here may have {allowed}",
            hint="raise LAB_NOFILE in .env; `labctl doctor` has the command for a host that refuses",
        )


def neighbours_lacking(lab: Lab, root: HostPath) -> tuple[int, int] | None:
    """Return the ARP table's size and the entries needed; None if it suffices or cannot be read.

    The kernel has a single table for all containers: arp(7), gc_thresh3.
    """
    try:
        allowed = int((root / NEIGHBOURS).read_text())
    except (OSError, ValueError):
        return None
    needed = render.neighbours_needed(lab)
    return (allowed, needed) if needed > allowed else None


def try_again(settings: Settings, lab: Lab, host: str, engine: Capabilities, names: tuple[str, ...]) -> tuple[str, ...]:
    """Probe refused limits of a host again; cache and return the names of those that it grants."""
    asked = {name: int(getattr(wanted(settings), name)) for name in names}
    granted = [name for name, value in asked.items() if engine.grants(lab.name, lab.image, ((name, value),))]
    if granted:
        cached = kept(lab.directory, host, engine).get("limits", {})
        keep(lab.directory, host, engine, limits=cached | {f"{name}={asked[name]}": True for name in granted})
    return tuple(granted)
