"""Caches of a lab's hosts: list them, and fill them from this machine's cache.

Files that a host already has are not sent. Each file appears when it is complete; large ones resume after a break.
"""

from __future__ import annotations

import hashlib
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.images.archive import ArchiveStream, Range, report
from labctl.backends.docker.images.remote import ASKING, MOVING, failed, room
from labctl.backends.docker.lab.cluster import Cluster
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, Failures, HostError
from labctl.hub import prefetch
from labctl.hub.client import Hub
from labctl.hub.report import CacheReport, HostCache
from labctl.model import Cache, HostFailure
from labctl.system import human
from labctl.system.files import Room, leads_out, require_room, walk
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress
from labctl.system.tar import END, header, padding

SCRIPT = Path(__file__).with_name("cache.sh").read_text(encoding="utf-8")
LARGE = 64 << 20
"""Size, in bytes, from which a file is sent by itself, and of an archive of smaller files: at most lost by a break."""
BLOCK = 1 << 20
"""Large files resume at a multiple of this, in bytes."""
COMING = ".labctl-coming."
"""Prefix of incomplete files in the cache of a host."""
TOKENS = frozenset({"token", "stored_tokens", "huggingface/token", "huggingface/stored_tokens"})
"""Token files of a login to the hub, if the cache is HF_HOME or the folder above it."""


class CachedFile(Struct, frozen=True):
    """A file of a cache: size in bytes and last change in seconds since 1970; or the target of a link."""

    size: int
    time: int = 0
    target: str = ""


def is_data(name: str) -> bool:
    """Tell if a file of a cache is a model's or data: not a lock, partial download, token or file of labctl."""
    return not name.endswith((".lock", ".incomplete")) and not name.startswith(".labctl") and name not in TOKENS


def read_here(root: Path, only: Iterable[str] = ("",)) -> dict[str, CachedFile]:
    """Return data files and links of this machine's cache, or of folders ``only``, by path relative to the cache.

    Links that lead out of the cache are left out.
    """
    files: dict[str, CachedFile] = {}
    for folder in only:
        for within in walk(root / folder):
            path = root / folder / within
            name, status = path.relative_to(root).as_posix(), path.lstat()
            if not is_data(name):
                continue
            if stat.S_ISREG(status.st_mode):
                files[name] = CachedFile(status.st_size, int(status.st_mtime))
            elif stat.S_ISLNK(status.st_mode) and not leads_out(name, target := str(path.readlink())):
                files[name] = CachedFile(0, target=target)
    return files


def folder_on_hosts(settings: Settings) -> str:
    """Return HOST_CACHE_PATH for hosts: relative to the user's home if it is below the home here, else unchanged."""
    folder = Path(settings.text("HOST_CACHE_PATH"))
    return str(folder.relative_to(settings.home) if folder.is_relative_to(settings.home) else folder)


def read(connection: Connection, folder: str) -> tuple[Room | None, dict[str, CachedFile]]:
    """Return a host's free space (None: unknown), and files and links in its cache. HostError if that fails."""
    done = connection.run(SCRIPT, folder, "list", timeout=ASKING, check=False)
    if done.code != 0:
        raise failed(connection, f"cannot use its cache {folder}", done.err, "ls -ld ~/.cache/labctl; df -h")
    space, *lines = done.out.split("\n")
    end = lines.index("") if "" in lines else len(lines)
    # Names with a line break cannot be parsed: such files are sent again.
    facts = (line.split(" ", 2) for line in lines[:end])
    files: dict[str, CachedFile] = {}
    for fields in facts:
        if len(fields) == 3 and fields[0].isdecimal() and fields[1].isdecimal():
            files[fields[2].removeprefix("./")] = CachedFile(int(fields[0]), int(fields[1]))
    for name, target in zip(lines[end + 1 :: 2], lines[end + 2 :: 2], strict=False):
        files[name.removeprefix("./")] = CachedFile(0, target=target)
    return room(space), files


def unpack(connection: Connection, folder: str, chunks: Iterable[bytes]) -> None:
    """Send a tar archive to a host and unpack it in the cache, all or nothing. HostError if the script fails."""
    _send(connection, folder, "unpack", chunks=chunks)


def _send(connection: Connection, folder: str, *arguments: str, chunks: Iterable[bytes]) -> None:
    """Run a command of SCRIPT on a host with ``chunks`` as input. HostError if it exits non-zero."""
    done = connection.send(SCRIPT, folder, *arguments, chunks=chunks, timeout=MOVING)
    if done.code != 0:
        raise failed(connection, "the cache was not received completely", done.err, "df -h")


