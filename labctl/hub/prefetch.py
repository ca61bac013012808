"""``labctl cache``: downloads models and datasets, a workload's or by name, into the shared cache of this host.

huggingface_hub discards partial files, so large files are downloaded here into its blobs; huggingface_hub then
downloads the small files and links the snapshot that workloads read.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import os
import re
import shlex
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO

from msgspec import MsgspecError, Struct, json
from msgspec.structs import replace

from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.hub import client
from labctl.hub.client import HUB, Hub, Kind, RemoteFile, Repository, Unreachable, look_up
from labctl.hub.report import Item, State
from labctl.model import Cache
from labctl.system import filelock, human
from labctl.system.files import make_private, opened, read_limited, require_room, room_at
from labctl.system.progress import Progress

ENDPOINT = "https://huggingface.co"
LOCK = ".labctl.lock"
PATIENCE = 24 * 3600
"""Seconds to wait for another `labctl cache`, which may download a large model."""
TRIES = 5
"""Attempts in a row without progress before a download fails."""
PIECE = 1 << 20
WEIGHTS = {"*.safetensors.index.json": "*.safetensors", "*.bin.index.json": "*model*.bin"}
"""Pattern of weights by the pattern of their index, in order of preference; not ``training_args.bin``."""
TEXTS = (".json", ".txt", ".model", ".jinja")
"""Suffixes of configuration and tokenizers."""


class WeightIndex(Struct, frozen=True):
    """The index of a model's weights: the file of each tensor."""

    weight_map: dict[str, str] = {}


def connect(settings: Settings, environ: Mapping[str, str]) -> Hub:
    """Build the Hub of settings and environment, with its cache below HOST_CACHE_PATH, without a request to it."""
    return Hub(
        endpoint=endpoint_of(environ),
        token=settings.secret("HF_TOKEN"),
        cache=Path(settings.text("HOST_CACHE_PATH")) / HUB,
    )


def endpoint_of(environ: Mapping[str, str]) -> str:
    """Return the hub's URL. ConfigError if HF_ENDPOINT is not a URL."""
    endpoint = environ.get("HF_ENDPOINT") or ENDPOINT
    if not re.fullmatch(r"https?://[^\s/]\S*", endpoint):
        raise ConfigError("environment: HF_ENDPOINT is not a URL", hint=f"unset it, or write it like {ENDPOINT}")
    return endpoint.rstrip("/")


def fetch(context: Context, hub: Hub, requested: Cache, *, dry_run: bool) -> tuple[Item, ...]:
    """Download, under a lock, what the cache lacks, unless a dry run; report each item. HostError if one is not found.

    Nothing is downloaded before every repository was found and the disk has room for all; HostError otherwise.
    """
    repositories = names(requested)
    if dry_run or not repositories:
        return tuple(item for _, item in survey(context, hub, repositories))
    root = hub.cache.parents[1]
    make_root(root)
    with filelock.held(root / LOCK, "labctl cache", wait=PATIENCE, notice=context.notice):
        surveyed = survey(context, hub, repositories)
        return tuple(download(context, hub, repository, item) for repository, item in surveyed)


def names(requested: Cache) -> tuple[tuple[Kind, str], ...]:
    """Return kind and name of each requested repository, without duplicates."""
    models: list[tuple[Kind, str]] = [("model", name) for name in requested.models]
    return tuple(dict.fromkeys([*models, *(("dataset", name) for name in requested.datasets)]))


def make_root(root: Path) -> None:
    """Create a private ``root`` if it is the default cache. HostError if any other does not exist."""
    if not root.is_dir() and root != Path.home() / ".cache/labctl":
        raise HostError(f"HOST_CACHE_PATH {root} does not exist", hint=f"mkdir -p {shlex.quote(str(root))}")
    make_private(root)


# --- survey of the cache -----------------------------------------------------------------------


