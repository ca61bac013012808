"""What a check is given and what it yields: the lab on the host that is examined, and findings."""

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
from labctl.backends.docker.engine import Backend
from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.hosts.facts import HostFacts
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection
from labctl.backends.docker.images import packages
from labctl.backends.state import Container, ObservedState
from labctl.config import dotenv
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import HERE, File, Host, Lab, Node
from labctl.system import filelock, procfs
from labctl.system.cached import once
from labctl.system.hostpath import HostPath

LIMIT = 10.0
"""Seconds that a check may take. The longer ones: vendors' tools, logins to all workers, importing torch, traffic."""
SSH_SECONDS = 20.0
COUNT_SECONDS = 30.0
TRAFFIC_SECONDS = 45.0
SCRIPT_SECONDS = 8.0
"""For a script on the host, which is shorter than the check."""
UP = "labctl up"
RECREATE = "labctl down && labctl up"
GIB = 1 << 30
# Runs on any host: status PATH...; free PATH; locks BYTES PATH...
ON_HOST = Path(__file__).with_name("host.sh").read_text(encoding="utf-8")


class FileStatus(Struct, frozen=True):
    """A file's owner, group and mode; ``access`` is what this person may do: ``r``, ``w``, both or neither."""

    uid: int = -1
    gid: int = -1
    mode: int = 0
    access: str = ""
    error: str = ""
    exists: bool = True


