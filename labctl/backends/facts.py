"""Facts of a lab's directory, for `labctl freeze`."""

from __future__ import annotations

from pathlib import Path

from labctl.config.settings import Settings
from labctl.records import manifest


def settings_given(settings: Settings) -> dict[str, str]:
    """Return non-empty settings that are not at their default, by key, with secrets redacted."""
    return {key: value for key, value, origin in settings.rows() if value and origin != "default"}


def workload_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below ``workloads/``, or a link's target, by path in the lab; {} without."""
    root = directory / "workloads"
    entries = manifest.scan(root).entries if root.is_dir() else ()
    return {f"workloads/{entry.path}": entry.content for entry in entries if entry.kind != "dir"}
