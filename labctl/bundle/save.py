"""Writes a bundle file."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from labctl.bundle import contents
from labctl.bundle.contents import Entry, ExcludedFile
from labctl.bundle.format import BundleWriter
from labctl.errors import ConfigError, HostError
from labctl.images import local
from labctl.system import process
from labctl.system.progress import Progress, amount

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBundle:
    """A bundle that was written, and what is in it."""

    file: str
    bytes: int
    labctl: str
    lab: str
    images: tuple[str, ...]
    created: str
    cache: bool
    secrets: bool
    excluded: tuple[ExcludedFile, ...]


def write(
    path: Path,
    directory: Path,
    lab: str,
    images: tuple[str, ...],
    size: int,
    notice: Notice,
    *,
    cache: Path | None = None,
    secrets: bool = False,
) -> SavedBundle:
    """Write the bundle of the lab in a directory, with these images (``size`` bytes in all) and a cache.

    HostError if an image is not found or the disk is full. An existing file is replaced atomically.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint=f"name a file in it: {shlex.quote(str(path / 'lab.bundle'))}")
    chosen = contents.of_lab(directory, secrets=secrets)
    # The format of the file, as in its first version: these keys stay.
    about: dict[str, Any] = {
        "labctl": metadata.version("labctl"),
        "lab": lab,
        "images": list(images),
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cache": cache is not None,
        "secrets": secrets,
        "left_out": [{"what": entry.path, "why": entry.reason} for entry in chosen.excluded],
    }
    with beside(path) as partial:
        notice(f"writing {', '.join(images)}")
        local.save(images, partial, size, notice)
        partial.chmod(0o600)
        with BundleWriter(partial, about) as sealer:
            for entry in chosen.entries:
                put(sealer, "lab", entry)
            for name, lock in contents.locks_of(images).items():
                sealer.add(f"locks/{name}", lock)
            if cache:
                put_cache(sealer, cache, notice)
        size = partial.stat().st_size
        partial.replace(path)
    notice(f"{path}: {amount(size)}")
    return SavedBundle(
        file=str(path),
        bytes=size,
        labctl=about["labctl"],
        lab=lab,
        images=images,
        created=about["written"],
        cache=cache is not None,
        secrets=secrets,
        excluded=chosen.excluded,
    )


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary file beside the path, removed in any case."""
    try:
        with (
            tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder,
            process.guarded(("rm", "-rf", folder)),
        ):
            yield Path(folder, "partial")
    except OSError as error:
        raise HostError(
            f"cannot write {path}: {error.strerror}", hint=f"df -h {shlex.quote(str(path.parent))}"
        ) from error


def put(sealer: BundleWriter, folder: str, entry: Entry) -> None:
    if entry.target:
        sealer.link(f"{folder}/{entry.name}", entry.target)
    else:
        sealer.add(f"{folder}/{entry.name}", entry.source, entry.mode)


def put_cache(sealer: BundleWriter, cache: Path, notice: Notice) -> None:
    entries = tuple(contents.of_cache(cache))
    sizes = {entry: entry.source.stat().st_size for entry in entries if isinstance(entry.source, Path)}
    progress = Progress(str(cache), sum(sizes.values()), 0, notice)
    for entry in entries:
        put(sealer, "cache", entry)
        progress.advance(sizes.get(entry, 0))
    progress.finish()
