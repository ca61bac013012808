"""``labctl freeze`` and ``verify``: record the state of a lab in a file, and compare the lab with it later.

The file is sorted JSON with one fact per line, so that git shows changes and versions such as 1.10 stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.backends import Backend
from labctl.backends.health import FINGERPRINT
from labctl.errors import ConfigError, HostError
from labctl.system import files, human

LOCK = "lab.lock"
SCHEMA = 1
WHERE = ("hosts", "nodes")
"""Parts of the file that have facts per host or node."""


class FrozenLab(Struct, frozen=True, kw_only=True):
    """The file, its number of facts, and if it was changed."""

    lock: str
    facts: int
    changed: bool


class Drift(Struct, frozen=True, kw_only=True):
    """A fact that has changed, empty if it is or was missing; ``where`` is a host, a node, or ``lab``."""

    what: str
    where: str
    was: str
    now: str


class Verification(Struct, frozen=True, kw_only=True):
    """Facts that differ from a lock file, which has ``facts`` of them."""

    lock: str
    facts: int
    drift: tuple[Drift, ...]


# --- the file ------------------------------------------------------------------------------------------------


def freeze(backend: Backend, file: Path) -> FrozenLab:
    """Write the lab's facts to a lock file; return their count and if it changed. HostError if a host is silent."""
    document = backend.freeze()
    changed = write(file, document)
    return FrozenLab(lock=str(file), changed=changed, facts=count(document))


def write(path: Path, document: Mapping[str, Any]) -> bool:
    """Write a lock file as sorted JSON unless it is the same; return True if it changed. HostError if it fails."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        if not same:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}") from error
    return not same


def read(path: Path) -> dict[str, Any]:
    """Read a lock file. ConfigError if it is missing, not one of `freeze`, or of another schema."""
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
    """Return the number of facts in a document."""
    return len(dict(_facts(document)))


def verify(backend: Backend, lock: str, before: Mapping[str, Any]) -> Verification:
    """Compare the lab with a lock file's facts; return the differing ones. HostError if a host is silent.

    Warn of hosts whose hardware is not compared.
    """
    now = backend.freeze()
    if hosts := _without_hardware(before, now):
        backend.context.warn(
            f"{lock} has no hardware of {human.listed(hosts, 4)} to compare: `labctl freeze` records it"
        )
    return differences(lock, before, now)


def differences(lock: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Verification:
    """Return all facts that differ between two documents of `freeze`, empty where one lacks a fact.

    A host's hardware is compared if both have it: an older labctl did not record it. So is each fact of an item: one
    that sleeps does not tell its PCIe width and speed.
    """
    was, is_now = dict(_facts(_comparable(before, now))), dict(_facts(_comparable(now, before)))
    keys = dict.fromkeys((*was, *is_now))
    drift = (
        Drift(what=name, where=place, was=was.get((place, name), ""), now=is_now.get((place, name), ""))
        for place, name in keys
        if was.get((place, name), "") != is_now.get((place, name), "")
    )
    return Verification(lock=lock, facts=len(was), drift=tuple(drift))


def _without_hardware(document: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hosts of both documents whose hardware only the other one has."""
    hosts, others = document.get("hosts") or {}, other.get("hosts") or {}
    return tuple(
        name for name, facts in hosts.items() if FINGERPRINT not in facts and FINGERPRINT in others.get(name, {})
    )


def _comparable(document: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the hardware of its hosts that can be compared with that of another document."""
    others = other.get("hosts") or {}
    hosts = {
        host: _comparable_host(facts, others[host]) if host in others else facts
        for host, facts in (document.get("hosts") or {}).items()
    }
    return {**document, "hosts": hosts}


def _comparable_host(facts: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a host's facts with the hardware that can be compared with that of another document: none without both."""
    rest = {name: value for name, value in facts.items() if name != FINGERPRINT}
    if FINGERPRINT not in facts or FINGERPRINT not in other:
        return rest
    return {**rest, FINGERPRINT: dict(_common(facts[FINGERPRINT], other[FINGERPRINT]))}


def _common(facts: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts that both have, by name, of the host and of each item; of an item that the other lacks, all."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield name, {each: text for each, text in value.items() if each in other.get(name, value)}
        elif name in other:
            yield name, value


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((place, name), value) of each fact: ``("lab", "packages torch")``, ``("worker-1", "image")``."""
    for part, content in document.items():
        if part in WHERE:
            for place, facts in content.items():
                yield from (((place, name), value) for name, value in _flat("", facts))
        else:
            yield from ((("lab", name), value) for name, value in _flat(part, content))


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the values of nested mappings, names joined by blanks; skip None."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name} {key}".lstrip(), inner)
    elif value is not None:
        yield name, str(value)
