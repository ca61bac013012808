"""Text to train on: licence texts that every image has, text files by pieces, data sets in the Hugging Face cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from script_exit import InputError

LICENCES = Path("/usr/share/common-licenses")
"""English prose that Debian's base-files puts into every Debian and Ubuntu image."""
PIECE = 1 << 20


def files_below(directory: Path) -> list[Path]:
    """Return all regular files below a directory, sorted; no symbolic links."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def read_plain(file: Path) -> Iterator[str]:
    """Yield a file's text in pieces of whole lines, about 1 MiB each."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        while lines := stream.readlines(PIECE):
            yield "".join(lines)


def cached_dataset(name: str, *configuration: str) -> Any:
    """Load split ``train`` of a cached data set, offline. InputError if it, or ``datasets``, is missing."""
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"{name} needs the package 'datasets', which is not installed") from error
    try:
        if snapshot := fetched_dataset(name):
            return datasets.load_dataset(snapshot, *configuration, split="train")
        with contextlib.suppress(OSError, ValueError):
            return datasets.load_dataset(name, *configuration, split="train")
        # Where they are kept unless told otherwise, as by Lambda's DeepSpeed-Chat scripts.
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
        return datasets.load_dataset(name, *configuration, split="train", cache_dir=str(home / "datasets"))
    except (OSError, ValueError) as error:
        cache, reason = datasets.config.HF_DATASETS_CACHE, str(error).splitlines()[0]
        raise InputError(f"{':'.join((name, *configuration))} is not in the cache {cache}: {reason}") from error


def fetched_dataset(name: str) -> str | None:
    """Return the path of a data set's newest snapshot in the hub's cache; None if there is none."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = (hub / f"datasets--{name.replace('/', '--')}" / "snapshots").glob("*")
    return max(map(str, found), key=os.path.getmtime, default=None)
