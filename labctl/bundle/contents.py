"""The contents of a bundle: the lab's files, without keys and secrets unless asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from labctl.config import dotenv, settings
from labctl.errors import ConfigError
from labctl.images import catalog
from labctl.system.files import is_below, leads_out

NODES = ".lab/nodes"
FOLDERS = ("workloads", "hostfiles", NODES)
"""Of a lab directory, beside .env and the list of hosts."""
SKIPPED = frozenset({"__pycache__", ".git"})
PASSWORDS = frozenset({".env", ".netrc", ".git-credentials", ".pypirc"})
"""Names of files of other programs with passwords and tokens."""
TOKENS = frozenset({"huggingface/token", "huggingface/stored_tokens"})
"""Token files of a Hub login in a cache."""
KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|^PuTTY-User-Key-File", re.MULTILINE)
HEAD = 1 << 20
"""Bytes of a file to search for the begin of a private key."""
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*\S")
LOGIN = re.compile(r"://\S*@|_proxy=\S*@|\bhf_[A-Za-z0-9]{8}", re.IGNORECASE)
"""A URL with a password, and a token of the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file by its path in the lab directory, with its source (a file or content) or a link's target."""

    name: str
    mode: int = 0o644
    source: Path | bytes = field(default=b"", repr=False)
    target: str = ""


@dataclass(frozen=True, slots=True)
class ExcludedFile:
    """A file, or a line of .env, that is not in the bundle."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class BundleContents:
    """The files of a bundle, and those that are excluded."""

    entries: tuple[Entry, ...]
    excluded: tuple[ExcludedFile, ...]


def of_lab(directory: Path, *, secrets: bool) -> BundleContents:
    """The lab's settings, inventory, workloads and node directories; with ``secrets`` also keys and passwords."""
    env = settings.load(directory, {"HOME": "/"}, {})
    written = (directory / ".env").read_text(encoding="utf-8")
    text, blanked = (written, ()) if secrets else without_secrets(written, env)
    entries = [Entry(name=".env", mode=0o600, source=text.encode())]
    excluded = [ExcludedFile(f".env: {key}", "a secret") for key in blanked]
    hosts = env.text("LAB_HOSTS")
    if hosts and is_below(hosts) and (directory / hosts).is_file():
        entries.append(Entry(name=hosts, source=directory / hosts))
    elif hosts:
        excluded.append(ExcludedFile(hosts, "not in the lab directory"))
    for folder in FOLDERS:
        for entry in walk(directory, folder):
            reason = "" if secrets else why_secret(entry)
            if leads_out(entry.name, entry.target):
                reason = "points outside the lab"
            if reason:
                excluded.append(ExcludedFile(entry.name, reason))
            else:
                entries.append(entry)
    unique = {entry.name: entry for entry in entries}
    return BundleContents(tuple(unique.values()), tuple(excluded))


def of_cache(cache: Path) -> Iterator[Entry]:
    """The files of the shared cache, without locks, partial downloads and tokens."""
    for entry in walk(cache, "."):
        own = entry.name.endswith((".lock", ".incomplete")) or entry.name in TOKENS
        if not own and not leads_out(entry.name, entry.target):
            yield entry


def locks_of(names: Iterable[str]) -> dict[str, Path]:
    """The lock files of labctl's images among these, and of their base images."""
    found: dict[str, Path] = {}
    for name in names:
        own = catalog.name_of(name)
        while own:
            if catalog.file(own, "lock").is_file():
                found[f"{own}.lock"] = catalog.file(own, "lock")
            own = catalog.base_of(own)
    return found


def without_secrets(text: str, env: settings.Settings) -> tuple[str, tuple[str, ...]]:
    """The text of .env without secrets, and their keys."""
    values = {f".env:{entry.line}": entry for entry in dotenv.parse(text, ".env")}
    hidden = {
        values[origin].line: values[origin].key
        for _, shown, origin in env.rows()
        if origin in values and is_secret(values[origin], shown)
    }
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if number not in hidden and tells_secret(line.partition("#")[2]):
            hidden[number] = values[f".env:{number}"].key if f".env:{number}" in values else f"line {number}"
    for number, key in hidden.items():
        lines[number - 1] = f"# {key}: left out of the bundle"
    return "\n".join(lines), tuple(hidden.values())


def is_secret(entry: dotenv.Entry, shown: str) -> bool:
    """Whether a value is redacted by ``config`` or has a password in a URL; a digest has an @ too."""
    return shown == "set" != entry.value or bool(re.search(r"://\S*@", entry.value)) or is_login(entry)


def tells_secret(comment: str) -> bool:
    """Whether a comment looks like it has a secret, such as a commented-out setting."""
    return bool(LOGIN.search(comment)) or any(settings.sounds_secret(key) for key in ASSIGNED.findall(comment))


def is_login(entry: dotenv.Entry) -> bool:
    return entry.key.lower().endswith("_proxy") and "@" in entry.value


def walk(root: Path, folder: str) -> Iterator[Entry]:
    """Files and links below a directory, by sorted paths relative to the root."""
    for where, folders, files in os.walk(root / folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        here = Path(where)
        for name in sorted([*files, *(one for one in folders if (here / one).is_symlink())]):
            path = here / name
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                yield Entry(name=relative, target=str(path.readlink()))
            elif path.is_file():
                yield Entry(name=relative, mode=path.stat().st_mode & 0o777, source=path)


def why_secret(entry: Entry) -> str:
    """Why a file is secret; empty if it is not."""
    if entry.name.startswith(NODES) and "secrets" in PurePosixPath(entry.name).parts:
        return "a secret"
    if PurePosixPath(entry.name).name in PASSWORDS:
        return "may contain passwords"
    if isinstance(entry.source, Path):
        try:
            with entry.source.open("rb") as file:
                return "a private key" if KEY.search(file.read(HEAD)) else ""
        except OSError as error:
            raise ConfigError(f"cannot read {entry.source}: {error.strerror}", hint=f"ls -l {entry.source}") from error
    return ""
