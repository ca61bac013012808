"""The settings that `up` made a lab from, by their digests: names those that were changed since."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from labctl.config import override
from labctl.config.settings import Settings
from labctl.model import File
from labctl.records.store import sha256

FILE = ".lab/applied.json"
"""The file with the digests, in the lab directory. It only names a reason: containers tell if they are out of date."""
MADE_FROM = frozenset((
    *("LAB_NAME", "LAB_ACCELERATOR", "LAB_HOSTS", "LAB_SHARED_DIR", "LAB_NODES", "LAB_SLOTS", "LAB_DEVICES"),
    *("LAB_IMAGE", "LAB_PACKAGES", "LAB_REQUIREMENTS", "LAB_APT", "LAB_DOCKERFILE", "LAB_SSH_PORT"),
    *("LAB_MASTER_PORT", "LAB_PORTS", "LAB_SSHD_LOG_LEVEL", "LAB_SHM_SIZE", "LAB_MEMORY", "LAB_MEMLOCK"),
    *("LAB_STACK", "LAB_NOFILE", "LAB_PIDS", "LAB_MOUNTS", "HOST_CACHE_PATH", "HOST_REPO_PATH"),
    *("HOST_OPTIMUM_HABANA_PATH", "PROJECT_PATH", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
))  # fmt: skip
"""Settings that containers on Docker are made from, besides the user's own variables."""


class Applied(Struct, frozen=True):
    """The file's content; the salt keeps values, some of which are secret, from being guessed by their digests."""

    salt: str
    digests: dict[str, str]


def file(directory: Path, settings: Settings) -> File:
    """Return the file with the digests of the settings that a lab is made from."""
    salt = secrets.token_hex(16)
    content = msgspec.json.encode(Applied(salt, dict(_digests(directory, settings, salt))))
    return File(path=FILE, content=msgspec.json.format(content).decode())


def changed(directory: Path, settings: Settings) -> tuple[str, ...]:
    """Return the settings that differ from those that the lab was made from; none if that is not known."""
    try:
        before = msgspec.json.decode((directory / FILE).read_bytes(), type=Applied)
    except (OSError, ValueError):
        return ()
    then, now = before.digests, dict(_digests(directory, settings, before.salt))
    return tuple(key for key in sorted({*then, *now}) if then.get(key) != now.get(key))


def _digests(directory: Path, settings: Settings, salt: str) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each setting that containers are made from, and of the override file."""
    chosen = [setting for key, setting in settings.values.items() if key in MADE_FROM]
    for setting in (*chosen, *settings.extra):
        yield setting.key, _digest(salt, setting.value.encode("utf-8", "surrogateescape"))
    added = directory / override.FILE
    if added.is_file():
        yield override.FILE, _digest(salt, added.read_bytes())


def _digest(salt: str, value: bytes) -> str:
    return sha256(salt.encode() + value)
