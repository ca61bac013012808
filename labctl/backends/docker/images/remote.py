"""Runs ``remote.sh`` on a host that receives an image; the host needs a shell, coreutils and Docker."""

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
"""Seconds for an engine to say what it has: one that stores a large image is slow to answer."""
STORING = 3600
"""Seconds for an engine to store an image, or to read one out."""
MOVING = 24 * 3600
"""Seconds for bytes to move and be stored: a connection that is cut ends it much sooner."""
STALLED = 10
"""Seconds without a byte after which another upload of the same file counts as dead."""
LONGEST_NUMBER = 32
"""Digits of a number of bytes, and more."""
IN_USE = 75
"""Exit code of ``append`` where another upload has written to the file."""
SCRIPT = Path(__file__).with_name("remote.sh").read_text(encoding="utf-8")


class HostImageState(Struct, frozen=True, kw_only=True):
    """What a host has of an image."""

    identity: str
    """User, home and engine id: equal where two addresses lead to the same place."""
    home: Room | None
    root: Room | None
    """Docker's disk; None if unknown."""
    image: dict[str, Any] | None
    """``docker image inspect``; None if the host does not have the image."""
    layers: tuple[tuple[str, ...], ...]
    """Layers of every image on the host."""

    def held(self, image: Image) -> int:
        """How many of an image's lowest layers the host has."""
        return common(image.diffs, self.layers)

    @property
    def label(self) -> str:
        """A few characters for file names, as hosts may share a home."""
        return "".join(filter(str.isalnum, self.identity.split()[-1]))[:12]


def image_state(connection: Connection, image: str) -> HostImageState:
    """What the host has of an image. HostError if its engine does not answer."""
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
    """Bytes of a file that the host received so far."""
    fix = "ls -la ~/.labctl/images"
    out = _run(connection, "cannot read ~/.labctl/images", "size", file, str(STALLED), timeout=MOVING, fix=fix)
    with parsing(connection.target.name):
        return int(out)


def append(connection: Connection, file: str, offset: int, chunks: Iterable[bytes]) -> bool:
    """Append bytes to a file that has ``offset`` bytes; False if another upload writes to it, or did meanwhile."""
    words = ("append", file, str(offset))
    done = connection.send(_script("append"), *words, chunks=chunks, timeout=MOVING)
    if done.code not in (0, IN_USE):
        raise failed(connection, "the image is incomplete", done.err, "df -h ~")
    return done.code == 0


def relay(source: Connection, file: str, size: int, hop: tuple[str, ...], progress: Progress) -> None:
    """Have a host pipe its file, as it grows, into a program, from what is done on."""
    rest = b""

    def read(chunk: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + chunk).split(b"\n")
        with parsing(source.target.name):
            if lines:
                progress.advance(int(lines[-1]) - progress.done)
        rest = rest[:LONGEST_NUMBER]

    words = ("relay", file, str(size), str(progress.done), *hop)
    done = source.receive(_script("relay"), *words, on_chunk=read, timeout=MOVING)
    if done.code != 0:
        raise failed(source, "cannot relay the image", done.err)


def ssh_hop(connection: Connection, address: str, *words: str) -> tuple[str, ...]:
    """The ssh command by which another host runs the script on this one, as its own user and ssh configuration say."""
    target = connection.target
    options = ["-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3", "-oServerAliveCountMax=3"]
    options += ["-oClearAllForwardings=yes", "-oForwardAgent=no"]
    if target.user:
        options += ["-l", target.user]
    if target.port:
        options += ["-p", str(target.port)]
    return ("ssh", "-T", *options, "--", address or target.address or target.name, remote(SCRIPT, words))


def reaches(source: Connection, target: Connection, address: str, state: HostImageState) -> bool:
    """Whether a host reaches another by ssh without a prompt, and that address leads to the same user and engine."""
    hop = ssh_hop(target, address, "identity", target.target.docker)
    done = source.run(_script("reach"), "reach", *hop, timeout=ASKING, check=False)
    return done.code == 0 and done.out.strip() == state.identity


def load(connection: Connection, file: str, image: str) -> str:
    """Have the engine load a file; returns the id that it gives the image. HostError with the engine's own words."""
    words = ("load", connection.target.docker, file, image)
    return _run(
        connection, "its engine did not load the image", *words, timeout=STORING, fix="df -h; docker info"
    ).strip()


def is_whole(connection: Connection, file: str, stream: ArchiveStream) -> bool:
    """Whether a file on the host equals what was sent."""
    done = connection.run(_script("digest"), "digest", file, timeout=MOVING, check=False)
    return done.out.split()[:1] == [sha256(stream.chunks())]


def remove(connection: Connection, file: str) -> None:
    """Remove a file; the folder goes with the last."""
    connection.run(_script("remove"), "remove", file, timeout=ASKING, check=False)


def pull(connection: Connection, image: str) -> None:
    """Have the engine pull an image."""
    words = ("pull", connection.target.docker, image)
    _run(connection, f"cannot pull {image}", *words, timeout=MOVING, fix=f"docker pull {image}")


def failed(connection: Connection, what: str, stderr: str, command: str = "") -> HostError:
    """A failure of a host: what was tried, what came back, and what to type there."""
    host = connection.target.name
    last = " ".join(stderr.strip().splitlines()[-3:])
    return HostError(
        f"{host}: {what}" + (f": {last}" if last else ""), hint=f"on {host}: {command}" if command else "", node=host
    )


def _run(connection: Connection, failure: str, *words: str, timeout: float = ASKING, fix: str) -> str:
    done = connection.run(_script(words[0]), *words, timeout=timeout, check=False)
    if done.code != 0:
        raise failed(connection, failure, done.err, fix)
    return done.out


def _script(command: str) -> str:
    # A connection calls a script by its first line in its errors.
    return f"# image {command}\n{SCRIPT}"


def room(line: str) -> Room | None:
    """A line of ``df -Pk``."""
    words = line.split()
    return Room(words[0], int(words[3]) * 1024) if len(words) >= 6 else None
