"""Types of doctor: the context that a check is called with, and the findings that it yields."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field

from labctl import naming
from labctl.backends.docker import agent
from labctl.backends.docker.compose import render
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection
from labctl.backends.docker.images import packages
from labctl.backends.state import Container, ObservedState
from labctl.config import dotenv
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import HERE, File, Host, Lab, Node
from labctl.system import filelock, procfs
from labctl.system.cached import once
from labctl.system.hostdump import HostFacts
from labctl.system.hostpath import HostPath
from labctl.system.load import Load

SSH_SECONDS = 20.0
"""Time limit of logins to all workers."""
COUNT_SECONDS = 30.0
"""Time limit of counting devices, which imports torch."""
HEALTH_SECONDS = 45.0
"""Time limit of a full look at the health of all hosts, which are read at the same time."""
TRAFFIC_SECONDS = 45.0
"""Time limit of sending bytes between nodes."""
SCRIPT_SECONDS = 8.0
"""Time limit of a script on the host: shorter than that of the check."""
UP = "labctl up"
RECREATE = "labctl down && labctl up"
GIB = 1 << 30
FEWEST_INODES = 1000
"""Files and folders that a run, with its checkpoints, may make."""
# Runs on any host: mounted PATH; status PATH...; free PATH; locks BYTES PATH...
ON_HOST = Path(__file__).with_name("host.sh").read_text(encoding="utf-8")


class FileStatus(Struct, frozen=True):
    """Owner, group and mode of a file; ``access`` is what the user may do: ``r``, ``w``, both or neither."""

    uid: int = -1
    gid: int = -1
    mode: int = 0
    access: str = ""
    error: str = ""
    exists: bool = True


class CheckContext(Struct, frozen=True, kw_only=True, dict=True):
    """A lab on one host or on all of them, with its engine; answers of the engine are cached."""

    lab: Lab
    settings: Settings
    environ: Mapping[str, str]
    engine: Engine
    """Engine of one host; of all hosts if the lab as a whole is examined."""
    connection: Connection = field(default_factory=LocalConnection)
    """Connection to the host that is examined."""
    facts: HostFacts | None = None
    """Facts of a host that is reached over ssh; None for this machine."""
    used_ports: frozenset[int] = frozenset()
    """TCP ports in use on any host of the lab."""
    hosts: tuple[CheckContext, ...] = ()
    """Contexts of the hosts that ssh reached, if the lab as a whole is examined."""
    only: str = ""
    """Name of the only node to examine; empty for all."""
    engine_error: HostError | None = None
    """Error of an engine that did not answer: it is not asked again."""
    load: Load | None = None
    """Load of the host before the checks; None if unknown."""
    root: HostPath = procfs.ROOT
    """The host's root directory, to read its /proc, /sys and /etc."""

    @property
    def name(self) -> str:
        """Return the name of the host that is examined; ``local`` for this machine, also if the lab is on others."""
        return self.connection.target.name

    @property
    def local(self) -> bool:
        """Tell if the lab is on this machine, not on hosts of an inventory."""
        return self.lab.hosts[0].name == HERE

    @property
    def host(self) -> Host:
        return self.lab.host(self.name)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the lab's nodes on this host."""
        return tuple(node for node in self.lab.nodes if node.host == self.name)

    def at(self, node: str) -> CheckContext:
        """Return the context of a node's host; this context if it has none, as for unreached hosts."""
        host = self.lab.host_of(node).name
        return next((ctx for ctx in self.hosts if ctx.name == host), self)

    @property
    def daemon(self) -> DockerEngine:
        """Return the context's engine as that of a single Docker daemon."""
        return cast(DockerEngine, self.engine)

    @once
    def info(self) -> dict[str, Any]:
        return self.daemon.information()

    @once
    def named(self) -> ObservedState:
        """Observe all containers and networks with this lab's name, of any owner."""
        return self.engine.observe(self.lab.name, self.lab.image)

    @once
    def observed(self) -> ObservedState:
        """Return the lab's containers, networks and image id; only the image if the name is another lab's."""
        foreign = self.named.owner_elsewhere(self.lab.directory, self.lab.owner)
        return ObservedState(image=self.named.image) if foreign else self.named

    @once
    def network(self) -> dict[str, Any] | None:
        """Return `docker network inspect` of the lab's network; None if it does not exist."""
        project = naming.project(self.lab)
        return next((self.daemon.network(key) for key, name in self.observed.networks if name == project), None)

    @once
    def rendered(self) -> tuple[File, ...]:
        """Render the lab's files as they should be on disk."""
        return render.render(self.lab)

    @property
    def builds(self) -> bool:
        """Tell if the lab's image is one of labctl's and missing; False if the engine does not answer."""
        return packages.is_own(self.lab.image) and not self.engine_error and self.observed.image is None

    @once
    def run_active(self) -> bool:
        """Return True if a run of the lab holds its lock here, or the launcher's agent reports one."""
        held = filelock.held_below(self.lab.directory / filelock.RUNS)
        return bool(held or (not self.engine_error and agent.active(self.engine, self.observed)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the containers to examine, launcher first: of this host, of all if ``local``."""
        here = (name for name in self.lab.containers if self.name in (HERE, self.lab.host_of(name).name))
        return tuple(name for name in here if self.only in ("", name))

    @property
    def running(self) -> tuple[Container, ...]:
        """Return the containers to examine that are running."""
        containers = filter(None, map(self.observed.container, self.names))
        return tuple(container for container in containers if container.state == "running")

    def read(self, path: str) -> str:
        """Return the stripped text of a file below /proc, /sys or /etc; empty if it cannot be read."""
        return procfs.read(self.root / path).strip()

    def script(self, script: str, *arguments: str, check: bool = True) -> str:
        """Run a POSIX sh script on the host; return its output. HostError if late or, with ``check``, if it fails."""
        return self.connection.run(script, *arguments, timeout=SCRIPT_SECONDS, check=check).out

    def files(self, paths: Sequence[str]) -> dict[str, FileStatus]:
        """Return the status of each path on the host."""
        lines = self.script(ON_HOST, "status", *paths).splitlines() if paths else []
        return {path: parse_status(line) for path, line in zip(paths, lines, strict=True)}

    def free(self, path: Path) -> int:
        """Return the free bytes of the host's file system at a path, which need not exist."""
        blocks, size, *_ = self.script(ON_HOST, "free", str(path)).split()
        return int(blocks) * int(size)

    def lacks_inodes(self, path: Path) -> bool:
        """Return True if the host's file system at a path has a limit of files and has nearly reached it."""
        free, of_all = self.script(ON_HOST, "free", str(path)).split()[2:]
        # Some file systems, such as CephFS, do not know how many are free: -1.
        return int(of_all) > 0 and 0 <= int(free) < FEWEST_INODES

    def read_only_mount(self, path: str) -> str:
        """Return the mount point of a path on the host if it is mounted read-only; empty if not, or not known."""
        # The last of several is on top of the others.
        mounts = self.script(ON_HOST, "mounted", path).strip().splitlines()
        target, _, options = (mounts or [""])[-1].rpartition(" ")
        return target.strip() if "ro" in options.split(",") else ""

    @property
    def sudo(self) -> str:
        """Return the prefix of a command for root on the host: ``sudo``, or empty if the user is root."""
        uid = self.facts.uid if self.facts else os.geteuid()
        return "" if uid == 0 else "sudo "

    def command(self, command: str) -> str:
        """Return the command as a user types it here to run it on the host; its ``  # comment`` stays outside."""
        return command if self.name == HERE else ssh_errors.typed(self.connection.target, command)

    def as_root(self, command: str) -> str:
        """Return the command line that a user types here to run a command as root on the host."""
        return self.command(f"{self.sudo}{command}")

    def set_setting(self, key: str, value: str) -> str:
        """Return the command that changes a setting at its origin: .env, environment or flag; a default in .env."""
        name, origin, line = self._set_at(key)
        assignment = f"{name}={dotenv.quote(value)}"
        if line:
            return f"sed -i {shlex.quote(f'/^{line}/c {assignment}')} .env"
        if origin == "environment":
            return f"export {name}={shlex.quote(value)}"
        if origin == "flag":
            return f"labctl doctor -s {shlex.quote(f'{name}={value}')}"
        return f"printf '\\n%s\\n' {shlex.quote(assignment)} >> .env"

    def unset_setting(self, key: str) -> str:
        """Return the command that removes a setting from .env or the environment, or doctor without -s."""
        name, origin, line = self._set_at(key)
        if line:
            return f"sed -i {shlex.quote(f'/^{line}/d')} .env"
        return f"unset {name}" if origin == "environment" else f"labctl doctor  # without -s {name}=..."

    def _set_at(self, key: str) -> tuple[str, str, str]:
        """Return the name that a setting was given by, its origin, and a pattern of the beginning of its line in .env.

        The name may be an alias. Not the line number: the command of one finding may move the line of the next.
        """
        extra = {setting.key: setting for setting in self.settings.extra}
        setting = {**self.settings.values, **extra}[key]
        line = ""
        if setting.origin.startswith(".env:"):
            lines = (self.lab.directory / ".env").read_text(encoding="utf-8").splitlines()
            line = lines[int(setting.origin.rpartition(":")[2]) - 1].partition("=")[0] + "="
            # sed takes a byte order mark for a part of the first line; such a line is no comment, nor a longer key.
            line = line.replace("\ufeff", "[^A-Za-z_#]*")
        return setting.key, setting.origin, line


def parse_status(line: str) -> FileStatus:
    """Parse an output line of ``status``; a failed look gives ``error``, and ``exists`` if permission was denied."""
    if not line[:1].isdecimal():
        reason = line.rpartition(": ")[2]
        return FileStatus(error=f"cannot be read: {reason}", exists=reason == "Permission denied")
    uid, gid, mode, access = line.split()
    return FileStatus(int(uid), int(gid), int(mode, 16), access)
