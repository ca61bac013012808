"""Push directory trees to a host; each update is atomic."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.hosts.ssh import Answer, Connection
from labctl.errors import HostError
from labctl.records.manifest import PIECE, Entry, Manifest, parse
from labctl.system.files import is_below
from labctl.system.process import CompletedProcess
from labctl.system.tar import END, header, padding

SCRIPT = Path(__file__).with_name("sync.sh").read_text(encoding="utf-8")
SyncState = Literal["current", "stale", "missing"]
"""Whether a directory of a host shows what it should: yes; something else, or a part; or it is not there."""
NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class Update(Struct, frozen=True):
    """A directory of a host that is to show a tree, and what it shows now."""

    name: str
    manifest: Manifest
    state: SyncState = "missing"
    there: frozenset[Entry] = frozenset()

    @property
    def new(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.manifest.entries if entry not in self.there)


def sync_states(
    connection: Connection, directory: str, manifests: Mapping[str, Manifest], *, seconds: float = 600
) -> dict[str, SyncState]:
    """Whether ``directory/<name>`` of the host shows the tree of that name; nothing is changed there."""
    return {update.name: update.state for update in _inspect(connection, directory, manifests, seconds=seconds)}


def push(
    connection: Connection,
    directory: str,
    manifests: Mapping[str, Manifest],
    *,
    prune: str = "",
    seconds: float = 600,
) -> tuple[str, ...]:
    """Make ``directory/<name>`` of the host show the tree of that name, all of them in one step each.

    Returns the paths that it did not have yet; files that the host has are not sent again. Below ``directory/<prune>``
    other directories are removed.
    HostError, with all as it was, for what the host refuses, or when it is not done within so many seconds.
    """
    found = _inspect(connection, directory, manifests, "tidy", prune, seconds=seconds)
    updates = [update for update in found if update.state != "current"]
    if not updates:
        return ()

    def send() -> CompletedProcess:
        words = ("push", directory, _numbered(update.name for update in updates))
        return connection.send(SCRIPT, *words, chunks=stream(updates), timeout=seconds)

    done = send()
    if done.code != 0 and any(update.there for update in updates):
        # No hard links there, or another push meanwhile: what is sent whole needs none.
        updates = [replace(update, there=frozenset()) for update in updates]
        done = send()
    _require(done, connection, directory)
    return tuple(str(PurePosixPath(update.name, entry.path)) for update in updates for entry in update.new)


def push_new(connection: Connection, manifest: Manifest, directory: str, *, seconds: float = 600) -> None:
    """Make a directory of the host that appears at once and complete. HostError where there is one already."""
    chunks = stream([Update("", manifest)])
    done = connection.send(SCRIPT, "create", directory, chunks=chunks, timeout=seconds)
    _require(done, connection, directory)


def remove(connection: Connection, directory: str, *, seconds: float = 120) -> None:
    """Remove what labctl made on a host: a directory below a ``.labctl``, and that where it is empty then.

    HostError for any other directory, and for what cannot be removed.
    """
    path = PurePosixPath(directory)
    own = next((str(parent) for parent in path.parents if parent.name == ".labctl"), "")
    if not path.is_absolute() or ".." in path.parts or not own:
        raise HostError(f"{directory} is not below a .labctl directory: labctl removes nothing else from a host")
    done = connection.run(SCRIPT, "remove", str(path), own, timeout=seconds, check=False)
    if done.code != 0:
        hint = f"{ssh_errors.command(connection.target, '-t')} sudo rm -r {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot remove {directory}: {reason(done)}", hint)


def _inspect(
    connection: Connection, directory: str, manifests: Mapping[str, Manifest], *words: str, seconds: float
) -> list[Update]:
    """These directories as they are on the host, which may ``tidy`` up first."""
    for name in manifests:
        if not NAME.fullmatch(name) or not is_below(name):
            raise ValueError(name)
    described = Answer(connection)
    words = ("inspect", directory, _numbered(manifests), *(words or ("", "")))
    done = connection.receive(SCRIPT, *words, on_chunk=described.add, timeout=seconds)
    _require(done, connection, directory)
    records = iter(described.content().split(b"\0"))
    updates = []
    for name, manifest in manifests.items():
        names, there = parse(records)
        wanted = {f"./{entry.path.partition('/')[0]}" for entry in manifest.entries}
        same = there == frozenset(manifest.entries) and wanted <= names
        state: SyncState = "missing" if not names else "current" if same else "stale"
        updates.append(Update(name, manifest, state, there))
    return updates


def _numbered(names: Iterable[str]) -> str:
    return " ".join(f"{number}:{name}" for number, name in enumerate(names))


def stream(updates: Iterable[Update]) -> Iterator[bytes]:
    """A tar stream of the trees, each below its number; what is there comes as hard links into ``before/<number>``.

    Its last member says that it is complete. HostError for a file that changed or cannot be read any more.
    """
    for number, update in enumerate(updates):
        yield header(str(number), tarfile.DIRTYPE, 0o700)
        for entry in update.manifest.entries:
            name = f"{number}/{entry.path}"
            if entry.kind == "dir":
                yield header(name, tarfile.DIRTYPE, entry.mode)
            elif entry.kind == "link":
                yield header(name, tarfile.SYMTYPE, entry.mode, link=entry.content)
            elif entry in update.there:
                yield header(name, tarfile.LNKTYPE, entry.mode, link=f"before/{name}")
            else:
                yield from _file(update.manifest.root / entry.path, entry, name)
    yield header("complete", tarfile.REGTYPE, 0o600)
    yield END


def _file(path: Path, entry: Entry, name: str) -> Iterator[bytes]:
    digest, left = hashlib.sha256(), entry.size
    try:
        with path.open("rb", buffering=0) as source:
            yield header(name, tarfile.REGTYPE, entry.mode, size=left, time=os.fstat(source.fileno()).st_mtime)
            while left and (piece := source.read(min(left, PIECE))):
                left -= len(piece)
                digest.update(piece)
                yield piece
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}", hint="re-run the command") from error
    if digest.hexdigest() != entry.content:
        raise HostError(f"{path} changed while it was sent", hint="re-run the command")
    yield padding(entry.size)


def _require(done: CompletedProcess, connection: Connection, directory: str) -> None:
    """HostError unless it was done."""
    if done.code != 0:
        why = reason(done)
        look = "df -h" if "No space left" in why or "quota" in why else "ls -ld"
        hint = f"{ssh_errors.command(connection.target)} {look} {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot write {directory}: {why}", hint)


def reason(done: CompletedProcess) -> str:
    """What a script complained of first: what follows only follows from it."""
    lines = (line for line in done.err.splitlines() if line.strip() and "in the future" not in line)
    return next(lines, f"exit code {done.code}")
