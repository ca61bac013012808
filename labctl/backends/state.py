"""State of a lab as its daemons report it: containers, networks and image, by label."""

from __future__ import annotations

import shlex
from pathlib import Path
from stat import S_ISDIR

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import HERE, Cause, Pairs

STATES = {
    "created": "was created, but has not started",
    "exited": "has stopped",
    "restarting": "keeps restarting",
}
KILLED = 137
"""Exit code of SIGKILL, as from `docker kill`, or from the kernel when memory runs out."""

# First words of a health check of the agent if no run can use the node, and the cause. A check that was only too slow
# does not print them: a busy machine is no reason to end a run.
LOST: dict[str, Cause] = {"device lost": "device-lost", "sshd does not listen": "node-lost"}


def paused(container: str) -> str:
    """Return text on a paused container with the command that resumes it."""
    return f"container is paused; to resume it: {_unpause(container)}"


def resume(container: Container) -> str:
    """Return the command that resumes a paused container, after its host if that is not this machine."""
    on = "" if container.host == HERE else f"on {container.host}: "
    return f"{on}{_unpause(container.name)}"


def _unpause(container: str) -> str:
    """Return the command that resumes a container, by its name."""
    return f"docker unpause {container}"


def awaits_check(container: Container) -> bool:
    """Return True if a container is unhealthy without a reason: it was paused, and its next health check is to come."""
    return container.state == "running" and container.health == "unhealthy" and not container.reason


def altered(container: Container) -> str:
    """Return text on a container's network or limits changed since it was created; empty if unchanged."""
    if container.network and container.network not in container.networks:
        return f"not on network {container.network}"
    if not container.rendered_limits:
        return ""
    rendered = dict(word.partition("=")[::2] for word in container.rendered_limits.split())
    names = [name for name, value in container.limits if rendered.get(name) != value]
    return f"{', '.join(f'{name} limit' for name in names)} changed (docker update)" if names else ""


def not_running(container: Container) -> str:
    """Return the state of a container that does not run, in words."""
    if container.state == "exited" and container.exit_code is not None:
        killed = ", killed" if container.exit_code == KILLED else ""
        return f"has stopped (exit code {container.exit_code}{killed})"
    return STATES.get(container.state, f"is {container.state}")


def lost(reason: str) -> Cause | None:
    """Return the run's cause that a health-check message begins with; None if it names no loss."""
    return next((cause for beginning, cause in LOST.items() if reason.startswith(beginning)), None)


class Owner(Struct, frozen=True):
    """Owner of a lab, as text, and the command that ends the lab."""

    name: str
    remedy: str


def elsewhere(labeled: str, directory: Path, owner: str = "", caller: str = "", host: str = HERE) -> Owner | None:
    """Return the other owner of a container, by its labels; None if it is the caller's, or its directory is gone.

    Containers made in this directory on this machine are the caller's lab, under whatever name. A directory that does
    not exist owns nothing: on this machine of any user, on other hosts of the caller. Other users' directories on other
    hosts cannot be looked for, as other machines may have the same name as this one: they count.
    """
    machine, here = owner.rpartition("@")[2], caller.rpartition("@")[2]
    if Path(labeled) == directory and machine in ("", here):
        return None
    if owner and (machine != here if host == HERE else owner != caller):
        return Owner(f"{owner} ({labeled})", f"as {owner}: labctl down -C {shlex.quote(labeled)}")
    if not labeled or not is_there(Path(labeled)):
        return None
    return Owner(labeled, f"labctl down -C {shlex.quote(labeled)}")


def is_there(directory: Path) -> bool:
    """Return True if a path is a directory on this machine, or cannot be looked at for lack of rights."""
    try:
        return S_ISDIR(directory.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class Container(Struct, frozen=True, kw_only=True):
    """A container of a lab as the daemon reports it; every field but state and health is from labels or ids."""

    id: str
    name: str
    node: str
    host: str = HERE
    role: str
    slots: int
    state: str
    """created, running, paused, restarting, exited, dead"""
    health: str | None
    """starting, healthy, unhealthy; None without a health check"""
    exit_code: int | None = None
    """Exit code of a container that has stopped; None if it runs or has never started."""
    fingerprint: str
    image: str
    image_name: str = ""
    """Name of its image; the id if that name is of another image now."""
    created: float = 0
    """Time of its creation, in seconds since 1970; 0 if unknown."""
    directory: str
    owner: str = ""
    """User that created it, as ``user@machine``."""
    devices: tuple[str, ...] = ()
    reason: str = ""
    """Output of its last health check if it is unhealthy; the engine's error if it could not be started."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Bind mounts: directory of the host, path in the container."""
    network: str = ""
    """Network that it was created on; empty for the host's."""
    networks: tuple[str, ...] = ()
    """Networks on which others find it by the name of its node."""
    limits: Pairs = ()
    """Limits in force."""
    rendered_limits: str = ""
    """Limits that it was created with, as ``memory=8589934592 pids=8192``; empty if unknown."""
    user: str = ""
    """Numeric user and group of the lab's processes in it; empty unless asked for."""


class HostPortUser(Struct, frozen=True, kw_only=True):
    """A worker of any lab whose sshd listens on a port of the host."""

    port: int
    lab: str
    container: Container


class ObservedState(Struct, frozen=True, kw_only=True):
    """State of a lab on one daemon, or on those of all hosts; ``image`` is its image's id, None if not found."""

    containers: tuple[Container, ...] = ()
    probes: tuple[Container, ...] = ()
    """Throw-away containers that tried limits of the host, of a labctl at work or one that was killed."""
    networks: tuple[tuple[str, str], ...] = ()
    """Id and name."""
    probe_networks: tuple[tuple[str, str], ...] = ()
    """Throw-away networks that tried if another can be created."""
    image: str | None = None
    host: str = HERE
    parts: tuple[ObservedState, ...] = ()
    """State per daemon, if there are several."""
    silent: tuple[tuple[str, HostError], ...] = ()
    """Hosts whose daemons did not answer, and the error."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(part.host for part in self.parts) if self.parts else (self.host,)

    def on(self, host: str) -> ObservedState:
        """Return the state on one host; empty if its daemon did not answer."""
        if host == self.host and not self.parts:
            return self
        return next((part for part in self.parts if part.host == host), ObservedState(host=host))

    def owner_elsewhere(self, directory: Path, owner: str = "") -> Owner | None:
        """Return the other owner of the first container that is not the caller's; else None."""
        owners = (elsewhere(each.directory, directory, each.owner, owner, each.host) for each in self.containers)
        return next(filter(None, owners), None)

    def container(self, node: str) -> Container | None:
        return next((container for container in self.containers if container.node == node), None)
