"""What a lab needs of this host first of all: Docker Engine, its command, buildx, compose; and what there is of it."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labctl.setup import apt
from labctl.system import process, procfs

OLDEST_ENGINE = 24

PACKAGES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "Docker Engine": (("docker.io", OLDEST_ENGINE),),
    "docker command": (("docker-cli", OLDEST_ENGINE),),
    "buildx": (("docker-buildx", 0), ("docker-buildx-plugin", 0)),
    "compose v2": (("docker-compose", 2), ("docker-compose-v2", 2), ("docker-compose-plugin", 2)),
}
"""What a lab needs, and the packages that bring it from which major version on; the distribution's own name first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What this host has, as far as setting it up goes. Versions are empty where the thing is missing."""

    distribution: str
    codename: str
    sources: tuple[apt.Source, ...]
    candidates: Mapping[str, str]
    engine: str
    """Version of the daemon that answers, else of the one that is installed."""
    running: bool
    denied: bool
    """The daemon's socket is there, but this session may not open it."""
    outsider: str
    """The person's name when not in group docker, whose members may open it; empty for members and root."""
    command: bool
    buildx: str
    compose: str
    systemd: bool
    mtu: int
    daemon: str
    """Path of ``dockerd``, or where its package puts it."""
    prefix: tuple[str, ...] | None
    """What to put before a command to run it as root; None where this person cannot."""


def observe(root: Path = Path("/")) -> Facts:
    """This host as it is."""
    release = procfs.os_release(root)
    server = process.run(["docker", "version", "--format", "{{.Server.Version}}"], check=False, timeout=20)
    running = server.code == 0
    return Facts(
        distribution=release.get("ID", ""),
        codename=release.get("VERSION_CODENAME", ""),
        sources=apt.read(root),
        candidates=_candidates(),
        engine=server.out.strip() if running else _version(["dockerd", "--version"]),
        running=running,
        denied="permission denied" in server.err,
        outsider=_outsider(),
        command=server.code != process.NOT_FOUND,
        buildx=_version(["docker", "buildx", "version"]),
        compose=_version(["docker", "compose", "version", "--short"]),
        systemd=procfs.has_systemd(root),
        mtu=procfs.default_mtu(root),
        daemon=shutil.which("dockerd") or "/usr/sbin/dockerd",
        prefix=root_prefix(),
    )


def root_prefix() -> tuple[str, ...] | None:
    """What makes a command root's: nothing, ``sudo``, or None where neither is to be had."""
    if os.geteuid() == 0:
        return ()
    if shutil.which("sudo") is None:
        return None
    if process.run(["sudo", "-n", "true"], check=False, timeout=10).code == 0:
        return ("sudo", "-n")
    return ("sudo",) if sys.stdin.isatty() else None


def _outsider() -> str:
    if os.geteuid() == 0:
        return ""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        # A number without a name cannot be put into a group.
        return ""
    try:
        group = grp.getgrnam("docker")
    except KeyError:
        return name
    return "" if name in group.gr_mem or group.gr_gid in os.getgroups() else name


def _candidates() -> Mapping[str, str]:
    names = [name for alternatives in PACKAGES.values() for name, _ in alternatives]
    return apt.candidates(process.run(["apt-cache", "policy", *names], check=False, env={"LC_ALL": "C"}).out)


def _version(argv: list[str]) -> str:
    """The first word that looks like a version; empty where the program or plugin is missing."""
    done = process.run(argv, check=False, timeout=20)
    words = done.out.replace(",", " ").split() if done.code == 0 else []
    return next((word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit()), "")


def major(version: str) -> int:
    """The leading number of a version, its epoch left out; 0 where there is none."""
    digits = version.rpartition(":")[2].lstrip("v").split(".")[0]
    return int(digits) if digits.isdigit() else 0
