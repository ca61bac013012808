"""``labctl init``: creates .env, hosts.txt, hostfiles and workloads in a lab directory."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.system import files
from labctl.system.files import make_private, write

HOSTS = "hosts.txt"
"""The inventory; not used until LAB_HOSTS names it."""


class InitializedLab(Struct, frozen=True):
    """A lab directory and the paths that were written in it."""

    directory: str
    written: tuple[str, ...]


def initialise(directory: Path) -> tuple[str, ...]:
    """Create a lab directory, write the files that it lacks, and return their names. ConfigError if it is a file."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file", hint="labctl init DIRECTORY")
    make_private(directory)
    written = [name for name in ("hostfiles", "workloads") if copy_tree(name, directory)]
    settings = files.path("env.example").read_text(encoding="utf-8")
    texts = {
        HOSTS: files.path("hosts.example").read_text(encoding="utf-8"),
        ".env": re.sub(r"^LAB_NAME=.*$", f"LAB_NAME={lab_name(directory)}", settings, flags=re.MULTILINE),
    }
    for name, text in texts.items():
        if not (directory / name).exists():
            write(directory / name, text)
            written.append(name)
    return tuple(written)


def copy_tree(name: str, directory: Path) -> bool:
    """Copy a folder that labctl ships into a directory; return False, copying nothing, if it has files there."""
    target = directory / name
    if target.exists() and any(target.iterdir()):
        return False
    shutil.copytree(files.path(name), target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return True


def lab_name(directory: Path) -> str:
    """Return a lab name: the directory's name as a DNS label, and 4 hex digits of its path's hash."""
    stem = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:30] or "lab"
    return f"{stem}-{hashlib.sha256(str(directory).encode()).hexdigest()[:4]}"
