"""The settings that `up` made a lab from, by their digests: names those that were changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from labctl.config import override
from labctl.config.settings import Settings
from labctl.model import File
from labctl.records.store import sha256

FILE = ".lab/applied.json"
"""The file with the digests, in the lab directory. It only names a reason: containers tell if they are out of date."""
APART = (
    "LAB_K8S_", "LAB_ENGINE", "LAB_IMAGE_FROM", "LAB_PIP_", "LAB_TORCH_INDEX", "LAB_APT_MIRROR", "LAB_RUN_PATIENCE",
    "LAB_STALL_SECONDS", "LAB_PREFLIGHT",
)  # fmt: skip
"""Beginnings of settings that no container on Docker is made from."""


def file(directory: Path, settings: Settings) -> File:
    """Return the file with the digests of the settings that a lab is made from."""
    return File(path=FILE, content=json.dumps(dict(_digests(directory, settings)), indent=2))


def changed(directory: Path, settings: Settings) -> tuple[str, ...]:
    """Return the settings that differ from those that the lab was made from; none if that is not known."""
    try:
        before = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    now = dict(_digests(directory, settings))
    return tuple(key for key in sorted({*before, *now}) if before.get(key) != now.get(key))


def _digests(directory: Path, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each setting that containers are made from, and of the override file."""
    for setting in (*settings.values.values(), *settings.extra):
        if not setting.key.startswith(APART):
            yield setting.key, sha256(setting.value.encode("utf-8", "surrogateescape"))[:16]
    added = directory / override.FILE
    if added.is_file():
        yield override.FILE, sha256(added.read_bytes())[:16]
