"""What a lab requires of this host: Docker Engine, its command, buildx, compose; and which of it the host has."""

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
"""Requirement -> packages that meet it and their oldest major version; the distribution's own name first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What this host has; a version is empty if the thing is missing."""

    distribution: str
    codename: str
    sources: tuple[apt.Source, ...]
    candidates: Mapping[str, str]
    engine: str
    """Version of the running daemon, else of the installed one."""
    running: bool
    denied: bool
    """Permission denied on the daemon's socket."""
    outsider: str
    """The user's name if not in group docker, whose members may open it; empty for members and root."""
    command: bool
    buildx: str
    compose: str
    systemd: bool
    mtu: int
    daemon: str
    """Path of ``dockerd``, or where its package puts it."""
    prefix: tuple[str, ...] | None
    """What to put before a command to run it as root; None if this user cannot."""


def observe(root: Path = Path("/")) -> Facts:
    """This host as it is."""
    release = procfs.os_release(root)
    engine, why = _engine()
    return Facts(
        distribution=release.get("ID", ""),
        codename=release.get("VERSION_CODENAME", ""),
        sources=apt.read(root),
        candidates=_candidates(),
        engine=engine or _version(["dockerd", "--version"]),
        running=bool(engine),
        denied="permission denied" in why.lower(),
        outsider=_outsider(),
        command=shutil.which("docker") is not None,
        buildx=_first_version(plugin_version("buildx")[0]),
        compose=_first_version(plugin_version("compose")[0]),
        systemd=procfs.has_systemd(root),
        mtu=procfs.default_mtu(root),
        daemon=shutil.which("dockerd") or "/usr/sbin/dockerd",
        prefix=root_prefix(),
    )


def root_prefix() -> tuple[str, ...] | None:
    """What makes a command root's: nothing, ``sudo``, or None if there is no sudo or it cannot ask."""
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


def plugin_version(name: str, seconds: float = 20) -> tuple[str, str]:
    """What ``docker NAME version`` prints for compose or buildx, and why it fails; one of both is empty."""
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException

    if shutil.which("docker") is None:
        return "", "docker: command not found"
    docker = DockerClient(client_call=["timeout", str(seconds), "docker"])
    try:
        return (docker.compose if name == "compose" else docker.buildx).version().strip(), ""
    except DockerException as error:
        return "", (error.stderr or "").strip() or "no output"


def _engine() -> tuple[str, str]:
    """Version of the running daemon, and why there is none; one of both is empty."""
    import requests

    import docker

    try:
        return str(docker.from_env(timeout=20).version()["Version"]), ""
    except (docker.errors.DockerException, requests.RequestException) as error:
        return "", str(error)


def _version(argv: list[str]) -> str:
    done = process.run(argv, check=False, timeout=20)
    return _first_version(done.out) if done.code == 0 else ""


def _first_version(text: str) -> str:
    """The first word that looks like a version, such as ``2.26.1``; empty if there is none."""
    words = (word.lstrip("v") for word in text.replace(",", " ").split())
    return next((word for word in words if word[:1].isdigit()), "")


def major(version: str) -> int:
    """The leading number of a version, its epoch left out; 0 where there is none."""
    digits = version.rpartition(":")[2].lstrip("v").split(".")[0]
    return int(digits) if digits.isdigit() else 0