def survey(context: Context, hub: Hub, repositories: Iterable[tuple[Kind, str]]) -> list[tuple[Repository, Item]]:
    """Look up each repository on the hub, else in the cache. HostError if one is in neither, or the disk is full."""
    surveyed: list[tuple[Repository, Item]] = []
    absent: list[tuple[Kind, str]] = []
    failure: HostError | None = None
    for kind, name in repositories:
        require_no_link(hub, hub.folder(kind, name))
        try:
            if isinstance(failure, Unreachable):
                # Each request would wait for its timeout.
                raise failure
            repository = wanted_of(look_up(hub, kind, name))
            item = describe(repository, repository.size, "to fetch" if missing(repository) else "present")
        except HostError as error:
            failure = error
            cached = whole_here(hub, kind, name)
            if not cached and not isinstance(error, Unreachable):
                raise
            if not cached:
                absent.append((kind, name))
                continue
            repository, item = cached
        surveyed.append((repository, item))
        _notice_state(context, repository, item)
    if failure and absent:
        raise by_hand(hub, failure, absent)
    if failure:
        context.warn(f"not compared with the hub: {failure.message}")
    needed = sum(to_come(repository) for repository, _ in surveyed)
    hint = "free as much, or set HOST_CACHE_PATH to a larger disk"
    require_room("the download", [(room_at(hub.cache), needed)], hint=hint)
    return surveyed


def _notice_state(context: Context, repository: Repository, item: Item) -> None:
    """Report a repository's size and what is left to download."""
    left = f" in {len(repository.files)} files, {human.size(to_come(repository))} to fetch"
    state = left if item.state == "to fetch" else ", complete"
    context.notice(f"{repository} ({item.revision[:8]}): {human.size(item.bytes)}{state}")


def require_no_link(hub: Hub, folder: Path) -> None:
    """Raise HostError if a container put a file into a repository's cache that leads writers out of it.

    Allowed are directories, regular files, and the links to files that huggingface_hub makes in snapshots and blobs.
    """
    root = hub.cache.parents[1]
    for top in (folder, hub.cache / ".locks" / folder.name, hub.cache / "blobs", hub.cache / "CACHEDIR.TAG"):
        way = [path for path in (*reversed(top.parents), top) if path.is_relative_to(root) and path != root]
        inside = (Path(at, name) for at, folders, files in os.walk(top) for name in (*folders, *files))
        for path in chain(way, inside):
            with suppress(FileNotFoundError):
                _require_harmless(path, folder)


def _require_harmless(path: Path, folder: Path) -> None:
    """Raise HostError for a link that huggingface_hub did not make, and for pipes and the like."""
    mode = path.lstat().st_mode
    is_cache_link = path.parent == folder / "blobs" or folder / "snapshots" in path.parents[1:]
    # Path.is_dir raises if a link's target may not be seen.
    if stat.S_ISLNK(mode) and is_cache_link and not os.path.isdir(path):  # noqa: PTH112
        return
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
        raise HostError(
            f"{path} is {kind}: a container may have put it there, to change other files",
            hint=f"rm {shlex.quote(str(path))}",
        )


def wanted_of(repository: Repository) -> Repository:
    """Return a dataset unchanged, a model with weights, configuration and tokenizer only. HostError without weights."""
    if repository.kind == "dataset":
        return repository
    top = [file for file in repository.files if "/" not in file.path]
    formats = (_matching(top, pattern) for pattern in WEIGHTS.values())
    weights = next(filter(None, formats), [])
    if not weights:
        raise HostError(
            f"{repository} has no weights in safetensors or PyTorch's format",
            hint=f"name another repository; this one holds {human.listed(sorted(file.path for file in top))}",
        )
    return replace(repository, files=(*weights, *(file for file in top if file.path.endswith(TEXTS))))


def _matching(files: Iterable[RemoteFile], pattern: str) -> list[RemoteFile]:
    """Return the files whose path matches a shell pattern."""
    return [file for file in files if fnmatch.fnmatch(file.path, pattern)]


