"""Downloads a repository into the cache of huggingface_hub; large files resume.

huggingface_hub discards partial files. So large files are downloaded here into its blobs; it then downloads the small
ones and links the snapshot that workloads read.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from labctl.errors import HostError
from labctl.hub.client import PATIENCE, Hub, RemoteFile, Repository, answers, transport_error

TRIES = 5
"""Attempts in a row without progress before a download fails."""
PIECE = 1 << 20

Advance = Callable[[int], None]
"""Called with the number of bytes received."""


def missing(repository: Repository) -> tuple[RemoteFile, ...]:
    """The files that are missing or incomplete."""
    return tuple(file for file in repository.files if size_of(repository.link(file)) != file.size)


def to_come(repository: Repository) -> int:
    """Bytes left to download."""
    return sum(lacking(repository, file) for file in missing(repository))


def lacking(repository: Repository, file: RemoteFile) -> int:
    if size_of(repository.blob(file)) == file.size:
        return 0
    return file.size - (min(file.size, max(0, size_of(repository.partial(file)))) if file.large else 0)


def size_of(path: Path) -> int:
    """Bytes; -1 if there is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def complete(hub: Hub, repository: Repository, advance: Advance) -> None:
    """Download missing files and link them. After a HostError the next call resumes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    absent = missing(repository)
    with answers(hub, repository.kind, repository.name):
        for file in absent:
            discard_broken(repository, file)
            if file.large and not repository.blob(file).exists():
                bring(hub, repository, file, advance)
        small = to_come(repository)
        # They would overwrite labctl's output.
        disable_progress_bars()
        snapshot_download(
            repository.name,
            repo_type=repository.kind,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            token=hub.credential,
            allow_patterns=[literal(file.path) for file in repository.files],
        )
        advance(small)
    if left := missing(repository):
        raise HostError(f"{repository}: {left[0].path} is incomplete", hint="re-run to resume")


def literal(path: str) -> str:
    """A glob that matches this path only."""
    return re.sub(r"([*?[])", r"[\1]", path)


def discard_broken(repository: Repository, file: RemoteFile) -> None:
    """Remove files of the wrong size, which huggingface_hub would take for complete."""
    for path in (repository.blob(file), repository.link(file)):
        if size_of(path) not in (-1, file.size):
            path.unlink()


def bring(hub: Hub, repository: Repository, file: RemoteFile, advance: Advance) -> None:
    """Download a large file into its blob, resuming; HostError if its SHA-256 is wrong."""
    path = repository.partial(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        digest = digest_of(stream)
        failures = 0
        while failures < TRIES and (have := stream.tell()) < file.size:
            try:
                receive(hub, repository, file, stream, digest, advance)
            except transport_error() as error:
                if is_final(error) or failures == TRIES - 1:
                    raise
            failures = failures + 1 if stream.tell() == have else 0
            time.sleep(2**failures - 1)
    if digest.hexdigest() != file.blob:
        path.unlink()
        raise HostError(
            f"{repository}: {file.path} has SHA-256 {digest.hexdigest()[:12]}..., expected {file.blob[:12]}...; "
            "removed",
            hint="re-run to download it again",
        )
    path.replace(repository.blob(file))


def digest_of(stream: IO[bytes]) -> hashlib._Hash:
    """The SHA-256 of a file so far; leaves its position at the end."""
    found = hashlib.sha256()
    stream.seek(0)
    while piece := stream.read(PIECE):
        found.update(piece)
    return found


def receive(
    hub: Hub, repository: Repository, file: RemoteFile, stream: IO[bytes], digest: hashlib._Hash, advance: Advance
) -> None:
    """Append the rest of a file, as far as one response has it."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    where = {"repo_type": repository.kind, "revision": repository.revision, "endpoint": hub.endpoint}
    url = hf_hub_url(repository.name, file.path, **where)
    # Ranges of a compressed response are not those of the file.
    headers = {"Range": f"bytes={stream.tell()}-", "Accept-Encoding": "identity"}
    headers |= build_hf_headers(token=hub.credential)
    with get_session().stream("GET", url, headers=headers, timeout=PATIENCE, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        # A server without ranges sends the whole file: skip what is here.
        known = 0 if answer.status_code == 206 else stream.tell()
        for piece in answer.iter_bytes():
            new = piece[known:]
            known = max(0, known - len(piece))
            stream.write(new)
            digest.update(new)
            advance(len(new))


def is_final(error: Exception) -> bool:
    """Whether a retry is useless: a client error other than a timeout or rate limit."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 429)
