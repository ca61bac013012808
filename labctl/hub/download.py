"""A repository's files into the cache of the hub's library: what is missing here, and fetching that.

The library forgets half a file when it is stopped. So large files are fetched here, and go on where they stopped; the
library then finds them as its blobs, fetches the small ones, and links the snapshot that workloads read.
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
"""Attempts in a row that bring nothing, before a file is given up for now."""
PIECE = 1 << 20

Advance = Callable[[int], None]
"""Told of bytes as they come."""


def missing(repository: Repository) -> tuple[RemoteFile, ...]:
    """The files that workloads would not find whole."""
    return tuple(file for file in repository.files if size_of(repository.link(file)) != file.size)


def to_come(repository: Repository) -> int:
    """Bytes of the missing files that have yet to be fetched."""
    return sum(lacking(repository, file) for file in missing(repository))


def lacking(repository: Repository, file: RemoteFile) -> int:
    if size_of(repository.blob(file)) == file.size:
        return 0
    return file.size - (min(file.size, max(0, size_of(repository.partial(file)))) if file.large else 0)


def size_of(path: Path) -> int:
    """Bytes; -1 for no file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def complete(hub: Hub, repository: Repository, advance: Advance) -> None:
    """Fetch what is missing and link it. HostError where that stops; what came by then stays for the next call."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    absent = missing(repository)
    with answers(hub, repository.kind, repository.name):
        for file in absent:
            discard_broken(repository, file)
            if file.large and not repository.blob(file).exists():
                bring(hub, repository, file, advance)
        small = to_come(repository)
        # The bars would be drawn over labctl's own lines.
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
        raise HostError(f"{repository}: {left[0].path} did not come whole", hint="the same command again")


def literal(path: str) -> str:
    """A pattern that only this path matches."""
    return re.sub(r"([*?[])", r"[\1]", path)


def discard_broken(repository: Repository, file: RemoteFile) -> None:
    """Remove content of a wrong size, which the library would take for whole."""
    for path in (repository.blob(file), repository.link(file)):
        if size_of(path) not in (-1, file.size):
            path.unlink()


def bring(hub: Hub, repository: Repository, file: RemoteFile, advance: Advance) -> None:
    """Fetch a large file into its blob, on from where an earlier call stopped; HostError if its SHA-256 is wrong."""
    path = repository.partial(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        digest = digest_of(stream)
        vain = 0
        while vain < TRIES and (have := stream.tell()) < file.size:
            try:
                receive(hub, repository, file, stream, digest, advance)
            except transport_error() as error:
                if is_final(error) or vain == TRIES - 1:
                    raise
            vain = vain + 1 if stream.tell() == have else 0
            time.sleep(2**vain - 1)
    if digest.hexdigest() != file.blob:
        path.unlink()
        raise HostError(
            f"{repository}: {file.path} came with SHA-256 {digest.hexdigest()[:12]}..., not {file.blob[:12]}..., "
            "and is removed",
            hint="the same command again fetches it anew",
        )
    path.replace(repository.blob(file))


def digest_of(stream: IO[bytes]) -> hashlib._Hash:
    """The SHA-256 of what a file holds; the file is then at its end."""
    found = hashlib.sha256()
    stream.seek(0)
    while piece := stream.read(PIECE):
        found.update(piece)
    return found


def receive(
    hub: Hub, repository: Repository, file: RemoteFile, stream: IO[bytes], digest: hashlib._Hash, advance: Advance
) -> None:
    """Append the rest of a file, as far as one answer brings it."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    where = {"repo_type": repository.kind, "revision": repository.revision, "endpoint": hub.endpoint}
    url = hf_hub_url(repository.name, file.path, **where)
    # Compressed, the bytes asked for would be others than the file's.
    headers = {"Range": f"bytes={stream.tell()}-", "Accept-Encoding": "identity"}
    headers |= build_hf_headers(token=hub.credential)
    with get_session().stream("GET", url, headers=headers, timeout=PATIENCE, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        # A server that knows no ranges begins again: pass over what is here.
        known = 0 if answer.status_code == 206 else stream.tell()
        for piece in answer.iter_bytes():
            new = piece[known:]
            known = max(0, known - len(piece))
            stream.write(new)
            digest.update(new)
            advance(len(new))


def is_final(error: Exception) -> bool:
    """Whether asking again is useless: the hub answered, and not that it is broken or busy."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 429)
