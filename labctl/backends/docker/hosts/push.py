"""Push directory trees to a host; each update is atomic."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
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
"""State of a host's directory: same as here; different or partial; or it does not exist."""
NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class Update(Struct, frozen=True):
    """A directory of a host, the tree to push to it, and its present entries."""

    name: str
    manifest: Manifest
    state: SyncState = "missing"
    present: frozenset[Entry] = frozenset()

    @property
    def new(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.manifest.entries if entry not in self.present)


def sync_states(
    connection: Connection, directory: str, manifests: Mapping[str, Manifest], *, seconds: float = 600
) -> dict[str, SyncState]:
    """Return for each ``directory/<name>`` on the host: missing, stale or current with its tree here."""
    return {update.name: update.state for update in _inspect(connection, directory, manifests, seconds=seconds)}


def push(
    connection: Connection,
    directory: str,
    manifests: Mapping[str, Manifest],
    *,
    prune: str = "",
    seconds: float = 600,
) -> tuple[str, ...]:
    """Replace each ``directory/<name>`` that differs from its tree; remove others in ``prune``; return new paths.

    Files that the host already has are not sent again. Other directories below ``directory/<prune>`` are removed.
    HostError, with nothing changed, if the host refuses it or it takes more than ``seconds``.
    """
    inspected = _inspect(connection, directory, manifests, "tidy", prune, seconds=seconds)
    updates = [update for update in inspected if update.state != "current"]
    if not updates:
        return ()

    def send() -> CompletedProcess:
        """Send the updates as a tar stream to the script; return its result, whatever the exit code."""
        arguments = ("push", directory, _numbered(update.name for update in updates))
        return connection.send(SCRIPT, *arguments, chunks=stream(updates), timeout=seconds)

    done = send()
    if done.code != 0 and any(update.present for update in updates):
        # Hard links failed, as on some file systems or after another push: send all files.
        updates = [replace(update, present=frozenset()) for update in updates]
        done = send()
    _require(done, connection, directory)
    return tuple(str(PurePosixPath(update.name, entry.path)) for update in updates for entry in update.new)


def push_new(connection: Connection, manifest: Manifest, directory: str, *, seconds: float = 600) -> None:
    """Push a tree to a new directory of the host, atomically. HostError if it exists or the script fails."""
    chunks = stream([Update("", manifest)])
    done = connection.send(SCRIPT, "create", directory, chunks=chunks, timeout=seconds)
    _require(done, connection, directory)


def remove(connection: Connection, directory: str, *, seconds: float = 120) -> None:
    """Remove a directory below a ``.labctl`` of a host, and that if empty. HostError for others or on failure."""
    path = PurePosixPath(directory)
    root = next((str(parent) for parent in path.parents if parent.name == ".labctl"), "")
    if not path.is_absolute() or ".." in path.parts or not root:
        raise HostError(f"{directory} is not below a .labctl directory: labctl removes nothing else from a host")
    done = connection.run(SCRIPT, "remove", str(path), root, timeout=seconds, check=False)
    if done.code != 0:
        hint = f"{ssh_errors.command(connection.target, '-t')} sudo rm -r {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot remove {directory}: {reason(done)}", hint)


def _inspect(
    connection: Connection, directory: str, manifests: Mapping[str, Manifest], *tidying: str, seconds: float
) -> list[Update]:
    """Compare trees with the host's; return Updates; ``tidying`` removes leftovers. ValueError for a bad name."""
    for name in manifests:
        if not NAME.fullmatch(name) or not is_below(name):
            raise ValueError(name)
    described = Answer(connection)
    arguments = ("inspect", directory, _numbered(manifests), *(tidying or ("", "")))
    done = connection.receive(SCRIPT, *arguments, on_chunk=described.add, timeout=seconds)
    _require(done, connection, directory)
    records = iter(described.content().split(b"\0"))
    updates = []
    for name, manifest in manifests.items():
        names, present = parse(records)
        updates.append(Update(name, manifest, _state(manifest, names, present), present))
    return updates


def _state(manifest: Manifest, names: Collection[str], present: frozenset[Entry]) -> SyncState:
    """Return ``missing``, ``stale`` or ``current`` by a directory's names and entries, compared with the manifest."""
    if not names:
        return "missing"
    expected = {f"./{entry.path.partition('/')[0]}" for entry in manifest.entries}
    return "current" if present == frozenset(manifest.entries) and expected <= set(names) else "stale"


def _numbered(names: Iterable[str]) -> str:
    return " ".join(f"{number}:{name}" for number, name in enumerate(names))


def stream(updates: Iterable[Update]) -> Iterator[bytes]:
    """Yield a tar stream of the trees, each below its number; present files are hard links into ``before/<number>``.

    Its last member marks it as complete. HostError for a file that changed or has become unreadable.
    """
    for number, update in enumerate(updates):
        yield header(str(number), tarfile.DIRTYPE, 0o700)
        for entry in update.manifest.entries:
            name = f"{number}/{entry.path}"
            if entry.kind == "dir":
                yield header(name, tarfile.DIRTYPE, entry.mode)
            elif entry.kind == "link":
                yield header(name, tarfile.SYMTYPE, entry.mode, link=entry.content)
            elif entry in update.present:
                yield header(name, tarfile.LNKTYPE, entry.mode, link=f"before/{name}")
            else:
                yield from _file(update.manifest.root / entry.path, entry, name)
    yield header("complete", tarfile.REGTYPE, 0o600)
    yield END


def _file(path: Path, entry: Entry, name: str) -> Iterator[bytes]:
    """Yield a file's tar member. HostError if it is unreadable or its digest is not the manifest's."""
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
    """Raise HostError, with a command to look at the directory, if the script exited non-zero."""
    if done.code != 0:
        why = reason(done)
        look = "df -h" if "No space left" in why or "quota" in why else "ls -ld"
        hint = f"{ssh_errors.command(connection.target)} {look} {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot write {directory}: {why}", hint)


def reason(done: CompletedProcess) -> str:
    """Return the script's first line on stderr, without warnings on clocks, or else its exit code."""
    lines = (line for line in done.err.splitlines() if line.strip() and "in the future" not in line)
    return next(lines, f"exit code {done.code}")
