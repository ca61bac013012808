"""Where doctor looks: this machine, or a host that is reached over ssh; and how a command is typed for there."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labctl.accelerators import leases
from labctl.config.inventory import InventoryHost
from labctl.hosts import facts as survey
from labctl.hosts import ssh_errors
from labctl.hosts.ssh import Connection
from labctl.model import HERE, Device
from labctl.naming import lease_path
from labctl.system import filelock, process
from labctl.system.process import CompletedProcess

SECONDS = 8.0
"""Seconds for a look at files of a host."""
# Owner, group and mode of each file, a line each; an empty one for a file that is not to be seen.
MODES = r"""for path; do stat -L -c '%u %g %f' -- "$path" 2> /dev/null || echo; done"""
# What may be done with each: a word of r and w, `-` for nothing, an empty line for what is not there.
RIGHTS = r"""
for path; do
    may=
    [ ! -e "$path" ] || may=-
    [ ! -r "$path" ] || may=r
    [ ! -w "$path" ] || may=${may}w
    echo "$may"
done
"""
FREE = r"""
place=$1
until [ -e "$place" ]; do place=${place%/*}; place=${place:-/}; done
stat -f -c '%a %S' -- "$place"
"""


# Of each lock that somebody holds what its holder wrote, a line each that begins with `held`; an empty one for others.
# Never another's link, nor a pipe that would wait for a writer.
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
class Mode:
    """Who a file belongs to, by number, and what they may do with it."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine that is looked at. Without a connection it is this one."""

    name: str = HERE
    target: InventoryHost = field(default_factory=lambda: InventoryHost(name=HERE))
    connection: Connection | None = None
    facts: survey.HostFacts | None = None
    """What the host told as the connection was opened."""
    busy: frozenset[int] = frozenset()
    """TCP ports that are listened to on any host of the lab."""

    @property
    def sudo(self) -> str:
        """What a person types there before a command of root's."""
        uid = self.facts.uid if self.facts else os.geteuid()
        return "" if uid == 0 else "sudo "

    def there(self, command: str) -> str:
        """What to type here so that a command is run there; what comes after its ``#`` is for people."""
        if self.name == HERE:
            return command
        command, mark, remark = command.partition("  # ")
        return f"{ssh_errors.command(self.target, *self._terminal(command))} {shlex.quote(command)}{mark}{remark}"

    def _terminal(self, command: str) -> tuple[str, ...]:
        """A password is asked for at a terminal."""
        return ("-t",) if "sudo " in command else ()

    def has(self, program: str) -> bool:
        """Whether a program is on the PATH there."""
        if self.connection is None:
            return shutil.which(program) is not None
        return self.connection.run('command -v "$1"', program, timeout=SECONDS, check=False).code == 0

    def run(self, argv: Sequence[str], seconds: float) -> CompletedProcess:
        """A program there, to its end, whatever its code; 127 where there is none of that name."""
        if self.connection is None:
            return process.run(argv, timeout=seconds, check=False)
        return self.connection.run('exec "$@"', *argv, timeout=seconds, check=False)

    def modes(self, paths: Sequence[str], root: Path) -> Mapping[str, Mode | str]:
        """Of each file its owner and mode, or why they cannot be told; ``root`` is where this machine's are."""
        if self.connection is None:
            return {path: _mode(root / path.lstrip("/")) for path in paths}
        lines = self._lines(MODES, paths)
        words = ((path, line.split()) for path, line in zip(paths, lines, strict=True))
        return {
            path: Mode(int(found[0]), int(found[1]), int(found[2], 16)) if found else "is not there"
            for path, found in words
        }

    def rights(self, paths: Sequence[str]) -> Mapping[str, str]:
        """What the person may do with each path: ``r``, ``w``, both or ``-``; empty where it is not there."""
        if self.connection is None:
            return {path: _rights(Path(path)) for path in paths}
        return dict(zip(paths, self._lines(RIGHTS, paths), strict=True))

    def free(self, path: Path) -> int:
        """Bytes free on the file system that a path is, or would be, on."""
        if self.connection is None:
            there = next(parent for parent in (path, *path.parents) if parent.exists())
            return shutil.disk_usage(there).free
        blocks, size = self.connection.run(FREE, str(path), timeout=SECONDS).out.split()
        return int(blocks) * int(size)

    def leases(self, locks: str, devices: Sequence[Device]) -> Mapping[Device, leases.Lease]:
        """Of these devices those that a lab holds; ``locks`` is the folder of their locks there.

        Of a host whose flock(1) is missing, none: it cannot be asked.
        """
        if self.connection is None:
            found = {device: leases.lease(locks, device) for device in devices}
            return {device: lease for device, lease in found.items() if lease is not None}
        if not devices:
            return {}
        paths = [str(lease_path(locks, device)) for device in devices]
        done = self.connection.run(LOCKS, *paths, timeout=SECONDS, check=False)
        told = zip(devices, done.out.split("\n"), strict=False)
        return {device: filelock.words(text[5:]) for device, text in told if text.startswith("held ")}

    def _lines(self, script: str, paths: Sequence[str]) -> list[str]:
        if not paths or self.connection is None:
            return []
        return self.connection.run(script, *paths, timeout=SECONDS).out.split("\n")[: len(paths)]


def _mode(path: Path) -> Mode | str:
    try:
        found = path.stat()
    except OSError as failure:
        return f"cannot be looked at: {failure.strerror}"
    return Mode(found.st_uid, found.st_gid, found.st_mode)


def _rights(path: Path) -> str:
    """What lies in a directory that may not be searched may be there."""
    try:
        path.stat()
    except PermissionError:
        return "-"
    except OSError:
        return ""
    return "".join(letter for letter, may in (("r", os.R_OK), ("w", os.W_OK)) if os.access(path, may)) or "-"