def describe(repository: Repository, size: int, state: State) -> Item:
    """Return an Item for a repository with this size and state, and 0 bytes fetched."""
    return Item(
        kind=repository.kind,
        name=repository.name,
        revision=repository.revision,
        bytes=size,
        fetched_bytes=0,
        state=state,
    )


def whole_here(hub: Hub, kind: Kind, name: str) -> tuple[Repository, Item] | None:
    """Return the newest complete snapshot in the cache, and its report as ``unchecked``; None if there is none."""
    snapshots = (hub.folder(kind, name) / "snapshots").glob("*")
    for snapshot in sorted(snapshots, key=lambda path: path.lstat().st_mtime, reverse=True):
        # Containers can write here: an unreadable snapshot counts as incomplete.
        with suppress(OSError, ValueError, RecursionError, MsgspecError):
            sizes = {path.name: path.stat().st_size for path in snapshot.rglob("*") if path.is_file()}
            if sizes and (kind == "dataset" or any(has_all_weights(snapshot, index, set(sizes)) for index in WEIGHTS)):
                repository = Repository(
                    kind=kind, name=name, revision=snapshot.name, files=(), folder=hub.folder(kind, name)
                )
                return repository, describe(repository, sum(sizes.values()), "unchecked")
    return None


def has_all_weights(snapshot: Path, index: str, files: set[str]) -> bool:
    """Tell if a format's weights are complete: every part that their index names exists."""
    indexes = (json.decode(read_limited(path), type=WeightIndex) for path in snapshot.glob(index))
    parts = {part for weights in indexes for part in weights.weight_map.values()}
    return parts <= files and bool(fnmatch.filter(files, WEIGHTS[index]))


def by_hand(hub: Hub, failure: HostError, absent: Iterable[tuple[Kind, str]]) -> HostError:
    """Return the error for repositories missing while the hub is unreachable, with other ways to get them."""
    lines = ", ".join(f"{kind} {name}" for kind, name in absent)
    names = [hub.folder(kind, name).name for kind, name in absent]
    folders = f"folder{'s' * (len(names) > 1)} {' '.join(names)}"
    way = (
        f"behind a proxy set HTTPS_PROXY, behind a mirror export HF_ENDPOINT; without network copy the "
        f"{folders} from the cache of a machine that has them (~/.cache/huggingface/hub) into {hub.cache}"
    )
    return HostError(f"{failure.message}; missing here: {lines}", hint=failure.hint or way)


def missing(repository: Repository) -> tuple[RemoteFile, ...]:
    """Return the files of a repository that are missing or incomplete in the cache."""
    return tuple(file for file in repository.files if size_of(repository.link(file)) != file.size)


def to_come(repository: Repository) -> int:
    """Return the bytes of a repository left to download."""
    left = 0
    for file in missing(repository):
        if size_of(repository.blob(file)) != file.size:
            received = max(0, size_of(repository.partial(file))) if file.large else 0
            left += max(0, file.size - received)
    return left


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


# --- fetching ------------------------------------------------------------------------------------------------