class CheckContext(Struct, frozen=True, kw_only=True, dict=True):
    """A lab on one host or on all, and what is known of it and its engine; Docker is asked once, when needed."""

    lab: Lab
    settings: Settings
    environ: Mapping[str, str]
    engine: Backend
    """Of one host; of all of them where the lab as a whole is examined."""
    connection: Connection = field(default_factory=LocalConnection)
    """To the host that is examined."""
    facts: HostFacts | None = None
    """Of a host that is reached over ssh."""
    used_ports: frozenset[int] = frozenset()
    """TCP ports that are in use on any host of the lab."""
    hosts: tuple[CheckContext, ...] = ()
    """Of the lab as a whole: a context for each host that ssh reached."""
    only: str = ""
    """The one node that is examined; empty for all."""
    engine_error: HostError | None = None
    """Why the engine did not answer: it is not asked again."""
    root: HostPath = procfs.ROOT
    """The host's root directory, to read its /proc, /sys and /etc."""

    @property
    def name(self) -> str:
        """The host that is examined; ``local`` for this machine, also where the lab is on others."""
        return self.connection.target.name

    @property
    def local(self) -> bool:
        """Whether the lab is on this machine, not on hosts of an inventory."""
        return self.lab.hosts[0].name == HERE

    @property
    def host(self) -> Host:
        return self.lab.host(self.name)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The lab's nodes on this host."""
        return tuple(node for node in self.lab.nodes if node.host == self.name)

    def at(self, node: str) -> CheckContext:
        """The context of the host that has a node."""
        host = self.lab.host_of(node).name
        return next((one for one in self.hosts if one.name == host), self)

    @property
    def daemon(self) -> DockerEngine:
        """The host's own engine."""
        return cast(DockerEngine, self.engine)

    @once
    def info(self) -> dict[str, Any]:
        return self.daemon.information()

    @once
    def named(self) -> ObservedState:
        """What the engine has under this lab's name, whoever owns it."""
        return self.engine.observe(self.lab.name, self.lab.image)

    @once
    def observed(self) -> ObservedState:
        """What the engine has of this lab: nothing where another directory owns the name."""
        foreign = self.named.owner_elsewhere(self.lab.directory, self.lab.owner)
        return ObservedState(image=self.named.image) if foreign else self.named

    @once
    def network(self) -> dict[str, Any] | None:
        """`docker network inspect` of the lab's network; None where it does not exist."""
        wanted = naming.project(self.lab)
        return next((self.daemon.network(key) for key, name in self.observed.networks if name == wanted), None)

    @once
    def rendered(self) -> tuple[File, ...]:
        """The lab's files as they should be."""
        return render.render(self.lab)

    @property
    def builds(self) -> bool:
        """Whether the lab's image is labctl's own and missing, as far as the engine tells."""
        own = packages.is_own(self.lab.image)
        return own and not self.engine_error and self.observed.image is None

    @once
    def run_active(self) -> bool:
        held = filelock.held_below(self.lab.directory / filelock.RUNS)
        return bool(held or (not self.engine_error and agent.active(self.engine, self.observed)))

    @property
    def names(self) -> tuple[str, ...]:
        """The lab's containers to examine: launcher first, then workers."""
        here = (name for name in self.lab.containers if self.name in (HERE, self.lab.host_of(name).name))
        return tuple(name for name in here if self.only in ("", name))

    @property
    def running(self) -> tuple[Container, ...]:
        found = (self.observed.container(name) for name in self.names)
        return tuple(one for one in found if one and one.state == "running")

    def read(self, path: str) -> str:
        """A file of /proc, /sys or /etc; empty where it cannot be read."""
        return procfs.read(self.root / path).strip()

    def script(self, script: str, *words: str, check: bool = True) -> str:
        """What a POSIX sh script prints on the host. HostError: too slow, and with ``check`` its exit code."""
        return self.connection.run(script, *words, timeout=SCRIPT_SECONDS, check=check).out

    def files(self, paths: Sequence[str]) -> dict[str, FileStatus]:
        """The status of each path on the host."""
        lines = self.script(ON_HOST, "status", *paths).splitlines() if paths else []
        return {path: parse_status(line) for path, line in zip(paths, lines, strict=True)}

    def free(self, path: Path) -> int:
        """Bytes free on the host's file system that a path is, or would be, on."""
        blocks, size = self.script(ON_HOST, "free", str(path)).split()
        return int(blocks) * int(size)

    @property
    def sudo(self) -> str:
        """What a person types on the host before a command for root."""
        uid = self.facts.uid if self.facts else os.geteuid()
        return "" if uid == 0 else "sudo "

    def command(self, command: str) -> str:
        """What to type here to run a command on the host; its ``  # comment`` stays outside."""
        if self.name == HERE:
            return command
        command, mark, comment = command.partition("  # ")
        terminal = ("-t",) if "sudo " in command else ()
        return f"{ssh_errors.command(self.connection.target, *terminal)} {shlex.quote(command)}{mark}{comment}"

    def as_root(self, command: str) -> str:
        """The command to type here that runs a command as root on the host."""
        return self.command(f"{self.sudo}{command}")

    def set_setting(self, key: str, value: str) -> str:
        """The command that changes a setting, wherever it was set."""
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
        name, origin, line = self._set_at(key)
        if line:
            return f"sed -i {shlex.quote(f'/^{line}/d')} .env"
        return f"unset {name}" if origin == "environment" else f"labctl doctor  # without -s {name}=..."

    def _set_at(self, key: str) -> tuple[str, str, str]:
        """The name that a setting was given under, which may be an alias; its origin; how its line of .env begins.

        Not the line's number, as the command of one finding may move the line of the next.
        """
        found = {**self.settings.found, **{one.key: one for one in self.settings.extra}}[key]
        line = ""
        if found.origin.startswith(".env:"):
            lines = (self.lab.directory / ".env").read_text(encoding="utf-8").splitlines()
            line = lines[int(found.origin.rpartition(":")[2]) - 1].partition("=")[0] + "="
        return found.key, found.origin, line


def parse_status(line: str) -> FileStatus:
    """A line of ``status``; a file in a directory that may not be searched may exist."""
    if not line[:1].isdecimal():
        reason = line.rpartition(": ")[2]
        return FileStatus(error=f"cannot be read: {reason}", exists=reason == "Permission denied")
    uid, gid, mode, access = line.split()
    return FileStatus(int(uid), int(gid), int(mode, 16), access)


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
