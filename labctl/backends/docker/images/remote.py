"""Commands of ``remote.sh``, which runs on hosts that receive an image; a host needs a shell, coreutils and Docker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from labctl.backends.docker.hosts.ssh import Connection, remote
from labctl.backends.docker.images.archive import ArchiveStream, Image, common, sha256
from labctl.errors import HostError, parsing
from labctl.system.files import Room
from labctl.system.progress import Progress

ASKING = 120
"""Timeout in seconds for an engine to list its images: it is slow while it stores a large image."""
STORING = 3600
"""Timeout in seconds for an engine to store or save an image."""
MOVING = 24 * 3600
"""Timeout in seconds of a transfer; a broken connection ends it much sooner."""
STALLED = 10
"""Seconds without a byte after which another upload of the same file counts as dead."""
LONGEST_NUMBER = 32
"""Maximum digits of a number of bytes that are kept while a line is incomplete."""
IN_USE = 75
"""Exit code of ``append`` if another upload has written to the file."""
SCRIPT = Path(__file__).with_name("remote.sh").read_text(encoding="utf-8")


class HostImageState(Struct, frozen=True, kw_only=True):
    """The state of an image on a host, with the host's disks and layers."""

    identity: str
    """User, home and engine id: equal if two addresses lead to the same account and engine."""
    home: Room | None
    root: Room | None
    """Free space on Docker's disk; None if unknown."""
    image: dict[str, Any] | None
    """``docker image inspect``; None if the host does not have the image."""
    layers: tuple[tuple[str, ...], ...]
    """Layers of every image on the host."""

    def held(self, image: Image) -> int:
        """Return how many of an image's lowest layers the host has."""
        return common(image.diffs, self.layers)

    @property
    def label(self) -> str:
        """Suffix for file names that is unique per engine, as hosts may share a home."""
        return "".join(filter(str.isalnum, self.identity.split()[-1]))[:12]


def image_state(connection: Connection, image: str) -> HostImageState:
    """Return engine id, free space, layers and inspected image of a host. HostError if its engine is silent."""
    socket = connection.target.docker
    out = _run(connection, "its engine does not list its images", "state", socket, image, fix="systemctl start docker")
    with parsing(connection.target.name):
        identity, home, root, described, *layers = out.splitlines()
        return HostImageState(
            identity=identity,
            home=room(home),
            root=room(root),
            image=msgspec.json.decode(described, type=dict[str, Any]) if described else None,
            layers=tuple(msgspec.json.decode(line, type=tuple[str, ...] | None) or () for line in layers),
        )


def size(connection: Connection, file: str) -> int:
    """Return the bytes of an uploaded file on the host, after other uploads to it ended or were stopped."""
    fix = "ls -la ~/.labctl/images"
    out = _run(connection, "cannot read ~/.labctl/images", "size", file, str(STALLED), timeout=MOVING, fix=fix)
    with parsing(connection.target.name):
        return int(out)


def append(connection: Connection, file: str, offset: int, chunks: Iterable[bytes]) -> bool:
    """Append to a file on the host at ``offset``; return False if another upload writes to it. HostError if lost."""
    arguments = ("append", file, str(offset))
    done = connection.send(_script("append"), *arguments, chunks=chunks, timeout=MOVING)
    if done.code not in (0, IN_USE):
        raise failed(connection, "the image is incomplete", done.err, "df -h ~")
    return done.code == 0


def relay(source: Connection, file: str, size: int, hop: tuple[str, ...], progress: Progress) -> None:
    """Have a host pipe its growing file into the ssh command ``hop``, with progress. HostError if that fails."""
    rest = b""

    def read(chunk: bytes) -> None:
        """Advance the progress by the last complete line, a number of bytes."""
        nonlocal rest
        *lines, rest = (rest + chunk).split(b"\n")
        with parsing(source.target.name):
            if lines:
                progress.advance(int(lines[-1]) - progress.done)
        rest = rest[:LONGEST_NUMBER]

    arguments = ("relay", file, str(size), str(progress.done), *hop)
    done = source.receive(_script("relay"), *arguments, on_chunk=read, timeout=MOVING)
    if done.code != 0:
        raise failed(source, "cannot relay the image", done.err)


def ssh_hop(connection: Connection, address: str, *arguments: str) -> tuple[str, ...]:
    """Return the ssh command by which another host runs the script on this host, by that host's ssh settings."""
    target = connection.target
    options = ["-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3", "-oServerAliveCountMax=3"]
    options += ["-oClearAllForwardings=yes", "-oForwardAgent=no"]
    if target.user:
        options += ["-l", target.user]
    if target.port:
        options += ["-p", str(target.port)]
    return ("ssh", "-T", *options, "--", address or target.address or target.name, remote(SCRIPT, arguments))


def reaches(source: Connection, target: Connection, address: str, state: HostImageState) -> bool:
    """Return True if a host gets to another by ssh without a prompt, and as the same user and engine."""
    hop = ssh_hop(target, address, "identity", target.target.docker)
    done = source.run(_script("reach"), "reach", *hop, timeout=ASKING, check=False)
    return done.code == 0 and done.out.strip() == state.identity


def load(connection: Connection, file: str, image: str) -> str:
    """Run `docker load` of an uploaded file on the host; return the image's id. HostError if it fails."""
    arguments = ("load", connection.target.docker, file, image)
    failure = "its engine did not load the image"
    return _run(connection, failure, *arguments, timeout=STORING, fix="df -h; docker info").strip()


def is_whole(connection: Connection, file: str, stream: ArchiveStream) -> bool:
    """Return True if an uploaded file on the host has the SHA-256 of the stream."""
    done = connection.run(_script("digest"), "digest", file, timeout=MOVING, check=False)
    return done.out.split()[:1] == [sha256(stream.chunks())]


def remove(connection: Connection, file: str) -> None:
    """Remove an uploaded file on the host, and its folder if that is empty; ignore a failing script."""
    connection.run(_script("remove"), "remove", file, timeout=ASKING, check=False)


def pull(connection: Connection, image: str) -> None:
    """Pull an image on the host. HostError with docker's message."""
    arguments = ("pull", connection.target.docker, image)
    _run(connection, f"cannot pull {image}", *arguments, timeout=MOVING, fix=f"docker pull {image}")


def failed(connection: Connection, problem: str, stderr: str, command: str = "") -> HostError:
    """Return a HostError of the problem with the last three lines of stderr and the command to type there."""
    host = connection.target.name
    last = " ".join(stderr.strip().splitlines()[-3:])
    return HostError(
        f"{host}: {problem}" + (f": {last}" if last else ""), hint=f"on {host}: {command}" if command else "", node=host
    )


def _run(connection: Connection, failure: str, *arguments: str, timeout: float = ASKING, fix: str) -> str:
    """Run a command of the script on the host; return its output. HostError with a fix if it exits non-zero."""
    done = connection.run(_script(arguments[0]), *arguments, timeout=timeout, check=False)
    if done.code != 0:
        raise failed(connection, failure, done.err, fix)
    return done.out


def _script(command: str) -> str:
    """Return the script below a comment line with the command, by which errors name it."""
    return f"# image {command}\n{SCRIPT}"


def room(line: str) -> Room | None:
    """Parse a line of ``df -Pk`` into a disk and its free bytes; None if it has too few fields."""
    fields = line.split()
    return Room(fields[0], int(fields[3]) * 1024) if len(fields) >= 6 else None
