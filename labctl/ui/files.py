"""Files of a run's record: a folder as a list, a text to read, anything else to save."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.records import store
from labctl.system import files
from labctl.ui.site import Site
from labctl.ui.watcher import Watchers

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

PIECE = 1 << 18
"""Bytes that are read at once."""
SNIFFED = 1 << 12
"""Bytes by which the type of a file is recognized."""
MOST_ENTRIES = 2000
"""Entries of a folder that are listed."""
GROWING = (store.OUTPUT, store.TIMES, store.METRICS)
"""Files that are empty in the record of a detached run until it ends: they grow where a page follows it."""
PNG = b"\x89PNG\r\n\x1a\n"
# Content of a run, which may be anyone's: no script runs, and nothing is fetched.
POLICY = {"content-security-policy": "sandbox; default-src 'none'"}


class Entry(Struct, frozen=True):
    """An entry of a folder; ``kind`` is file, folder, link or other, and only a file has a size."""

    name: str
    kind: str
    size: int | None = None

    @property
    def address(self) -> str:
        """Return its address, relative to that of the folder."""
        return quote(self.name) + ("/" if self.kind == "folder" else "")


def routes(site: Site, watchers: Watchers) -> list[BaseRoute]:
    """Return the addresses of the files of a run."""
    from starlette.routing import Route

    def page(request: Request) -> Response:
        """Return a file or a folder of the record."""
        run_id = store.find(site.directory, request.path_params["run"])
        return file_or_folder(site, run_id, request.path_params["path"], watchers.folder(run_id))

    return [Route("/run/{run}/files/{path:path}", page)]


def file_or_folder(site: Site, run_id: str, path: str, growing: Path) -> Response:
    """Return a file, or a page with the entries of a folder. ConfigError if the record has neither by this path.

    ``growing`` is the folder in which the files of GROWING are complete.
    """
    root, parts = store.directory(site.directory, run_id), path.removesuffix("/").split("/") if path else []
    try:
        content = open_file(growing if path in GROWING else root, parts, folder=path.endswith("/"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"run {run_id}: {path}: not found", hint=f"ls -l {root}") from error
    if content:
        return file_response(parts[-1], content)
    base = f"{site.root}/run/{run_id}"
    above = f"{base}/files/{quote('/'.join(parts[:-1]))}".rstrip("/") + "/" if parts else base
    title, folder = "/".join(parts), root.joinpath(*parts)
    entries, others = list_folder(root, parts) if parts else list_record(root, growing)
    here = f"{base}/files/" + "".join(f"{quote(part)}/" for part in parts)
    values: dict[str, Any] = {"title": title, "above": above, "base": here, "folder": folder, "run_id": run_id}
    return site.page("folder.html.j2", here="", entries=entries, others=others, **values)


def open_file(root: Path, parts: Sequence[str], *, folder: bool = False) -> BinaryIO | None:
    """Open a file below a folder without following a link on the way; None if it is a folder. OSError if neither.

    ``folder``: it has to be one.
    """
    if not all(map(_is_name, parts)):
        raise OSError("not below the record")
    with files.open_below(root, Path(*parts[:-1])) as above:
        name = parts[-1] if parts else "."
        if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            return None
        if folder:
            raise NotADirectoryError(name)
        return files.open_regular(name, above)


def _is_name(part: str) -> bool:
    """Return True if a part of a path is the name of an entry."""
    return part not in ("", ".", "..") and "\0" not in part


def list_record(root: Path, growing: Path) -> tuple[list[Entry], int]:
    """Return the same as ``list_folder`` of a record, with the sizes of GROWING in the folder where they are."""
    entries, others = list_folder(root, ())
    # The folder is gone once the last page of the run that follows it closes, as at its end.
    with suppress(OSError):
        grown = {entry.name: entry for entry in list_folder(growing, ())[0] if entry.name in GROWING}
        entries = [grown.get(entry.name, entry) for entry in entries]
    return entries, others


def list_folder(root: Path, parts: Sequence[str]) -> tuple[list[Entry], int]:
    """Return the first entries of a folder, folders first, and the number of others. OSError if it cannot be read."""
    with files.open_below(root, Path(*parts)) as folder, os.scandir(folder) as entries:
        all_entries = sorted(map(_entry, entries), key=lambda entry: (entry.kind != "folder", entry.name))
    return all_entries[:MOST_ENTRIES], max(0, len(all_entries) - MOST_ENTRIES)


def _entry(entry: os.DirEntry[str]) -> Entry:
    """Return an entry with its size; a name that is no text with signs in place of what is not."""
    name = os.fsencode(entry.name).decode("utf-8", "replace")
    if entry.is_symlink():
        return Entry(name, "link")
    if entry.is_dir(follow_symlinks=False):
        return Entry(name, "folder")
    is_file = entry.is_file(follow_symlinks=False)
    return Entry(name, "file", entry.stat(follow_symlinks=False).st_size) if is_file else Entry(name, "other")


def file_response(name: str, content: BinaryIO) -> Response:
    """Return a file as it is now: a text as text, whatever its name, a picture as PNG, others to be saved."""
    from starlette.responses import StreamingResponse

    size, start = os.fstat(content.fileno()).st_size, content.peek(SNIFFED)[:SNIFFED]  # type: ignore[attr-defined]
    kind = media_type(name, start)
    headers = {**POLICY, "content-length": str(size)}
    if kind == "application/octet-stream":
        headers["content-disposition"] = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    return StreamingResponse(_pieces(content, size), media_type=kind, headers=headers)


def media_type(name: str, start: bytes) -> str:
    """Return the media type of a file by its first bytes."""
    if name.lower().endswith(".png") and start.startswith(PNG):
        return "image/png"
    try:
        # The last character may be cut.
        start.decode() if len(start) < SNIFFED else start[:-3].decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 6:
            return "application/octet-stream"
    return "application/octet-stream" if b"\0" in start else "text/plain; charset=utf-8"


def _pieces(content: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the first bytes of a file, which may grow meanwhile."""
    with content:
        while size > 0 and (piece := content.read(min(PIECE, size))):
            size -= len(piece)
            yield piece
