"""The caches of a lab's hosts: what is in them, and filling them from this machine's.

Only what a host does not have is sent. Each file appears whole; large ones go on where an earlier call was cut off.
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
from labctl.system.files import Room, leads_out, require_room, walk
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress, amount
from labctl.system.tar import END, header, padding

SCRIPT = Path(__file__).with_name("cache.sh").read_text(encoding="utf-8")
LARGE = 64 << 20
"""Bytes of a file that is sent by itself, and of an archive of smaller ones: what a broken connection costs."""
BLOCK = 1 << 20
"""A large file goes on at a multiple of so many bytes."""
COMING = ".labctl-coming."
"""How names of what is on its way begin, in the cache of a host."""
TOKENS = frozenset({"token", "stored_tokens", "huggingface/token", "huggingface/stored_tokens"})
"""Token files of a login to the hub, where the cache is HF_HOME or the folder above."""


class CachedFile(Struct, frozen=True):
    """A file of a cache: its bytes and the time of its last change in seconds since 1970; or the target of a link."""

    size: int
    time: int = 0
    target: str = ""


def is_data(name: str) -> bool:
    """Whether a file of a cache is a model's or data: no lock, partial download, token or file of labctl's own."""
    return not name.endswith((".lock", ".incomplete")) and not name.startswith(".labctl") and name not in TOKENS


def read_here(root: Path, only: Iterable[str] = ("",)) -> dict[str, CachedFile]:
    """The files and links of this machine's cache, or of these folders of it, by name; no links that lead out of it."""
    files: dict[str, CachedFile] = {}
    for folder in only:
        for path in (root / folder / name for name in walk(root / folder)):
            name, status = path.relative_to(root).as_posix(), path.lstat()
            if not is_data(name):
                continue
            if stat.S_ISREG(status.st_mode):
                files[name] = CachedFile(status.st_size, int(status.st_mtime))
            elif stat.S_ISLNK(status.st_mode) and not leads_out(name, target := str(path.readlink())):
                files[name] = CachedFile(0, target=target)
    return files


def folder_on_hosts(settings: Settings) -> str:
    """HOST_CACHE_PATH as hosts have it: below the person's home there, if it is below that here."""
    folder = Path(settings.text("HOST_CACHE_PATH"))
    return str(folder.relative_to(settings.home) if folder.is_relative_to(settings.home) else folder)


def read(connection: Connection, folder: str) -> tuple[Room | None, dict[str, CachedFile]]:
    """The free space and the files and links of a host's cache, by name. HostError if it cannot be listed."""
    done = connection.run(SCRIPT, folder, "list", timeout=ASKING, check=False)
    if done.code != 0:
        raise failed(connection, f"cannot use its cache {folder}", done.err, "ls -ld ~/.cache/labctl; df -h")
    space, *lines = done.out.split("\n")
    end = lines.index("") if "" in lines else len(lines)
    # A name with an end of line in it is none that can be read: it is sent again.
    facts = (line.split(" ", 2) for line in lines[:end])
    files = {
        words[2].removeprefix("./"): CachedFile(int(words[0]), int(words[1]))
        for words in facts
        if len(words) == 3 and words[0].isdecimal() and words[1].isdecimal()
    }
    links = zip(lines[end + 1 :: 2], lines[end + 2 :: 2], strict=False)
    return room(space), {**files, **{name.removeprefix("./"): CachedFile(0, target=to) for name, to in links}}


def unpack(connection: Connection, folder: str, chunks: Iterable[bytes]) -> None:
    """Unpack a tar archive in a host's cache, all or nothing of it. HostError if it is incomplete."""
    _send(connection, folder, "unpack", chunks=chunks)


def _send(connection: Connection, folder: str, *words: str, chunks: Iterable[bytes]) -> None:
    done = connection.send(SCRIPT, folder, *words, chunks=chunks, timeout=MOVING)
    if done.code != 0:
        raise failed(connection, "the cache did not come whole", done.err, "df -h")


