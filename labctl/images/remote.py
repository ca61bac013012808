"""What is done on a host that is given an image: it has a shell, coreutils and Docker, and nothing of labctl.

The archive is gathered in a file of the person's home there, which a later attempt goes on with, and then loaded.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from labctl.errors import HostError
from labctl.hosts.ssh import Connection
from labctl.images.archive import Cargo, Image, common
from labctl.system.progress import amount

ASKING = 120
"""Seconds for an engine to say what it has: one that stores a large image is slow to answer."""
STORING = 3600
"""Seconds for an engine to store an image, or to hand one out."""
MOVING = 24 * 3600
"""Seconds for bytes to move and be stored: a connection that is cut ends it much sooner."""
STALLED = 10
"""Seconds after which who writes a file and brings nothing counts as cut off."""

_ENGINE = 'socket=$1; shift; engine() { docker --host "unix://$socket" "$@"; }\n'
_FOLDER = "umask 077; folder=$HOME/.labctl/images\n"

# Who and where this is, room in kB, what an image is, and the layers of all.
_LOOK = (
    _ENGINE
    + """
set -e
both=$(engine info --format '{{.ID}} {{.DockerRootDir}}')
room() { df -Pk "$1" 2>/dev/null | tail -n 1; }
described=$(engine image inspect --format '{{json .}}' "$1" 2>/dev/null) || described=
printf '%s\\n' "$(id -u) $HOME ${both%% *}" "$(room "$HOME")" "$(room "${both#* }")" "$described"
all=$(engine image ls --all --quiet --no-trunc)
[ -z "$all" ] || engine image inspect --format '{{json .RootFS.Layers}}' $all 2>/dev/null || true
"""
)

# Whether an attempt writes to a file. Each leaves a mark, a link made in one step with the number of its process; as
# none is removed before the file is, there is no mistaking whose turn it is: the next mark's, where nobody writes.
_WRITES = (
    'writes() { mark=0; while writer=$(readlink "$1.writer.$mark"); do '
    '[ "$(readlink "/proc/$writer/fd/1")" != "$(pwd -P)/$1" ] || return 0; '
    "mark=$((mark + 1)); done; return 1; } 2>/dev/null; "
)

# How much of a file is there. Another attempt that writes to it is let finish; one that brings nothing for so many
# seconds, as it was cut off, is ended. What nobody asked for in a week goes.
_THERE = (
    _FOLDER
    + _WRITES
    + """
cd "$folder" 2>/dev/null || { echo 0; exit; }
find . ! -type d -mtime +7 -exec rm -f {} +
size() { wc -c 2>/dev/null < "$1" || echo 0; }
while writes "$1"; do
    before=$(size "$1")
    sleep "$2"
    [ "$(size "$1")" != "$before" ] || kill "$writer" 2>/dev/null || true
done
size "$1"
"""
)

OTHERS = 75
# Append to the file what comes, which begins at that place of it. OTHERS: the code where another attempt did, or does.
_TAKE = (
    'umask 077; mkdir -p "$HOME/.labctl/images" && cd "$HOME/.labctl/images" && exec >> "$1" || exit 1; '
    + _WRITES
    + f'! writes "$1" || exit {OTHERS}; '
    f'ln -s $$ "$1.writer.$mark" || {{ [ ! -L "$1.writer.$mark" ] || exit {OTHERS}; exit 1; }}; '
    f'[ "$(wc -c < "$1")" -eq "$2" ] || exit {OTHERS}; '
    "exec cat"
)

# Hand a file that is still growing on to a program, from that place on, and say how far that is. It gives up where
# nothing comes for half a minute; where nobody listens any more, a word of it ends it.
_FOLLOW = (
    _FOLDER
    + """
own=$1 size=$2 at=$3; shift 3
exec 4>&1
{
    idle=0
    while [ "$at" -lt "$size" ]; do
        new=$(($(wc -c 2>/dev/null < "$folder/$own" || echo 0) - at))
        if [ "$new" -gt 0 ]; then
            tail -c "+$((at + 1))" "$folder/$own" | head -c "$new" || exit
            at=$((at + new)) idle=0
        else
            idle=$((idle + 1))
            [ "$idle" -lt 150 ] || exit
        fi
        echo "$at" >&4 || exit
        [ "$new" -ge 16777216 ] || [ "$at" -ge "$size" ] || sleep 0.2
    done
} | "$@"
"""
)

# A file that is gone was loaded by another attempt, which removed it then.
_LOAD = (
    "# docker load\n"
    + _ENGINE
    + _FOLDER
    + """
engine load --quiet --input "$folder/$1" >&2 || [ ! -e "$folder/$1" ] || exit
engine image inspect --format '{{.Id}}' "$2"
"""
)
_DIGEST = _FOLDER + 'sha256sum < "$folder/$1"\n'
_FORGET = (
    _FOLDER
    + """
rm -f "$folder/$1" "$folder/$1.writer"*
rmdir "$folder" "$HOME/.labctl" 2>/dev/null || true
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free bytes of a file system."""

    filesystem: str
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a host has."""

    identity: str
    """Who this is there and which engine it is: two ways that lead to the same show the same."""
    home: Room | None
    root: Room | None
    """Where the engine keeps images; None where that is not to be known."""
    image: dict[str, Any] | None
    """The image asked about, as its engine describes it."""
    layers: tuple[tuple[str, ...], ...]
    """Of every image there."""

    def held(self, image: Image) -> int:
        """How many of an image's lowest layers are there."""
        return common(image.diffs, self.layers)

    @property
    def label(self) -> str:
        """A few characters for names of files, as hosts may share a home."""
        return "".join(filter(str.isalnum, self.identity.split()[-1]))[:12]


def look(connection: Connection, image: str) -> Standing:
    """What the host has. HostError where its engine does not answer."""
    done = connection.run(_LOOK, connection.target.docker, image, timeout=ASKING, check=False)
    if done.code != 0:
        raise failed(connection, "its engine does not say which images it has", done.err, "systemctl start docker")
    identity, home, root, described, *layers = done.out.splitlines()
    return Standing(
        identity=identity,
        home=_room(home),
        root=_room(root),
        image=json.loads(described) if described else None,
        layers=tuple(tuple(json.loads(line) or ()) for line in layers),
    )


def require_room(connection: Connection, standing: Standing, size: int, there: int) -> None:
    """HostError where the disk has no room for an archive of so many bytes, of which some are there.

    While it is loaded it is there three times: as it was sent, as the engine unpacks it, and as layers.
    """
    needed: dict[str, int] = {}
    for room, bytes_ in ((standing.home, size - there), (standing.root, 2 * size)):
        if room:
            needed[room.filesystem] = needed.get(room.filesystem, 0) + bytes_
            if needed[room.filesystem] > room.free:
                said = f"{amount(needed[room.filesystem])} are needed on {room.filesystem} while it is loaded"
                raise failed(connection, "no room for the image", f"{said}, {amount(room.free)} are free", "df -h")


def there(connection: Connection, name: str) -> int:
    """How many bytes of a file are there."""
    done = connection.run(_THERE, name, str(STALLED), timeout=MOVING, check=False)
    if done.code != 0:
        raise failed(connection, "cannot look into ~/.labctl/images", done.err, "ls -la ~/.labctl/images")
    return int(done.out)


def take(connection: Connection, name: str, at: int, chunks: Iterable[bytes]) -> bool:
    """Append bytes to a file that has so many; False where another attempt writes to it, or did meanwhile."""
    done = connection.send(_TAKE, name, str(at), chunks=chunks, timeout=MOVING, check=False)
    if done.code not in (0, OTHERS):
        raise failed(connection, "the image did not come whole", done.err, "df -h ~")
    return done.code == 0


def take_from(
    source: Connection,
    own: str,
    size: int,
    next_hop: tuple[str, ...],
    name: str,
    at: int,
    on_place: Callable[[int], None],
) -> None:
    """Have a host hand its file on to the next one as it grows; ``on_place`` is told how far that is."""
    script = shlex.join(("sh", "-c", _TAKE, "sh", name, str(at)))
    text = bytearray()

    def read(chunk: bytes) -> None:
        text.extend(chunk)
        *lines, rest = bytes(text).split(b"\n")
        text[:] = rest
        for line in lines[-1:]:
            on_place(int(line))

    words = (own, str(size), str(at), *next_hop, script)
    done = source.receive(_FOLLOW, *words, on_chunk=read, timeout=MOVING, check=False)
    if done.code != 0:
        raise failed(source, "cannot hand the image on", done.err)


def hop(connection: Connection, address: str = "") -> tuple[str, ...]:
    """The command by which another host reaches this one, as that host's own user and ssh configuration have it."""
    target = connection.target
    named = [("-l", target.user), ("-p", str(target.port or ""))]
    options = ["BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=3", "ServerAliveCountMax=3"]
    plain = [word for option in (*options, "ClearAllForwardings=yes", "ForwardAgent=no") for word in ("-o", option)]
    chosen = [word for option, value in named if value for word in (option, value)]
    return ("ssh", "-T", *plain, *chosen, "--", address or target.address or target.name)


def reaches(source: Connection, next_hop: tuple[str, ...], target: Connection, standing: Standing) -> bool:
    """Whether a host reaches another by ssh, without being asked anything, and is the same person there."""
    ask = """printf '%s\\n' "$(id -u) $HOME $(docker --host "unix://$1" info --format '{{.ID}}')" """
    script = shlex.join(("sh", "-c", ask, "sh", target.target.docker))
    done = source.run('exec "$@" </dev/null', *next_hop, script, timeout=ASKING, check=False)
    return done.code == 0 and done.out.strip() == standing.identity


def load(connection: Connection, name: str, image: str) -> str:
    """Have the engine load a file; returns what it then calls the image. HostError with its own words."""
    done = connection.run(_LOAD, connection.target.docker, name, image, timeout=STORING, check=False)
    if done.code != 0:
        raise failed(connection, "its engine did not load the image", done.err, "df -h; docker info")
    return done.out.strip()


def is_whole(connection: Connection, name: str, cargo: Cargo) -> bool:
    """Whether a file there is what was to be sent, byte for byte."""
    done = connection.run(_DIGEST, name, timeout=MOVING, check=False)
    return done.out.split()[:1] == [cargo.digest()]


def forget(connection: Connection, name: str) -> None:
    """Remove a file; the folder goes with the last."""
    connection.run(_FORGET, name, timeout=ASKING, check=False)


def pull(connection: Connection, image: str) -> None:
    """Have the engine pull an image."""
    script = _ENGINE + 'engine pull --quiet "$1"'
    done = connection.run(script, connection.target.docker, image, timeout=MOVING, check=False)
    if done.code != 0:
        raise failed(connection, f"cannot pull {image}", done.err, f"docker pull {image}")


def failed(connection: Connection, what: str, said: str, command: str = "") -> HostError:
    """A failure of a host: what was tried, what came back, and what to type there."""
    host = connection.target.name
    last = " ".join(said.strip().splitlines()[-3:])
    return HostError(
        f"{host}: {what}" + (f": {last}" if last else ""), hint=f"on {host}: {command}" if command else "", node=host
    )


def _room(line: str) -> Room | None:
    """A line of ``df -Pk``."""
    words = line.split()
    return Room(filesystem=words[0], free=int(words[3]) * 1024) if len(words) >= 6 else None
