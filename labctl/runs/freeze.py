"""``labctl freeze`` and ``verify``: what a lab is, as a file; and how what it is now differs from that.

The file is JSON, sorted, with one fact a line: git shows what changed, and no version such as 1.10 can be read as a
number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends import Backend
from labctl.errors import ConfigError, HostError
from labctl.system import files

LOCK = "lab.lock"
SCHEMA = 1
WHERE = ("hosts", "nodes")
"""The parts of the file that say something of one host or node each."""


class FrozenLab(Struct, frozen=True, kw_only=True):
    """The file that was written, how many facts it holds, and whether that made it another."""

    lock: str
    facts: int
    changed: bool


class Drift(Struct, frozen=True, kw_only=True):
    """A fact that is not as it was, empty where there is or was none. ``where``: a host, a node, or the lab."""

    what: str
    where: str
    was: str
    now: str


class Verification(Struct, frozen=True, kw_only=True):
    """What is not as a file has it, of so many facts."""

    lock: str
    facts: int
    drift: tuple[Drift, ...]


# --- the file ------------------------------------------------------------------------------------------------


def freeze(backend: Backend, file: Path) -> FrozenLab:
    """Write what the lab is now. HostError if a host does not answer."""
    document = backend.freeze()
    changed = write(file, document)
    return FrozenLab(lock=str(file), changed=changed, facts=count(document))


def write(path: Path, document: Mapping[str, Any]) -> bool:
    """Write it; whether that changed the file. HostError."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        if not same:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}") from error
    return not same


def read(path: Path) -> dict[str, Any]:
    """What a file has of a lab. ConfigError where it is none that `freeze` wrote."""
    try:
        document = json.loads(files.read_limited(path))
        schema = document["schema"]
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="labctl freeze writes it") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} was not written by `labctl freeze`: {error}", hint="labctl freeze --out FILE"
        ) from error
    if schema != SCHEMA:
        raise ConfigError(f"{path} is of schema {schema}, and this labctl writes {SCHEMA}", hint="labctl freeze")
    return dict(document)


def count(document: Mapping[str, Any]) -> int:
    return len(dict(_facts(document)))


def verify(backend: Backend, lock: str, before: Mapping[str, Any]) -> Verification:
    """Compare the lab with what it was; facts of the lab come first."""
    return differences(lock, before, backend.freeze())


def differences(lock: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Verification:
    """Return each fact that differs, those of the lab first."""
    was, is_now = dict(_facts(before)), dict(_facts(now))
    keys = dict.fromkeys((*was, *is_now))
    drift = (
        Drift(what=what, where=where, was=was.get((where, what), ""), now=is_now.get((where, what), ""))
        for where, what in keys
        if was.get((where, what), "") != is_now.get((where, what), "")
    )
    return Verification(lock=lock, facts=len(was), drift=tuple(drift))


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """Each fact by where it is and what it is: ``lab`` and ``packages torch``, ``worker-1`` and ``image``."""
    for part, content in document.items():
        if part in WHERE:
            for name, facts in content.items():
                yield from (((name, what), str(value)) for what, value in facts.items() if value is not None)
        else:
            yield from ((("lab", what), value) for what, value in _flat(part, content))


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name} {key}", inner)
    elif value is not None:
        yield name, str(value)