def fill(
    root: Path,
    files: Mapping[str, CachedFile],
    hosts: Mapping[str, Connection],
    folder: str,
    notice: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> tuple[tuple[HostCache, ...], Failures]:
    """Send each host those files of this machine's cache that it does not have, all hosts at once.

    Returns what each was sent, and which failed; what such a host has received stays. A ``dry_run`` sends nothing.
    """

    def give(connection: Connection) -> HostCache:
        host = connection.target.name
        space, there = read(connection, folder)
        missing = {name: file for name, file in files.items() if not is_same(name, file, there.get(name))}
        starts = {name: start_of(host, name, file, there) for name, file in missing.items() if file.size > LARGE}
        size = sum(file.size for file in missing.values()) - sum(starts.values())
        if space:
            require_room("the cache", [(space, size)], host)
        if missing and not dry_run:
            progress = Progress(f"{host}: cache", size, 0, notice, every=max(5.0, len(hosts)))
            send(connection, folder, root, missing, starts, progress)
        return HostCache(host=host, files=len(missing), bytes=size)

    filled, failures = map_hosts(give, hosts)
    return tuple(filled.values()), failures


def is_same(name: str, file: CachedFile, there: CachedFile | None) -> bool:
    """Whether a host has a file: of the same size and time, but for those of the hub's, named by their content."""
    if there is not None and "/blobs/" in name:
        return there.size == file.size
    return there == file


def send(
    connection: Connection,
    folder: str,
    root: Path,
    files: Mapping[str, CachedFile],
    starts: Mapping[str, int],
    progress: Progress,
) -> None:
    """Send these files, the large ones by themselves, each from where it ``starts``. HostError."""
    for name, start in starts.items():
        size, time = files[name].size, files[name].time
        words = (part_of(connection.target.name, name, files[name]), str(start // BLOCK), name, str(size), str(time))
        chunks = report(Range(root / name, 0, size).chunks(start), progress)
        _send(connection, folder, "append", *words, chunks=chunks)
    for batch in batches({name: file for name, file in files.items() if name not in starts}):
        unpack(connection, folder, pack(root, batch).chunks())
        progress.advance(sum(file.size for file in batch.values()))
    progress.finish()


def start_of(host: str, name: str, file: CachedFile, there: Mapping[str, CachedFile]) -> int:
    """From where on a large file is sent: what an earlier call has put into its part is not sent again."""
    part = there.get(f"{COMING}{part_of(host, name, file)}")
    return min(part.size, file.size) // BLOCK * BLOCK if part else 0


def part_of(host: str, name: str, file: CachedFile) -> str:
    """What a large file is called on a host until it is whole; hosts may share a cache."""
    words = f"{host}\0{name}\0{file.size}\0{file.time}"
    return hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def batches(files: Mapping[str, CachedFile]) -> Iterator[dict[str, CachedFile]]:
    """The files in their order, split into what one archive holds: links come after what they lead to."""
    batch: dict[str, CachedFile] = {}
    for name, file in sorted(files.items(), key=lambda one: (bool(one[1].target), one[0])):
        if batch and sum(one.size for one in batch.values()) + file.size > LARGE:
            yield batch
            batch = {}
        batch[name] = file
    if batch:
        yield batch


def pack(root: Path, files: Mapping[str, CachedFile]) -> ArchiveStream:
    """A tar archive of these files."""
    parts: list[bytes | Range] = []
    for name, file in files.items():
        kind = tarfile.SYMTYPE if file.target else tarfile.REGTYPE
        parts.append(header(name, kind, 0o644, size=file.size, link=file.target, time=file.time))
        parts += [Range(root / name, 0, file.size), padding(file.size)] if file.size else []
    return ArchiveStream(parts=(*parts, END))


def fill_lab(
    context: Context, settings: Settings, hosts_of: Callable[[], Cluster], workload: str, wanted: Cache, **how: bool
) -> CacheReport:
    """Download what is wanted into the cache of this machine, and with ``hosts`` send it to those of ``hosts_of``.

    All of the cache is sent if nothing is named. A ``preview`` changes nothing.
    """
    began = time.monotonic()
    if how["hosts"] and not settings.text("LAB_HOSTS"):
        raise ConfigError("--hosts: LAB_HOSTS is not set", hint="LAB_HOSTS=hosts.txt in .env names the file of hosts")
    hub = prefetch.connect(settings, context.environ)
    items = prefetch.fetch(context, hub, wanted, dry_run=how["preview"])
    # A workload that declares nothing has nothing to send either.
    sends = how["hosts"] and (items or not workload)
    filled, failures = _fill_hosts(context, hub, wanted, hosts_of, preview=how["preview"]) if sends else ((), ())
    return CacheReport(
        workload=workload,
        cache=settings.text("HOST_CACHE_PATH"),
        items=items,
        seconds=round(time.monotonic() - began, 3),
        hosts=filled,
        failed=failures,
    )


def _fill_hosts(
    context: Context, hub: Hub, wanted: Cache, hosts_of: Callable[[], Cluster], *, preview: bool
) -> tuple[tuple[HostCache, ...], tuple[HostFailure, ...]]:
    """Send the lab's hosts what is wanted of this machine's cache, or all of it if nothing is named.

    HostError if no host answers; the failure of one does not affect the others.
    """
    root = hub.cache.parents[1]
    folders = [hub.folder(kind, name).relative_to(root).as_posix() for kind, name in prefetch.names(wanted)]
    files = read_here(root, folders or ("",))
    if not files and not folders:
        raise HostError(f"HOST_CACHE_PATH {root} has nothing to send", hint="labctl cache --model NAME --hosts")
    context.notice(f"{root}: {amount(sum(file.size for file in files.values()))} in {len(files)} files")
    cluster = hosts_of()
    folder = folder_on_hosts(cluster.settings)
    filled, failures = fill(root, files, cluster.remote_hosts, folder, context.notice, dry_run=preview)
    failed = {**cluster.failed, **failures}.items()
    return filled, tuple(HostFailure(host=host, message=error.message, hint=error.hint) for host, error in failed)
