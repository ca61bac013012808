"""What a daemon holds of one lab, as read back from labels."""

from __future__ import annotations

import shlex
from pathlib import Path
from stat import S_ISDIR

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import HERE, Cause, Pairs

# What a node's own agent says first when no run can use the node, and the word for it. A check that was only too slow
# says nothing of the kind: a busy machine is no reason to end anything.
LOST: dict[str, Cause] = {"device lost": "device-lost", "sshd does not listen": "node-lost"}


def paused(container: str) -> str:
    """What is said of a container that is paused, by its name."""
    return f"container is paused; to resume it: docker unpause {container}"


def altered(container: Container) -> str:
    """Return what was changed of a container since it was made, such as by ``docker update``; empty if nothing was."""
    if container.network and container.network not in container.networks:
        return f"not on network {container.network}"
    if not container.rendered_limits:
        return ""
    rendered = dict(word.partition("=")[::2] for word in container.rendered_limits.split())
    names = [name for name, value in container.limits if rendered.get(name) != value]
    return f"{', '.join(f'{name} limit' for name in names)} changed (docker update)" if names else ""


def lost(reason: str) -> Cause | None:
    """What the words of a failed health check mean for a run; None when they are not the agent's."""
    return next((cause for words, cause in LOST.items() if reason.startswith(words)), None)


class Owner(Struct, frozen=True):
    """Who has a lab: in words, and what to type to end it."""

    name: str
    remedy: str


def elsewhere(found: str, directory: Path, owner: str = "", caller: str = "", host: str = HERE) -> Owner | None:
    """Who has a container of a host, by its labels, if that is not the caller in this directory.

    Who works in this directory has its lab, under whatever name. One that is not there any more has nothing: that of
    anybody on this machine, of the caller on other hosts. Whether others' are there cannot be told from here, as other
    machines may have this one's name.
    """
    machine, here = owner.rpartition("@")[2], caller.rpartition("@")[2]
    if Path(found) == directory and machine in ("", here):
        return None
    if owner and (machine != here if host == HERE else owner != caller):
        return Owner(f"{owner} ({found})", f"as {owner}: labctl down -C {shlex.quote(found)}")
    if not found or not is_there(Path(found)):
        return None
    return Owner(found, f"labctl down -C {shlex.quote(found)}")


def is_there(directory: Path) -> bool:
    """Whether it is on this machine; what others do not let one look into is."""
    try:
        return S_ISDIR(directory.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class Container(Struct, frozen=True, kw_only=True):
    """A container of a lab as the daemon reports it; every field but state and health comes from labels or ids."""

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
    fingerprint: str
    image: str
    directory: str
    owner: str = ""
    """``person@machine`` that made it."""
    devices: tuple[str, ...] = ()
    reason: str = ""
    """Why it is unhealthy: what its last health check said."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Directories of the host and where they are in it."""
    network: str = ""
    """The network that it was made for; empty for the host's."""
    networks: tuple[str, ...] = ()
    """The networks it is on, under the name of its node."""
    limits: Pairs = ()
    """The limits that are set now."""
    rendered_limits: str = ""
    """The limits it was made with, as ``memory=8589934592 pids=8192``; empty if unknown."""
    user: str = ""
    """Numeric user and group of the lab's processes in it, where it is asked for."""


class HostPortUser(Struct, frozen=True, kw_only=True):
    """A worker of any lab whose sshd listens to a port of the host itself."""

    port: int
    lab: str
    container: Container


class ObservedState(Struct, frozen=True, kw_only=True):
    """What one daemon, or those of all hosts, hold of a lab; ``image`` is the id of the lab's image, None if absent."""

    containers: tuple[Container, ...] = ()
    probes: tuple[Container, ...] = ()
    """Throw-away containers that tried the kernel's limits, of a labctl at work or one that was killed."""
    networks: tuple[tuple[str, str], ...] = ()
    """Id and name."""
    probe_networks: tuple[tuple[str, str], ...] = ()
    """Those of a labctl that tried whether there is room for one."""
    image: str | None = None
    host: str = HERE
    parts: tuple[ObservedState, ...] = ()
    """What each daemon holds, where there are several."""
    silent: tuple[tuple[str, HostError], ...] = ()
    """Hosts whose daemons were asked and did not answer, and what came back."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(part.host for part in self.parts) if self.parts else (self.host,)

    def on(self, host: str) -> ObservedState:
        """What the daemon of one host holds; nothing of one that did not answer."""
        if host == self.host and not self.parts:
            return self
        return next((part for part in self.parts if part.host == host), ObservedState(host=host))

    def owner_elsewhere(self, directory: Path, owner: str = "") -> Owner | None:
        """Another person or directory, still there, that these containers belong to; None where there is none."""
        owners = (elsewhere(one.directory, directory, one.owner, owner, one.host) for one in self.containers)
        return next(filter(None, owners), None)

    def container(self, node: str) -> Container | None:
        return next((container for container in self.containers if container.node == node), None)