def download(context: Context, hub: Hub, repository: Repository, item: Item) -> Item:
    """Download and link a repository's missing files; return its report as ``fetched``, unchanged if it had all."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if item.state != "to fetch":
        return item
    needed = to_come(repository)
    progress = Progress(str(repository), item.bytes, item.bytes - needed, context.notice)
    try:
        with client.answers(hub, repository.kind, repository.name):
            for file in missing(repository):
                for path in (repository.blob(file), repository.link(file)):
                    # huggingface_hub would consider it complete.
                    if size_of(path) not in (-1, file.size):
                        remove(hub, path)
                if not file.large:
                    # Older versions of huggingface_hub append to it, even if it is a link.
                    remove(hub, repository.partial(file))
                if file.large and not repository.blob(file).exists():
                    download_large(hub, repository, file, progress)
            small = to_come(repository)
            # The bars would overwrite labctl's output.
            disable_progress_bars()
            require_no_link(hub, repository.folder)
            snapshot_download(
                repository.name,
                repo_type=repository.kind,
                cache_dir=hub.cache,
                endpoint=hub.endpoint,
                token=hub.credential,
                allow_patterns=[glob.escape(file.path) for file in repository.files],
            )
            progress.advance(small)
    except Unreachable as error:
        raise HostError(
            f"{repository}: {error.message}; {human.size(progress.done)} of {human.size(progress.total)} downloaded",
            hint="re-run to resume",
        ) from error
    if left := missing(repository):
        raise HostError(f"{repository}: {left[0].path} is incomplete", hint="re-run to resume")
    progress.finish()
    return replace(item, fetched_bytes=needed, state="fetched")


def download_large(hub: Hub, repository: Repository, file: RemoteFile, progress: Progress) -> None:
    """Download a large file into its blob, resuming, with 5 tries without progress. HostError for a bad SHA-256."""
    path = repository.partial(file)
    with folder_of(hub, path) as folder:
        with open_partial(path.name, folder) as stream:
            digest = hashlib.sha256()
            stream.seek(0)
            while piece := stream.read(PIECE):
                digest.update(piece)
            failures = 0
            while failures < TRIES and (have := stream.tell()) < file.size:
                try:
                    receive(hub, repository, file, stream, digest, progress)
                except client.transport_error() as error:
                    status = getattr(getattr(error, "response", None), "status_code", 0)
                    is_final = 400 <= status < 500 and status not in (408, 429)
                    if is_final or failures == TRIES - 1:
                        raise
                failures = failures + 1 if stream.tell() == have else 0
                time.sleep(2**failures - 1)
        if digest.hexdigest() != file.blob:
            os.unlink(path.name, dir_fd=folder)
            raise HostError(
                f"{repository}: {file.path} has SHA-256 {digest.hexdigest()[:12]}..., expected {file.blob[:12]}...; "
                "removed",
                hint="re-run to download it again",
            )
        os.replace(path.name, repository.blob(file).name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(hub: Hub, path: Path) -> None:
    """Remove a file of the cache, if it exists. OSError if its path has a symbolic link."""
    with suppress(FileNotFoundError), folder_of(hub, path) as folder:
        os.unlink(path.name, dir_fd=folder)


@contextmanager
def folder_of(hub: Hub, path: Path) -> Iterator[int]:
    """Open the directory of a file in the cache, creating it if missing. OSError if its path has a symbolic link."""
    root = hub.cache.parents[1]
    with ExitStack() as held:
        folder = held.enter_context(opened(root, follow=True))
        for name in path.parent.relative_to(root).parts:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            folder = held.enter_context(opened(name, folder))
        yield folder


def open_partial(name: str, folder: int) -> IO[bytes]:
    """Open a partial file to append to, removing first what is no plain file or has several hard links."""
    with suppress(FileNotFoundError):
        existing = os.lstat(name, dir_fd=folder)
        if not stat.S_ISREG(existing.st_mode) or existing.st_nlink > 1:
            os.unlink(name, dir_fd=folder)
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EMLINK, "another file has the same content", name)
    return os.fdopen(handle, "a+b")


def receive(
    hub: Hub, repository: Repository, file: RemoteFile, stream: IO[bytes], digest: hashlib._Hash, progress: Progress
) -> None:
    """Request the rest of a large file and append what arrives to the stream; update digest and progress."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    where = {"repo_type": repository.kind, "revision": repository.revision, "endpoint": hub.endpoint}
    url = hf_hub_url(repository.name, file.path, **where)
    # Ranges of a compressed response differ from the file's.
    headers = {"Range": f"bytes={stream.tell()}-", "Accept-Encoding": "identity"}
    headers |= build_hf_headers(token=hub.credential)
    with get_session().stream("GET", url, headers=headers, timeout=client.PATIENCE, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        # A server without ranges sends the whole file: skip the part that was received before.
        skipped = 0 if answer.status_code == 206 else stream.tell()
        for piece in answer.iter_bytes():
            new = piece[skipped:]
            skipped = max(0, skipped - len(piece))
            stream.write(new)
            digest.update(new)
            progress.advance(len(new))
