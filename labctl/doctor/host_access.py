"""Reading a host that is examined, this machine or one over ssh, and how to type a command for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labctl.accelerators import leases
from labctl.config.inventory import InventoryHost
from labctl.hosts import ssh_errors
from labctl.hosts.facts import HostFacts
from labctl.hosts.ssh import Connection, LocalConnection
from labctl.model import HERE, Device
from labctl.naming import lease_path
from labctl.system import filelock
from labctl.system.hostpath import HostPath
from labctl.system.process import CompletedProcess
from labctl.system.procfs import ROOT

SECONDS = 8.0
# Owner, group, mode and access (r, w, rw or -) of each file, a line each; an empty line where it cannot be read.
STATUS = r"""
for path; do
    access=
    [ ! -r "$path" ] || access=r
    [ ! -w "$path" ] || access=${access}w
    stat -L -c "%u %g %f ${access:--}" -- "$path" 2> /dev/null || echo
done
"""
FREE = r"""
place=$1
until [ -e "$place" ]; do place=${place%/*}; place=${place:-/}; done
stat -f -c '%a %S' -- "$place"
"""
# For each lock that is held `held` and what its holder wrote; an empty line for others. Regular files only: a pipe
# would wait for a writer.
LOCKS = r"""
command -v flock > /dev/null || exit 127
for path; do
    if [ -f "$path" ] && [ ! -h "$path" ] && [ -r "$path" ] && { flock -n -s 9 9< "$path"; [ $? = 1 ]; }; then
        printf 'held '
        head -c "$LONGEST" < "$path" | tr -cd '\040-\176'
    fi
    echo
done
""".replace("$LONGEST", str(filelock.LONGEST_TEXT))


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file's owner, group and mode; ``access`` is what this person may do: ``r``, ``w``, both or neither."""

    uid: int = -1
    gid: int = -1
    mode: int = 0
    access: str = ""
    error: str = ""
    exists: bool = True


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """A machine that is examined, this one unless another is given."""

    name: str = HERE
    target: InventoryHost = field(default_factory=lambda: InventoryHost(name=HERE))
    connection: Connection = field(default_factory=LocalConnection)
    facts: HostFacts | None = None
    used_ports: frozenset[int] = frozenset()
    """TCP ports that are in use on any host of the lab."""

    @property
    def sudo(self) -> str:
        """What a person types there before a command for root."""
        uid = self.facts.uid if self.facts else os.geteuid()
        return "" if uid == 0 else "sudo "

    def command(self, command: str) -> str:
        """What to type here to run a command there; its ``  # comment`` stays outside."""
        if self.name == HERE:
            return command
        command, mark, comment = command.partition("  # ")
        terminal = ("-t",) if "sudo " in command else ()
        return f"{ssh_errors.command(self.target, *terminal)} {shlex.quote(command)}{mark}{comment}"

    def has(self, program: str) -> bool:
        """Whether a program is on the PATH there."""
        return self.connection.run('command -v "$1"', program, timeout=SECONDS, check=False).code == 0

    def run(self, argv: Sequence[str], seconds: float) -> CompletedProcess:
        """Run a program there, whatever its exit code; 127 where it is not found."""
        return self.connection.run('exec "$@"', *argv, timeout=seconds, check=False)

    def files(self, paths: Sequence[str], root: HostPath = ROOT) -> Mapping[str, FileStatus]:
        """The status of each path; ``root`` is where this machine's paths begin."""
        if self.name == HERE:
            return {path: _status(Path(str(root)) / path.lstrip("/")) for path in paths}
        lines = self.connection.run(STATUS, *paths, timeout=SECONDS).out.split("\n")[: len(paths)] if paths else []
        return {path: _parse_status(line) for path, line in zip(paths, lines, strict=True)}

    def free(self, path: Path) -> int:
        """Bytes free on the file system that a path is, or would be, on."""
        blocks, size = self.connection.run(FREE, str(path), timeout=SECONDS).out.split()
        return int(blocks) * int(size)

    def leases(self, locks: str, devices: Sequence[Device]) -> Mapping[Device, leases.Lease]:
        """Those of the devices that a lab holds; ``locks`` is the directory of their locks there.

        None of a host without flock(1).
        """
        if self.name == HERE:
            found = {device: leases.lease(locks, device) for device in devices}
            return {device: lease for device, lease in found.items() if lease is not None}
        if not devices:
            return {}
        paths = [str(lease_path(locks, device)) for device in devices]
        lines = self.connection.run(LOCKS, *paths, timeout=SECONDS, check=False).out.split("\n")
        held = zip(devices, lines, strict=False)
        return {device: filelock.words(text[5:]) for device, text in held if text.startswith("held ")}


def _status(path: Path) -> FileStatus:
    try:
        found = path.stat()
    except OSError as failure:
        # A file in a directory that may not be searched may exist.
        exists = isinstance(failure, PermissionError)
        return FileStatus(error=f"cannot be read: {failure.strerror}", exists=exists)
    access = "".join(letter for letter, wanted in (("r", os.R_OK), ("w", os.W_OK)) if os.access(path, wanted))
    return FileStatus(found.st_uid, found.st_gid, found.st_mode, access)


def _parse_status(line: str) -> FileStatus:
    if not line:
        return FileStatus(error="not found", exists=False)
    uid, gid, mode, access = line.split()
    return FileStatus(int(uid), int(gid), int(mode, 16), access)
