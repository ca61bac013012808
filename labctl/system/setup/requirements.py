"""Requirements of a lab on this host: Docker Engine, its command, buildx, compose; and which of them are installed."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from labctl.system import process, procfs

if TYPE_CHECKING:
    from python_on_whales import DockerClient

    from labctl.system.setup import apt

OLDEST_ENGINE = "24"
"""Oldest with BuildKit 0.11, which reads labctl's Dockerfiles without a registry's frontend. Oldest tested: 26.1."""
OLDEST_BUILDX = "0.10"
"""Oldest with ``--provenance`` (github.com/docker/buildx/releases/tag/v0.10.0). Oldest tested: 0.13."""
OLDEST_COMPOSE = "2.24.4"
"""Oldest that reads ``!override`` in compose.override.yml (docs.docker.com/reference/compose-file/merge).

Its client has API 1.44, the oldest that Engine 29 accepts. Oldest tested: 2.26.
"""
OLDEST: Mapping[str, str] = {
    "Docker Engine": OLDEST_ENGINE,
    "docker command": OLDEST_ENGINE,
    "buildx": OLDEST_BUILDX,
    "compose": OLDEST_COMPOSE,
}
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "Docker Engine": ("docker.io",),
    "docker command": ("docker-cli",),
    "buildx": ("docker-buildx", "docker-buildx-plugin"),
    "compose": ("docker-compose", "docker-compose-v2", "docker-compose-plugin"),
}
"""Packages that may meet each requirement; the distribution's own name first."""
# Of one docker info, in 0.06 s: each plugin's own command would take as long again.
VERSIONS = "engine={{.ServerVersion}}{{range .ClientInfo.Plugins}} {{.Name}}={{.Version}}{{end}}"
# Seconds.
PATIENCE = 3
NAMES = {"engine": "Docker Engine", "compose": "Docker Compose", "buildx": "Docker Buildx"}


class Facts(Struct, frozen=True, kw_only=True):
    """Installed versions and permissions on this host; a version is empty if the program is missing."""

    distribution: str
    codename: str
    sources: tuple[apt.Source, ...]
    candidates: Mapping[str, str]
    engine: str
    """Version of the running daemon, or of the installed one if none runs."""
    running: bool
    denied: bool
    """Permission denied on the daemon's socket."""
    outsider: str
    """The user's name if not in group docker, which may open the socket; empty for members and root."""
    command: bool
    buildx: str
    compose: str
    systemd: bool
    mtu: int
    daemon: str
    """Path of ``dockerd``; the package's path if it is not installed."""
    prefix: tuple[str, ...] | None
    """Arguments before a command that run it as root; None if this user cannot."""


def observe() -> Facts:
    """Read this host's installed versions, package candidates and permissions, running docker, apt-cache and sudo."""
    from labctl.system.setup import apt

    release = procfs.os_release()
    engine, why = ask_docker(engine_version)
    names = [name for alternatives in PACKAGES.values() for name in alternatives]
    # On Debian, users' PATH does not include /usr/sbin.
    daemon = shutil.which("dockerd") or "/usr/sbin/dockerd"
    policy = process.run(["apt-cache", "policy", *names], check=False, env={"LC_ALL": "C"}).out
    return Facts(
        distribution=release.get("ID", ""),
        codename=release.get("VERSION_CODENAME", ""),
        sources=apt.read(),
        candidates=apt.candidates(policy),
        engine=engine or first_version(process.run([daemon, "--version"], check=False, timeout=20).out),
        running=bool(engine),
        denied="permission denied" in why.lower(),
        outsider=_outsider(),
        command=shutil.which("docker") is not None,
        buildx=first_version(plugin_version("buildx")[0]),
        compose=first_version(plugin_version("compose")[0]),
        systemd=procfs.has_systemd(),
        mtu=procfs.default_mtu(),
        daemon=daemon,
        prefix=root_prefix(),
    )


def root_prefix() -> tuple[str, ...] | None:
    """Return the words that run a command as root: (), ("sudo",), ("sudo", "-n"); None if sudo cannot work."""
    if os.geteuid() == 0:
        return ()
    if shutil.which("sudo") is None:
        return None
    if process.run(["sudo", "-n", "true"], check=False, timeout=10).code == 0:
        return ("sudo", "-n")
    return ("sudo",) if sys.stdin.isatty() else None


def _outsider() -> str:
    """Return the user's name if it is not in group docker; empty for members, root and unknown users."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        # A uid without a name cannot be added to a group.
        return ""
    if os.geteuid() == 0:
        return ""
    try:
        group = grp.getgrnam("docker")
    except KeyError:
        return user.pw_name
    return "" if user.pw_name in group.gr_mem or group.gr_gid in os.getgroups() else user.pw_name


def ask_docker(ask: Callable[[DockerClient], str], seconds: float = 20, prefix: Sequence[str] = ()) -> tuple[str, str]:
    """Call ``ask`` with a docker client; return (answer, "") or ("", why it failed)."""
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException

    if shutil.which("docker") is None:
        return "", "docker: command not found"
    try:
        # Labs use the default context's daemon.
        call = [*prefix, "timeout", str(seconds), "docker"]
        return ask(DockerClient(client_call=call, context="default")).strip(), ""
    except DockerException as error:
        return "", (error.stderr or "").strip() or "no output"


def engine_version(docker: DockerClient) -> str:
    """Return the daemon's version, empty if its answer lacks it; a query for ``ask_docker``, which handles errors."""
    server = docker.version().server
    return (server and server.version) or ""


def plugin_version(name: str, seconds: float = 20) -> tuple[str, str]:
    """Run ``docker NAME version``; return (output, "") or ("", why it failed)."""
    return ask_docker(lambda docker: str(getattr(docker, name).version()), seconds)


def docker_versions() -> dict[str, str]:
    """Return the versions of engine, compose and buildx by name: "not found" or "no answer" where there is none."""
    docker = shutil.which("docker")
    if docker is None:
        return dict.fromkeys(NAMES.values(), "not found")
    try:
        # If the daemon does not answer, the code is not 0, but plugins are listed.
        done = process.run([docker, "--context=default", "info", "--format", VERSIONS], timeout=PATIENCE, check=False)
    except process.ProcessTimeout:
        return dict.fromkeys(NAMES.values(), "no answer")
    printed = dict(word.partition("=")[::2] for word in done.out.split())
    return {name: printed.get(key, "not found") or "no answer" for key, name in NAMES.items()}


def first_version(text: str) -> str:
    """Return the first word that looks like a version, such as ``2.26.1``; empty if none does."""
    candidates = (word.lstrip("v") for word in text.replace(",", " ").split())
    return next((word for word in candidates if word[:1].isdigit()), "")


def is_older(version: str, oldest: str) -> bool:
    """Tell if a version, such as ``5:27.0.1-1~debian``, is older than another; a version without a number is older."""
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers as a tuple, epoch left out; () if it has none."""
    numbers = re.match(r"v?([0-9]+(?:\.[0-9]+)*)", version.rpartition(":")[2])
    return tuple(map(int, numbers[1].split("."))) if numbers else ()