def fill(
    root: Path,
    files: Mapping[str, CachedFile],
    hosts: Mapping[str, Connection],
    folder: str,
    notice: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> tuple[tuple[HostCache, ...], Failures]:
    """Send each host the cached files that it lacks, all hosts at once; return what each got, and the failures.

    Files that a failing host received stay. A ``dry_run`` sends nothing.
    """

    def give(connection: Connection) -> HostCache:
        """Send one host its missing files, unless a dry run; return their number and size. HostError without room."""
        host = connection.target.name
        space, present = read(connection, folder)
        missing = {name: file for name, file in files.items() if not is_same(name, file, present.get(name))}
        starts = {name: start_of(host, name, file, present) for name, file in missing.items() if file.size > LARGE}
        size = sum(file.size for file in missing.values()) - sum(starts.values())
        if space:
            require_room("the cache", [(space, size)], host)
        if missing and not dry_run:
            progress = Progress(f"{host}: cache", size, 0, notice, every=max(5.0, len(hosts)))
            send(connection, folder, root, missing, starts, progress)
        return HostCache(host=host, files=len(missing), bytes=size)

    filled, failures = map_hosts(give, hosts)
    return tuple(filled.values()), failures


def is_same(name: str, file: CachedFile, present: CachedFile | None) -> bool:
    """Return True if a host has a file with same size and time; for the hub's blobs, of the same size."""
    if present is not None and "/blobs/" in name:
        return present.size == file.size
    return present == file


def send(
    connection: Connection,
    folder: str,
    root: Path,
    files: Mapping[str, CachedFile],
    starts: Mapping[str, int],
    progress: Progress,
) -> None:
    """Send files to a host's cache: large ones from ``starts``, others in archives. HostError if that fails."""
    for name, start in starts.items():
        size, time = files[name].size, files[name].time
        part = part_of(connection.target.name, name, files[name])
        arguments = (part, str(start // BLOCK), name, str(size), str(time))
        chunks = report(Range(root / name, 0, size).chunks(start), progress)
        _send(connection, folder, "append", *arguments, chunks=chunks)
    small = {name: file for name, file in files.items() if name not in starts}
    for batch in batches(small):
        unpack(connection, folder, pack(root, batch).chunks())
        progress.advance(sum(file.size for file in batch.values()))
    progress.finish()


def start_of(host: str, name: str, file: CachedFile, present: Mapping[str, CachedFile]) -> int:
    """Return the byte from which to send a large file: the end of its part on the host, in whole blocks; else 0."""
    part = present.get(f"{COMING}{part_of(host, name, file)}")
    return min(part.size, file.size) // BLOCK * BLOCK if part else 0


def part_of(host: str, name: str, file: CachedFile) -> str:
    """Return the name of a large file's partial copy: a hash that includes the host, as hosts may share a cache."""
    identity = f"{host}\0{name}\0{file.size}\0{file.time}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def batches(files: Mapping[str, CachedFile]) -> Iterator[dict[str, CachedFile]]:
    """Yield files in batches of up to ``LARGE`` bytes, each for one archive: by name, links last."""
    batch: dict[str, CachedFile] = {}
    for name, file in sorted(files.items(), key=lambda item: (bool(item[1].target), item[0])):
        if batch and sum(each.size for each in batch.values()) + file.size > LARGE:
            yield batch
            batch = {}
        batch[name] = file
    if batch:
        yield batch


def pack(root: Path, files: Mapping[str, CachedFile]) -> ArchiveStream:
    """Return a tar archive of these files and links, as a stream."""
    parts: list[bytes | Range] = []
    for name, file in files.items():
        kind = tarfile.SYMTYPE if file.target else tarfile.REGTYPE
        parts.append(header(name, kind, 0o644, size=file.size, link=file.target, time=file.time))
        parts += [Range(root / name, 0, file.size), padding(file.size)] if file.size else []
    return ArchiveStream(parts=(*parts, END))


def fill_lab(
    context: Context, settings: Settings, hosts_of: Callable[[], Cluster], workload: str, contents: Cache, **how: bool
) -> CacheReport:
    """Download ``contents`` to this machine's cache, with ``hosts`` to theirs; report. ConfigError without LAB_HOSTS.

    If nothing is named, all of the cache is sent. A ``preview`` changes nothing.
    """
    began = time.monotonic()
    if how["hosts"] and not settings.text("LAB_HOSTS"):
        raise ConfigError("--hosts: LAB_HOSTS is not set", hint="LAB_HOSTS=hosts.txt in .env names the file of hosts")
    hub = prefetch.connect(settings, context.environ)
    items = prefetch.fetch(context, hub, contents, dry_run=how["preview"])
    # Nothing is sent for a workload that declares no models or datasets.
    sends = how["hosts"] and (items or not workload)
    filled, failures = _fill_hosts(context, hub, contents, hosts_of, preview=how["preview"]) if sends else ((), ())
    return CacheReport(
        workload=workload,
        cache=settings.text("HOST_CACHE_PATH"),
        items=items,
        seconds=round(time.monotonic() - began, 3),
        hosts=filled,
        failed=failures,
    )


def _fill_hosts(
    context: Context, hub: Hub, contents: Cache, hosts_of: Callable[[], Cluster], *, preview: bool
) -> tuple[tuple[HostCache, ...], tuple[HostFailure, ...]]:
    """Send hosts ``contents`` of this machine's cache, or all; return results and failures. HostError if it is empty.

    HostError if no host answers; a host that fails does not affect the others.
    """
    root = hub.cache.parents[1]
    folders = [hub.folder(kind, name).relative_to(root).as_posix() for kind, name in prefetch.names(contents)]
    files = read_here(root, folders or ("",))
    if not files and not folders:
        raise HostError(f"HOST_CACHE_PATH {root} has nothing to send", hint="labctl cache --model NAME --hosts")
    context.notice(f"{root}: {human.size(sum(file.size for file in files.values()))} in {len(files)} files")
    cluster = hosts_of()
    folder = folder_on_hosts(cluster.settings)
    filled, failures = fill(root, files, cluster.remote_hosts, folder, context.notice, dry_run=preview)
    failed = {**cluster.failed, **failures}.items()
    return filled, tuple(HostFailure(host=host, message=error.message, hint=error.hint) for host, error in failed)
